"""Fetches a Chromium for the browser tests: Debian's packages, unpacked into the cache. Needs apt and dpkg, not root.

apt downloads and verifies the packages with lists of its own, so that nothing of the system changes. Libraries that the
system has are not fetched.

Usage: python tools/fetch_browser.py. Prints the executable's path; where there is no apt, it says so and exits 0, and
the browser tests are skipped.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "chromium-headless-shell"
FONTS = ("fonts-inter", "fonts-dejavu-core")


def browser_folder() -> Path:
    cache = os.environ.get("QUIRE_CACHE") or Path.home() / ".cache" / "quire"
    return Path(cache) / "chromium"


def executable(folder: Path | None = None) -> Path | None:
    """A script that starts the browser with its libraries; None if it was not fetched."""
    path = (folder or browser_folder()) / "chromium"
    return path if path.exists() else None


def fetch(folder: Path) -> Path:
    """Unpacks the packages into `folder`, all or nothing. Raises CalledProcessError with apt's message."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        temporary = Path(scratch)
        for name in ("lists/partial", "cache/archives/partial", "packages", "files"):
            (temporary / name).mkdir(parents=True)
        apt = ["apt-get", "-o", f"Dir::State::lists={temporary}/lists", "-o", f"Dir::Cache={temporary}/cache"]
        _run([*apt, "-qq", "update"], temporary)
        listed = _run(
            [*apt, "--print-uris", "-y", "--no-install-recommends", "install", PACKAGE, *FONTS], temporary
        )
        names = [line.split()[1].partition("_")[0] for line in listed.splitlines() if line.startswith("'")]
        _run([*apt, "-qq", "download", *names], temporary / "packages")
        for package in sorted((temporary / "packages").glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(temporary / "files")], temporary)
        shutil.rmtree(folder, ignore_errors=True)
        (temporary / "files").rename(folder)
    return _launcher(folder)


def _launcher(folder: Path) -> Path:
    """The last file written: it marks a complete fetch."""
    programs = [path for path in folder.rglob(PACKAGE) if path.is_file() and os.access(path, os.X_OK)]
    program = next(path for path in programs if path.read_bytes()[:4] == b"\x7fELF")
    libraries = sorted({str(path.parent) for path in folder.rglob("*.so*")})
    fonts = folder / "fonts.conf"
    fonts.write_text(
        '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>'
        f"<dir>/usr/share/fonts</dir><dir>{folder}/usr/share/fonts</dir>"
        f"<cachedir>{folder}/font-cache</cachedir>"
        "<alias><family>system-ui</family><prefer><family>Inter</family><family>DejaVu Sans</family></prefer></alias>"
        "<alias><family>sans-serif</family><prefer><family>Inter</family><family>DejaVu Sans</family></prefer></alias>"
        "<alias><family>ui-monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>"
        "</fontconfig>\n"
    )
    script = folder / "chromium"
    script.write_text(
        f'#!/bin/sh\nexport LD_LIBRARY_PATH="{":".join(libraries)}"\nexport FONTCONFIG_FILE="{fonts}"\n'
        f'exec "{program}" "$@"\n'
    )
    script.chmod(0o755)
    return script


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def main() -> int:
    folder = browser_folder()
    path = executable(folder)
    if path is None and (shutil.which("apt-get") is None or shutil.which("dpkg") is None):
        print("no apt-get here: the browser tests will be skipped", file=sys.stderr)
        return 0
    try:
        path = path or fetch(folder)
    except subprocess.CalledProcessError as error:
        print(
            f"the browser cannot be fetched, its tests will be skipped: {error.stderr.strip()}",
            file=sys.stderr,
        )
        return 0
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compiles the native kernels once and caches the library. `main` does it ahead of use.

The library is plain C++ with a C interface, built without torch's headers. It is stored under
`$QUIRE_CACHE` or `~/.cache/quire`, in a folder named by a hash of sources, flags and compiler.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.observe.host import cache_folder

FOLDER = Path(__file__).parent
LIBRARY_NAME = "libquire.so"
BASE_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility-inlines-hidden")

_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX512_FLAGS = _AVX2_FLAGS + tuple(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))
_ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2_FLAGS,
    "avx512": (*_AVX512_FLAGS, "-mprefer-vector-width=512"),
    "amx": (*_AVX512_FLAGS, "-mprefer-vector-width=512", "-mamx-tile", "-mamx-int8"),
}


class BuildError(RuntimeError):
    """The native kernels could not be compiled; the reference serves instead."""


def announce(say: Callable[[str], object]) -> None:
    """A line before the first start on a machine, whose minute of compiling would look like a hang."""
    with suppress(BuildError, OSError):  # without a compiler there is nothing to wait for
        if not library_path().exists():
            say("compiling kernels for this CPU, once: about a minute …")


@dataclass(frozen=True, slots=True)
class Unit:
    """One translation unit: a source and the instruction set that it is compiled for ("" for none)."""

    source: Path
    isa: str

    def flags(self) -> tuple[str, ...]:
        if not self.isa:
            return ()
        return (f"-DQUIRE_ISA={self.isa}", *_ISA_FLAGS.get(self.isa, ()))


def compiler() -> str:
    """The C++ compiler: $CXX, or the first of c++, g++, clang++ on the path."""
    for candidate in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if candidate and shutil.which(candidate.split()[0]):
            return candidate
    raise BuildError("no C++ compiler found: install g++ or clang++, or set CXX")


def library_path() -> Path:
    """The library's path for these sources, flags and compiler, whether it exists yet or not."""
    version = subprocess.run(
        [*compiler().split(), "--version"], capture_output=True, text=True, check=False
    ).stdout
    digest = hashlib.sha256(repr((version, BASE_FLAGS, _ISA_FLAGS, platform.machine())).encode())
    for source in sorted([*FOLDER.rglob("*.cpp"), *FOLDER.rglob("*.h")]):
        digest.update(source.relative_to(FOLDER).as_posix().encode())
        digest.update(source.read_bytes())
    return cache_folder() / "kernels" / digest.hexdigest()[:20] / LIBRARY_NAME


def ensure_built() -> Path:
    """The library's path; compiles it if it does not exist. Of several processes one compiles, and the others wait."""
    target = library_path()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.parent.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                os.replace(_compile_all(Path(scratch)), target)
    return target


def _compile_all(scratch: Path) -> Path:
    shared = FOLDER / "cpp"
    isas = ["generic", *(_ISA_FLAGS if platform.machine().lower() in ("x86_64", "amd64") else ())]
    units = [Unit(shared / "unit.cpp", isa) for isa in isas]
    units += [Unit(shared / name, "") for name in ("pool.cpp", "group.cpp")]
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        failures = list(threads.map(lambda unit: _compile(unit, scratch), units))
    built = [unit for unit, failure in zip(units, failures, strict=True) if not failure]
    for unit, failure in zip(units, failures, strict=True):
        if failure and unit.isa in ("", "generic"):
            raise BuildError(f"{unit.source.name} does not compile:\n{failure}")
    # An old compiler may lack the newest instruction sets: the dispatcher learns which ones were built.
    present = [f"-DQUIRE_HAS_{unit.isa.upper()}" for unit in built if unit.isa]
    dispatch = Unit(shared / "dispatch.cpp", "")
    if failure := _compile(dispatch, scratch, present):
        raise BuildError(f"dispatch.cpp does not compile:\n{failure}")
    library = scratch / LIBRARY_NAME
    objects = [_object_path(unit, scratch) for unit in [*built, dispatch]]
    _run([*compiler().split(), "-shared", "-pthread", *map(str, objects), "-o", str(library)])
    return library


def _object_path(unit: Unit, scratch: Path) -> Path:
    return scratch / f"{unit.source.stem}_{unit.isa}.o"


def _compile(unit: Unit, scratch: Path, extra: list[str] | None = None) -> str:
    """Compiles one unit; returns the compiler's error output, "" on success."""
    command = [*compiler().split(), *BASE_FLAGS, *unit.flags(), *(extra or ())]
    try:
        _run([*command, "-pthread", "-c", str(unit.source), "-o", str(_object_path(unit, scratch))])
    except BuildError as failure:
        return str(failure)
    return ""


def _run(command: list[str]) -> None:
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{outcome.stderr[-4000:]}")
    if outcome.stderr and os.environ.get("QUIRE_BUILD_WARNINGS"):
        sys.stderr.write(outcome.stderr)


def main() -> int:
    """Compiles the native kernels ahead of use and prints what it did; exit status 0 also without a compiler."""
    try:
        path = library_path()
        if path.exists():
            print(f"native kernels are up to date: {path}")
            return 0
        print(f"compiling native kernels with {compiler()} ...", flush=True)
        start = time.perf_counter()
        ensure_built()
        print(f"compiled in {time.perf_counter() - start:.1f} s: {path}")
    except BuildError as failure:
        print(f"native kernels not built, the torch reference will serve: {failure}", file=sys.stderr)
    return 0

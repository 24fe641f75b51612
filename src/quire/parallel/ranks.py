"""RankProcesses: the peers of rank 0. Starts them, sends them frames, and tells which one is gone and why.

A peer reads frames from its stdin, whose end tells it that rank 0 is gone, and reports through a pipe: a byte now and
then while it lives, and a line of JSON if it fails.
"""

import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from quire.core import errors
from quire.core.errors import EngineDead, QuireError

if TYPE_CHECKING:  # it brings torch, which fleet/ray_ranks.py does without
    from quire.parallel.group import Group

BEAT_SECONDS = 0.25
LATE_SECONDS = 1.0  # without a beat: the process is looked at
SILENT_SECONDS = 20.0  # without a beat, on a machine that may be out of memory
START_SECONDS = 300.0  # before the first beat
CLOSE_SECONDS = 3.0
BEAT = b"\0"  # not in JSON
_LENGTH = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def read_frames(stream: BinaryIO) -> Iterator[bytes]:
    """Until the other end closes; a frame that is cut off then is dropped."""
    while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if len(data := stream.read(length)) < length:
            return
        yield data


class RankProcesses:
    """Ranks 1 … size - 1, each `python -m MODULE RANK REPORTS MEMORY` with `settings` as its first frame."""

    def __init__(self, module: str, size: int, memory: int, settings: dict[str, Any]) -> None:
        """`memory`: a descriptor that the peers inherit."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reports: list[int] = []
        self._groups: tuple[Group, ...] = ()
        self._fault: QuireError | None = None
        self._closing = False
        for rank in range(1, size):
            reports, end = os.pipe()
            command = (sys.executable, "-m", module, str(rank), str(end), str(memory))
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=2, pass_fds=(end, memory), start_new_session=True
            )
            os.close(end)
            self._processes.append(process)
            self._reports.append(reports)
        self.send(json.dumps(settings).encode())
        threading.Thread(target=self._watch, name="ranks-watch", daemon=True).start()

    def attach(self, *groups: "Group") -> None:
        """The groups that no rank may wait in once one is gone."""
        for group in groups:
            group.check = self.check
        self._groups = groups
        if self._fault is not None:
            self._abort()

    def send(self, data: bytes) -> None:
        framed = frame(data)
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the watching thread says why
                process.stdin.write(framed)
                process.stdin.flush()

    def check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Ends all of them. Calling it twice is fine."""
        self._closing = True
        for group in self._groups:
            group.check = _closed  # what waits in it fails without a fault to wait for
        for process in self._processes:
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # ------------------------------------------------------------------ watching, in a thread

    def _watch(self) -> None:
        waiting = selectors.DefaultSelector()
        texts = dict.fromkeys(range(1, len(self._processes) + 1), b"")
        beats = dict.fromkeys(texts, time.monotonic() + START_SECONDS)  # of each rank, the last
        for rank, reports in enumerate(self._reports, start=1):
            waiting.register(reports, selectors.EVENT_READ, rank)
        while not self._closing and self._fault is None:
            for key, _events in waiting.select(BEAT_SECONDS):
                rank, data = key.data, os.read(key.fd, 65536)
                beats[rank] = time.monotonic()
                texts[rank] += data.replace(BEAT, b"") if not texts[rank] else data
                if not data or texts[rank].endswith(b"\n"):
                    self._fail(rank, texts[rank])
            for rank, last in beats.items():
                if (why := self._silence(rank, time.monotonic() - last)) is not None:
                    self._failed(EngineDead(f"{self._name(rank)} {why}"))
        for reports in self._reports:
            os.close(reports)

    def _fail(self, rank: int, report: bytes) -> None:
        """It said why, or it is gone without a word."""
        if report.endswith(b"\n"):
            try:
                kind, message = json.loads(report)
                fault = getattr(errors, kind, EngineDead)(f"rank {rank}: {message}")
            except Exception as error:  # this thread must not end: no other one would name the rank
                fault = EngineDead(
                    f"{self._name(rank)} sent a report that cannot be read ({error}): it was ended"
                )
            self._failed(fault)
            return
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank - 1].wait(1.0)
        code = self._processes[rank - 1].returncode
        how = (
            f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        )
        self._failed(EngineDead(f"{self._name(rank)} {how}: its part of the model is gone with it"))

    def _silence(self, rank: int, seconds: float) -> str | None:
        if 0.0 <= seconds < LATE_SECONDS:
            return None
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{self._processes[rank - 1].pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] in "Tt":
                return "is stopped, by SIGSTOP or a debugger: it cannot take part in a step"
        return f"gave no sign of life for {seconds:.0f} s" if seconds > SILENT_SECONDS else None

    def _name(self, rank: int) -> str:
        return f"rank {rank} (pid {self._processes[rank - 1].pid})"

    def _failed(self, fault: QuireError) -> None:
        if self._closing or self._fault is not None:
            return
        self._fault = fault
        for process in self._processes:  # no half of a group goes on
            with suppress(OSError):
                process.kill()
        self._abort()

    def _abort(self) -> None:
        for group in self._groups:
            group.abort(str(self._fault))


def _closed() -> None:
    raise EngineDead("the engine is closed, and its ranks with it")


class Reporter:
    """A peer's end of the pipe: beats from a thread, and at most one line that says why it ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, name="rank-beats", daemon=True).start()

    def _beat(self) -> None:
        with suppress(OSError):
            while True:
                with self._lock:
                    os.write(self._descriptor, BEAT)
                time.sleep(BEAT_SECONDS)

    def fail(self, fault: BaseException) -> None:
        """Reports the reason and ends the process, its threads included."""
        own = isinstance(fault, QuireError)
        text = str(fault) if own else f"{type(fault).__name__}: {fault}"
        line = json.dumps((type(fault).__name__ if own else "", text)).encode() + b"\n"
        with self._lock, suppress(OSError):
            os.write(self._descriptor, line)
            os._exit(1)

"""RankProcesses: the peers of rank 0. Starts them, sends them frames, and tells which one is gone and why.

A peer reads frames from its stdin, whose end tells it that rank 0 is gone, and reports through a pipe: an empty message
now and then while it lives, and one of JSON if it fails. No object is pickled.
"""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.core import errors
from quire.core.errors import EngineDead, QuireError
from quire.observe.host import ending, python_command

if TYPE_CHECKING:  # it brings torch, which link/ray_ranks.py does without
    from quire.parallel.group import Group

BEAT_SECONDS = 0.25
LATE_SECONDS = 1.0  # without a beat: the process is looked at
SILENT_SECONDS = 20.0  # without a beat, on a machine that may be out of memory
START_SECONDS = 300.0  # before the first beat
CLOSE_SECONDS = 3.0
HUNG_SECONDS = 20.0  # in which a rank with work neither computes nor waits for another one
IDLE_SHARE = 0.01  # of one core's time: below it, a process does not compute
MAX_REPORT = 1 << 20  # bytes
BEAT = b""


def read_frames(descriptor: int = 0) -> Iterator[bytes]:
    """Until the other end closes; a frame that is cut off then is dropped."""
    with suppress(EOFError, OSError), Connection(descriptor, writable=False) as stream:
        while True:
            yield stream.recv_bytes()


class RankProcesses:
    """Ranks 1 … size - 1: each runs MODULE's `main` with RANK REPORTS MEMORY, and `settings` as its first frame."""

    def __init__(self, module: str, size: int, memory: int, settings: dict[str, Any]) -> None:
        """`memory`: a descriptor that the peers inherit."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._frames: list[Connection] = []
        self._reports: list[Connection] = []
        self._groups: tuple[Group, ...] = ()
        self._fault: QuireError | None = None  # why none of them is used any more
        for rank in range(1, size):
            stdin, frames = Pipe(duplex=False)
            reports, end = Pipe(duplex=False)
            command = python_command(module, rank, end.fileno(), memory)
            passed = (end.fileno(), memory)
            with stdin, end:
                process = subprocess.Popen(
                    command, stdin=stdin.fileno(), stdout=2, pass_fds=passed, start_new_session=True
                )
            self._processes.append(process)
            self._frames.append(frames)
            self._reports.append(reports)
        self.send(json.dumps(settings).encode())
        threading.Thread(target=self._watch, name="ranks-watch", daemon=True).start()

    def attach(self, *groups: "Group") -> None:
        """The groups that no rank may wait in once one is gone."""
        self._groups = groups
        for group in groups:
            group.check = self.check
            if self._fault is not None:
                group.abort(str(self._fault))

    def send(self, *data: bytes) -> None:
        """Each of them as a frame, to every peer."""
        for frames in self._frames:
            with suppress(OSError):  # the watching thread says why
                for each in data:
                    frames.send_bytes(each)

    def check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Ends all of them. Calling it twice is fine."""
        self._fault = self._fault or EngineDead("the engine is closed, and its ranks with it")
        self._groups = ()  # whose `check` refers to this: a cycle, with the memory that ranks share
        for frames in self._frames:
            frames.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self) -> None:
        beats = [time.monotonic() + START_SECONDS] * len(self._reports)  # the last of each rank
        while self._fault is None:
            ready = wait(self._reports, BEAT_SECONDS)
            for rank, reports in enumerate(self._reports, start=1):
                if reports in ready:
                    beats[rank - 1] = time.monotonic()
                    self._read_report(rank, reports)
                elif (why := self._silence(rank, time.monotonic() - beats[rank - 1])) is not None:
                    self._lost(rank, why)
        for reports in self._reports:
            reports.close()

    def _read_report(self, rank: int, reports: Connection) -> None:
        """It lives, it says why it fails, or it is gone without a word."""
        try:
            if (report := reports.recv_bytes(MAX_REPORT)) != BEAT:
                kind, message = json.loads(report)
                self._failed(getattr(errors, kind, EngineDead)(f"rank {rank}: {message}"))
        except EOFError:
            process = self._processes[rank - 1]
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            self._lost(rank, f"{ending(process.returncode)}: its part of the model is gone with it")
        except Exception as error:  # this thread must not end: no other one would name the rank
            self._lost(rank, f"sent a report that cannot be read ({error}): it was ended")

    def _silence(self, rank: int, seconds: float) -> str | None:
        if 0.0 <= seconds < LATE_SECONDS:
            return None
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{self._processes[rank - 1].pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] in "Tt":
                return "is stopped, by SIGSTOP or a debugger: it cannot take part in a step"
        return f"gave no sign of life for {seconds:.0f} s" if seconds > SILENT_SECONDS else None

    def _lost(self, rank: int, how: str) -> None:
        self._failed(EngineDead(f"rank {rank} (pid {self._processes[rank - 1].pid}) {how}"))

    def _failed(self, fault: QuireError) -> None:
        if self._fault is not None:
            return
        self._fault = fault
        for process in self._processes:  # no half of a group goes on
            with suppress(OSError):
                process.kill()
        for group in self._groups:
            group.abort(str(fault))


class Reporter:
    """A peer's end of the pipe: beats from a thread, which also sees if the others hang, and a message if it fails."""

    def __init__(self, reports: Connection) -> None:
        self.groups: tuple[Group, ...] = ()  # in which this rank may wait for others
        self._reports = reports
        self._running: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, name="rank-beats", daemon=True).start()

    def run(self, work: Callable[[], object]) -> None:
        """A part of a step; another thread may run one meanwhile. What it raises ends the process."""
        self._running.append(work)
        try:
            work()
        except BaseException as fault:
            self.fail(fault)
        self._running.pop()

    def _beat(self) -> None:
        used, idle = 0.0, 0  # seconds of cores; beats in which nothing was done
        with suppress(OSError):
            while True:
                with self._lock:
                    self._reports.send_bytes(BEAT)
                before, used = used, time.process_time()
                computes = used - before > IDLE_SHARE * BEAT_SECONDS  # or waits for a GPU, which spins
                hangs = self._running and not computes and not any(group.waits() for group in self.groups)
                idle = idle + 1 if hangs else 0
                if idle * BEAT_SECONDS > HUNG_SECONDS:
                    self.fail(EngineDead(f"its step hung: {HUNG_SECONDS:.0f} s without computing or waiting"))
                time.sleep(BEAT_SECONDS)
        os._exit(0)  # rank 0 is gone, and this rank may wait for it for ever

    def fail(self, fault: BaseException) -> None:
        """Reports the reason and ends the process, its threads included."""
        own = isinstance(fault, QuireError)
        text = str(fault) if own else f"{type(fault).__name__}: {fault}"
        with self._lock, suppress(OSError):
            self._reports.send_bytes(json.dumps((type(fault).__name__ if own else "", text)).encode())
        os._exit(1)

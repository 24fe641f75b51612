"""Heartbeats tell a hung engine from a busy one.

A thread of the engine's process writes a byte to a pipe twice a second: no bytes means that the process is stopped or
starved. The byte says whether the engine's loop has made a turn since the last byte or is idle: bytes without that mean
a step that does not end.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from quire.engine.loop import EngineLoop

BEAT_SECONDS = 0.5
STOPPED_SECONDS = 30.0  # without a beat, however long a step may take
TURNED, SAME_STEP = b"+", b"-"


def start_heartbeat(descriptor: int, loop: EngineLoop) -> None:
    """Starts the thread. It ends with the process, or when the other end of the pipe is closed."""

    def run() -> None:
        last = -1
        with suppress(OSError):
            while True:
                turned = loop.is_idle or loop.num_turns != last
                last = loop.num_turns
                os.write(descriptor, TURNED if turned else SAME_STEP)
                time.sleep(BEAT_SECONDS)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()


@dataclass(slots=True)
class HeartbeatMonitor:
    """Judges the beats from outside. Time counts only while there is work."""

    timeout: float  # for one step
    last_beat: float = 0.0
    last_turn: float = 0.0
    busy_since: float | None = None

    def take(self, beats: bytes, now: float) -> None:
        self.last_beat = now
        if TURNED in beats:
            self.last_turn = now

    def failure(self, has_work: bool, now: float) -> str | None:
        """Why the engine must be killed, or None."""
        if not has_work:
            self.busy_since = None
            return None
        if self.busy_since is None:
            self.busy_since = now
        silent = now - max(self.last_beat, self.busy_since)
        stuck = now - max(self.last_turn, self.busy_since)
        timeout = max(self.timeout, 3 * BEAT_SECONDS)  # a beat may come late
        if silent > min(timeout, STOPPED_SECONDS):
            return f"gave no sign of life for {silent:.0f} s: it was stopped, or the machine is out of memory"
        if stuck > timeout:
            return f"was in one step for {stuck:.0f} s: raise --engine-timeout if steps may take so long"
        return None


async def until_hung(descriptor: int, timeout: float, has_work: Callable[[], bool]) -> str:
    """Reads the beats; returns, with the reason, when the engine must be killed."""
    loop = asyncio.get_running_loop()
    monitor = HeartbeatMonitor(timeout)
    os.set_blocking(descriptor, False)

    def read() -> None:
        with suppress(BlockingIOError):
            beats = os.read(descriptor, 4096)
            if beats:
                monitor.take(beats, time.monotonic())
            else:
                loop.remove_reader(descriptor)  # the process is gone, which the supervisor notices

    loop.add_reader(descriptor, read)
    try:
        while True:
            await asyncio.sleep(min(BEAT_SECONDS, timeout / 4))
            failure = monitor.failure(has_work(), time.monotonic())
            if failure is not None:
                return failure
    finally:
        loop.remove_reader(descriptor)

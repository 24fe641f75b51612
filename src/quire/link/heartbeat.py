"""Heartbeats: how a hung engine is told from one that has much to do.

A thread of the engine's process writes a byte to a pipe twice a second, whatever the engine does: no bytes means that
the process is stopped or starved. The byte says whether the engine's loop went round since the last one, or waits for
work: bytes without that mean a step that does not end.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

BEAT_SECONDS = 0.5
STOPPED_SECONDS = 30.0  # without a beat, however long a step may take
TURNED, SAME_STEP = b"+", b"-"


class Turning(Protocol):
    """The engine's loop, as the thread sees it."""

    num_turns: int
    waits: bool  # for work


def beat(descriptor: int, loop: Turning) -> None:
    """Starts the thread. It ends with the process, or when nobody listens any more."""

    def run() -> None:
        last = -1
        with suppress(OSError):
            while True:
                turned = loop.waits or loop.num_turns != last
                last = loop.num_turns
                os.write(descriptor, TURNED if turned else SAME_STEP)
                time.sleep(BEAT_SECONDS)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()


@dataclass(slots=True)
class Pulse:
    """What the beats say, seen from outside. Time counts only while there is work."""

    timeout: float  # for one step
    last_beat: float = 0.0
    last_turn: float = 0.0
    busy_since: float | None = None

    def take(self, beats: bytes, now: float) -> None:
        self.last_beat = now
        if TURNED in beats:
            self.last_turn = now

    def trouble(self, has_work: bool, now: float) -> str | None:
        """Why the engine must be given up, or None."""
        if not has_work:
            self.busy_since = None
            return None
        if self.busy_since is None:
            self.busy_since = now
        silent = now - max(self.last_beat, self.busy_since)
        stuck = now - max(self.last_turn, self.busy_since)
        patience = max(self.timeout, 3 * BEAT_SECONDS)  # a beat may come late
        if silent > min(patience, STOPPED_SECONDS):
            return f"gave no sign of life for {silent:.0f} s: it was stopped, or the machine is out of memory"
        if stuck > patience:
            return f"was in one step for {stuck:.0f} s: raise --engine-timeout if steps may take so long"
        return None


async def until_hung(descriptor: int, timeout: float, has_work: Callable[[], bool]) -> str:
    """Listens to the beats, and returns when the engine must be given up: why."""
    loop = asyncio.get_running_loop()
    pulse = Pulse(timeout)
    os.set_blocking(descriptor, False)

    def listen() -> None:
        with suppress(BlockingIOError):
            beats = os.read(descriptor, 4096)
            if beats:
                pulse.take(beats, time.monotonic())
            else:
                loop.remove_reader(descriptor)  # the process is gone: others notice that

    loop.add_reader(descriptor, listen)
    try:
        while True:
            await asyncio.sleep(min(BEAT_SECONDS, timeout / 4))
            trouble = pulse.trouble(has_work(), time.monotonic())
            if trouble is not None:
                return trouble
    finally:
        loop.remove_reader(descriptor)

"""Memory of a serving process: garbage collection that is rare and never over what start-up allocated, and freed memory
that goes back to the system."""

import asyncio
import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

# Allocations between two collections of the youngest generation; of those, between two of the next; of those, between
# two of all objects, which the engine's process collects when it is idle.
THRESHOLDS = (10_000, 10, 1_000)
GROWN_BYTES = 64 << 20
LOOK_SECONDS = 0.3  # delay from a request's end to the check of memory; requests that end meanwhile share it
REST_SECONDS = 5.0  # between two releases


def freeze_heap() -> None:
    """To be called once a process is ready to serve.

    A collection of everything takes 100 ms and more with a model's modules loaded, and every stream waits for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def release_freed() -> None:
    """Returns memory that C's allocator holds after much was freed; glibc only.

    Takes 10 ms after 35 MB and 170 ms after 580 MB, during which other threads may wait for an arena's lock.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


class FreedMemory:
    """One per process: returns what large requests freed to the system, once the process has grown by GROWN_BYTES.

    glibc keeps it for the thread that freed it: a tokenizer takes 130 MB for a text of 1 MB, in one of many threads.
    """

    def __init__(self) -> None:
        self._least = _resident_bytes()  # since the last release
        self._is_waiting = False

    def request_ended(self) -> None:
        """To be called in the event loop."""
        if not self._is_waiting:
            self._is_waiting = True
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        now = _resident_bytes()
        self._least = min(self._least, now)
        if now > self._least + GROWN_BYTES:
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, self._release)
            loop.call_later(REST_SECONDS, self._look)
        else:
            self._is_waiting = False

    def _release(self) -> None:
        release_freed()
        self._least = _resident_bytes()


def _resident_bytes() -> int:
    """0 where the system does not say it."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0

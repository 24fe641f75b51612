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
LOOK_SECONDS, MAX_LOOK_SECONDS = 3.0, 12.0  # between two looks at the size of the process


def freeze_heap() -> None:
    """To be called once a process is ready to serve.

    A collection of everything takes 100 ms and more with a model's modules loaded, and every stream waits for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def release_freed() -> None:
    """Returns memory that C's allocator holds after much was freed; glibc only.

    The time grows with what was freed; meanwhile other threads may wait for an arena's lock.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


async def return_freed() -> None:
    """While the process is larger by GROWN_BYTES than at its smallest, returns what was freed to the system.

    glibc keeps what large requests freed for the thread that freed it: a tokenizer takes 130 MB for a text of 1 MB, in
    one of many threads. Runs until cancelled.
    """
    least, pause = _resident_bytes(), LOOK_SECONDS
    while True:
        await asyncio.sleep(pause)
        least = min(least, now := _resident_bytes())
        if now > least + GROWN_BYTES:
            await asyncio.to_thread(release_freed)
        # what is still in use may be freed later
        pause = min(2 * pause, MAX_LOOK_SECONDS) if _resident_bytes() > least + GROWN_BYTES else LOOK_SECONDS


def _resident_bytes() -> int:
    """0 where the system does not say it."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0

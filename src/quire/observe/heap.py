"""Memory of a serving process: garbage collection that is rare and never over what start-up allocated, and freed memory
that goes back to the system."""

import asyncio
import ctypes
import gc
from contextlib import suppress
from pathlib import Path

from quire.observe.host import numbers_in

# Allocations between two collections of the youngest generation; of those, between two of the next; of those, between
# two of all objects, which the engine's process collects when it is idle.
THRESHOLDS = (10_000, 10, 1_000)
GROWN_BYTES = 32 << 20
LOOK_SECONDS = 0.25  # between two looks at the size of the process
LOOKS_AGAIN = 40  # after a release, until memory that was in use then is looked for


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
    """Returns freed memory to the system each time the process has grown by GROWN_BYTES. Runs until cancelled.

    glibc keeps what large requests freed for the thread that freed it: a tokenizer takes 130 MB for a text of 1 MB, in
    one of many threads. What was in use at a release is returned by a later one.
    """
    least = released = _resident_bytes()
    looks = 0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now, looks = _resident_bytes(), looks + 1
        least, released = min(least, now), min(released, now)
        if now > (least if looks >= LOOKS_AGAIN else released) + GROWN_BYTES:
            await asyncio.to_thread(release_freed)
            released, looks = _resident_bytes(), 0


def _resident_bytes() -> int:
    """0 where the system does not say it."""
    return numbers_in(Path("/proc/self/status")).get("VmRSS", 0) << 10

"""Memory that C's allocator holds goes back to the system while requests come."""

import asyncio
import ctypes
import os
import platform
import time
from pathlib import Path

import pytest

from quire.observe import heap

BLOCK, COUNT = 64 << 10, 3000  # small enough for an arena: larger blocks are mapped, and returned at once


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def grown() -> int:
    """Fills and frees this thread's arena, and returns the size of the process in between.

    The last block stays, so that nothing is returned from the arena's end.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK) for _ in range(COUNT + 1)]
    for block in blocks[:-1]:
        ctypes.memset(block, 1, BLOCK)
    size = resident()
    for block in blocks[:-1]:
        libc.free(block)
    return size


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_what_a_thread_freed_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "LOOK_SECONDS", 0.01)

    async def run() -> tuple[int, int]:
        watching = asyncio.create_task(heap.return_freed())
        before = await asyncio.to_thread(grown)
        deadline = time.monotonic() + 30
        while before - resident() < BLOCK * COUNT // 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        watching.cancel()
        return before, resident()

    before, after = asyncio.run(run())
    assert before - after > BLOCK * COUNT // 2


def test_memory_in_use_at_a_release_is_returned_by_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # at the start, at each look, and after each release
    sizes = [100, 120, *(300, 290), 350, *(360, 310), 320, 320, *(320, 110), 90, *(160, 80)]
    looks, released = [], []

    async def sleep(seconds: float) -> None:
        if not sizes:
            raise asyncio.CancelledError
        looks.append(seconds)

    monkeypatch.setattr(heap, "GROWN_BYTES", 64 << 20)
    monkeypatch.setattr(heap, "LOOKS_AGAIN", 3)
    monkeypatch.setattr(heap, "_resident_bytes", lambda: sizes.pop(0) << 20)
    monkeypatch.setattr(heap, "release_freed", lambda: released.append(len(looks)))
    monkeypatch.setattr(heap.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(heap.return_freed())
    assert released == [2, 4, 7, 9]

"""Memory that C's allocator holds goes back to the system while requests come."""

import asyncio
import ctypes
import os
import platform
import threading
from pathlib import Path

import pytest

from quire.observe import heap

BLOCK, COUNT = 64 << 10, 3000  # small enough for an arena: larger blocks are mapped, and returned at once


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill_and_free() -> None:
    """In this thread's arena; the last block stays, so that nothing is returned from the arena's end."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK) for _ in range(COUNT + 1)]
    for block in blocks[:-1]:
        ctypes.memset(block, 1, BLOCK)
        libc.free(block)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_what_a_thread_freed_is_returned_after_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "LOOK_SECONDS", 0.01)
    released, release_now = threading.Event(), heap.release_freed

    def release() -> None:
        release_now()
        released.set()

    monkeypatch.setattr(heap, "release_freed", release)

    async def run() -> tuple[int, int]:
        freed = heap.FreedMemory()
        await asyncio.to_thread(fill_and_free)
        before = resident()
        freed.request_ended()
        assert await asyncio.to_thread(released.wait, 30)
        return before, resident()

    before, after = asyncio.run(run())
    assert before - after > BLOCK * COUNT // 2


def test_memory_that_grows_again_and_again_is_released_with_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    delays, released, now = [], [], [0]
    monkeypatch.setattr(heap, "_resident_bytes", lambda: now[0])
    monkeypatch.setattr(heap, "release_freed", lambda: released.append(now[0]))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda delay, _call: delays.append(delay))
        monkeypatch.setattr(loop, "run_in_executor", lambda _executor, call: call())
        freed = heap.FreedMemory()
        for now[0] in (100 << 20, 200 << 20, 200 << 20, 200 << 20):
            freed.request_ended()
            freed.request_ended()
            freed._look()

    asyncio.run(run())
    assert released == [100 << 20, 200 << 20]
    first, rest = heap.LOOK_SECONDS, heap.REST_SECONDS
    assert delays == [first, rest, rest, first]
    assert rest > 1

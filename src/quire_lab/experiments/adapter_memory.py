"""The same requests with adapters in one pool of pages, or in memory of their own: what fits, counted in blocks."""

import random
from dataclasses import dataclass

from quire.memory.adapter_pages import AdapterPages
from quire.memory.paged import PagedMemory
from quire_lab.baselines.separate_pages import SeparatePages, fragmentation

SIZES = (2, 4, 8, 16, 32)  # blocks of adapters, in proportion to their ranks
POOL = 400  # blocks in all
REQUEST = 6  # blocks of K and V of a request
ADAPTERS = 100
ROUNDS = 3000


@dataclass(frozen=True, slots=True)
class Fitted:
    memory: str
    mean_running: float
    fragmentation: float  # of adapters' free memory, mean
    loads: int


def compare_memories(seed: int) -> tuple[Fitted, list[Fitted]]:
    """Unified, and with an eighth, a quarter and half of the blocks for adapters alone.

    Full all the time: whoever ends makes room for the next, drawn by a power law.
    """
    return _fill(0, seed), [_fill(POOL // part, seed) for part in (8, 4, 2)]


def _fill(num_separate: int, seed: int) -> Fitted:
    drawn = random.Random(seed)
    num_blocks = POOL - num_separate
    separate = SeparatePages(num_blocks + 1, num_separate) if num_separate else None
    memory = PagedMemory(num_blocks, 1, adapter_pages=separate)
    pages, weights = memory.adapter_pages, [1 / (place + 1) for place in range(ADAPTERS)]
    running: list[tuple[str, list[int]]] = []
    counts, gaps = [], []
    following: int | None = None  # who waits first: nobody may pass
    for _ in range(ROUNDS):
        while True:
            index = drawn.choices(range(ADAPTERS), weights)[0] if following is None else following
            held = _admit(memory, pages, f"{index}", SIZES[index % len(SIZES)])
            following = index if held is None else None
            if held is None:
                break
            running.append((f"{index}", held))
        counts.append(len(running))
        gaps.append(fragmentation(pages))
        if running:
            key, blocks = running.pop(drawn.randrange(len(running)))
            pages.release(key)
            for block in blocks:
                memory.pool.release(block)
    kind = f"separate, {num_separate} blocks" if num_separate else "unified"
    return Fitted(kind, sum(counts) / ROUNDS, sum(gaps) / ROUNDS, pages.stats.num_loads)


def _admit(memory: PagedMemory, pages: AdapterPages, key: str, size: int) -> list[int] | None:
    """The request's blocks, its adapter being held; None if both do not fit."""
    if not pages.is_resident(key):
        if not pages.has_room(size, REQUEST):
            return None
        pages.load(key, size, key)
    pages.acquire(key)
    if memory.num_free < REQUEST:
        pages.release(key)
        return None
    return [memory._take() for _ in range(REQUEST)]

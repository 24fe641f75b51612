"""Memory that the ranks on one machine's CPU share, so that rank 0 writes and reads whole blocks for all of them.

Each rank has a part: a line with the number of moves that it has made, its host blocks and, of a prefill engine, its
pool.
"""

import os
import time
from collections.abc import Sequence

from torch import Tensor, int64

from quire.core.config import MemoryConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.step import Step
from quire.engine.build.resolve import BuildPlan
from quire.layers.attention import Pool
from quire.layers.factory import RankPart
from quire.observe.host import memory_left
from quire.runner.transfer import HostArena, OpenDiskTier, TransferEngine

GIB = 1 << 30
LINE, PAGE = 64, 4096  # bytes
PAUSE = 0.005  # seconds between looks at other ranks' moves


def part_bytes(memory: MemoryConfig) -> int:
    """Of a rank's part, which has room for a pool of all the machine's memory: pages cost nothing until written."""
    if memory.kv_offload_dir is None:
        return 0
    machine = memory_left()[1] or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _host_bytes(memory) + (machine // PAGE * PAGE if memory.role == "prefill" else 0)


def _host_bytes(memory: MemoryConfig) -> int:
    asked = LINE + int(memory.swap_space * GIB) + int(memory.kv_offload_gb * GIB)
    return -(-asked // PAGE) * PAGE


def pool_memory(plan: BuildPlan, num_bytes: int) -> Tensor | None:
    """The part's, for a pool that rank 0 reads; None: the pool has memory of its own."""
    if plan.part is None or plan.part.shared is None or plan.config.memory.role != "prefill":
        return None
    memory = plan.part.shared[plan.part.world.rank, _host_bytes(plan.config.memory) :]
    if num_bytes > len(memory):
        raise ConfigError(
            f"a pool of {num_bytes / 1e9:,.1f} GB is more than this machine's memory: lower kv_cache_memory_bytes or "
            "num_blocks"
        )
    return memory[:num_bytes]


def rank_pools(plan: BuildPlan, pool: Pool, arenas: Sequence[HostArena]) -> tuple[Tensor, ...]:
    """[blocks, bytes] of every rank of a prefill engine, and else of this one. `arenas`: of `rank_arenas`."""
    if plan.part is None or plan.part.shared is None or plan.config.memory.role != "prefill":
        return (pool.data,)
    pools = zip(plan.part.shared[:, _host_bytes(plan.config.memory) :], arenas, strict=True)
    return tuple(part[: pool.num_blocks * each.block_bytes].view(pool.num_blocks, -1) for part, each in pools)


def rank_arenas(plan: BuildPlan, block_bytes: int, num_blocks: int) -> list[HostArena]:
    """Host blocks of every rank; none where ranks share no memory. All ranks call it."""
    if plan.part is None or plan.part.shared is None:
        return []
    sizes = plan.part.world.numbers(block_bytes)
    return [SharedArena(size, num_blocks, part) for size, part in zip(sizes, plan.part.shared, strict=True)]


class SharedArena(HostArena):
    """Host blocks of one rank, in its part."""

    def __init__(self, block_bytes: int, num_blocks: int, part: Tensor) -> None:
        super().__init__(block_bytes, num_blocks, pinned=False)
        self._data = part[LINE : LINE + num_blocks * block_bytes].view(num_blocks, block_bytes)

    def blocks(self, host: int, count: int = 1) -> Tensor:
        return self._data[host - 1 : host - 1 + count]


class RankTransfers(TransferEngine):
    """Moves of several ranks: one is made once all ranks have made it."""

    def __init__(
        self, part: RankPart, pool: Pool, arenas: Sequence[HostArena], open_disk_tier: OpenDiskTier
    ) -> None:
        assert part.shared is not None
        self._world = part.world
        self._num_made = part.shared[:, :8].view(int64)[:, 0].numpy()  # by rank
        super().__init__(pool, arenas[part.world.rank], open_disk_tier)

    def move(self, step: Step) -> None:
        super().move(step)
        if step.moves is not None:
            self._order()
            self._num_made[self._world.rank] = self._num_moved

    def num_moved(self) -> int:
        number = int(self._num_made.min())
        self._order()
        return number

    def wait_moved(self, number: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.num_moved() < number:
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE)
        return True

    def _order(self) -> None:
        """A lock that is released and taken again orders memory: bytes of a move are there before its number is."""
        for _ in range(2):
            with self._moved:
                pass

    def close(self) -> None:
        try:
            self._world.check()
        except QuireError:  # a rank is gone: writes that wait for its moves would wait in vain
            if self.disk_tier is not None:
                self.disk_tier.close(0.0)
                self.disk_tier = None
        super().close()

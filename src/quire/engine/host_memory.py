"""Host memory beside the pool: how many blocks it holds, how fast they move, and what is said of it at start."""

from dataclasses import dataclass

from quire.core.config import EngineConfig
from quire.layers.pool import Pool
from quire.runner.sizing import available_memory
from quire.runner.swap import PageMover

GIB = 1 << 30
HOST_SHARE = 0.5  # of the memory that is free: an engine should not drive its machine into swapping


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`mover` is None where nothing ever leaves the pool."""

    mover: PageMover | None
    num_swap_blocks: int
    block_seconds: float  # of moving one block, one way
    lines: tuple[str, ...]  # for people


def make_host_memory(config: EngineConfig, pool: Pool) -> HostMemory:
    mode, asked = config.scheduler.preemption_mode, config.memory.swap_space
    block_bytes = pool.layout.block_bytes
    if config.memory.reservation != "paged":
        return HostMemory(None, 0, 0.0, ())  # nobody is ever preempted
    if mode == "recompute":
        return HostMemory(
            None, 0, 0.0, ("swap      off: preempted requests are computed again (preemption_mode)",)
        )
    allowed = int(HOST_SHARE * available_memory())
    limit = "swap_space" if asked * GIB <= allowed else "free memory"
    num_blocks = min(int(asked * GIB), allowed) // block_bytes
    if not num_blocks:
        why = "swap_space=0" if not asked else f"{limit} holds no block of {block_bytes:,} bytes"
        return HostMemory(None, 0, 0.0, (f"swap      off ({why}): preempted requests are computed again",))
    mover = PageMover(pool, num_blocks)
    seconds = mover.block_seconds()
    line = (
        f"swap      {num_blocks * block_bytes / 1e6:,.0f} MB of host memory when needed: {num_blocks:,} blocks, "
        f"{block_bytes / seconds / 1e9:.1f} GB/s (set by {limit}), mode {mode}"
    )
    return HostMemory(mover, num_blocks, seconds, (line,))

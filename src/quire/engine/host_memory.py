"""Host memory beside the pool, and a folder behind it: how large, how fast, and what is said of them at start."""

from dataclasses import dataclass
from pathlib import Path

from quire.core.config import EngineConfig
from quire.core.layout import BlockLayout
from quire.layers.pool import Pool
from quire.memory.offload_cache import OffloadCache
from quire.memory.transfers import PendingTransfers
from quire.observe.logs import get_logger
from quire.runner.disk_tier import FileDiskTier, settings_folder
from quire.runner.sizing import available_memory
from quire.runner.transfer import TransferEngine

GIB = 1 << 30
HOST_SHARE = 0.5  # of the memory that is free: an engine should not drive its machine into swapping
DISK_PER_HOST = 8  # the folder may hold so many times what host memory holds

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`mover` is None where nothing ever leaves the pool."""

    mover: TransferEngine | None
    num_swap_blocks: int
    num_offload_blocks: int
    block_seconds: float  # of moving one block, one way
    lines: tuple[str, ...]  # for people


def make_host_memory(config: EngineConfig, pool: Pool) -> HostMemory:
    block_bytes = pool.layout.block_bytes
    memory = config.memory
    caches = memory.enable_prefix_caching and memory.share and memory.reservation == "paged"
    off: tuple[str, ...] = ()
    if memory.kv_offload_gb and not caches:
        off = ("evicted   off (kv_offload_gb): the prefix cache is off, so nothing is found again",)
    if memory.reservation != "paged":
        return HostMemory(None, 0, 0, 0.0, off)  # nobody is ever preempted
    allowed = int(HOST_SHARE * available_memory())
    mode = config.scheduler.preemption_mode
    swap_bytes = int(memory.swap_space * GIB) if mode != "recompute" else 0
    offload_bytes = int(memory.kv_offload_gb * GIB) if caches else 0
    shrink = min(1.0, allowed / max(1, swap_bytes + offload_bytes))
    num_swap, num_offload = (int(shrink * asked) // block_bytes for asked in (swap_bytes, offload_bytes))
    mover = TransferEngine(pool, num_swap + num_offload) if num_swap + num_offload else None
    seconds = mover.block_seconds() if mover is not None else 0.0
    if num_swap:
        limit = "swap_space" if shrink == 1.0 else "free memory"
        line = (
            f"swap      {num_swap * block_bytes / 1e6:,.0f} MB of host memory as the pool fills: {num_swap:,} blocks, "
            f"{block_bytes / seconds / 1e9:.1f} GB/s (set by {limit}), mode {mode}"
        )
    else:
        why = "preemption_mode=recompute" if mode == "recompute" else f"swap_space={memory.swap_space:g}"
        line = f"swap      off ({why}): preempted requests are computed again"
    return HostMemory(mover, num_swap, num_offload, seconds, (line, *off))


def open_offload_cache(
    config: EngineConfig,
    host: HostMemory,
    transfers: PendingTransfers,
    layout: BlockLayout,
    *settings: object,
) -> tuple[OffloadCache | None, tuple[str, ...]]:
    """The offload cache, if one is configured, and its line of the report. `settings`: what K and V depend on."""
    if host.mover is None or not host.num_offload_blocks:
        return None, ()
    shelf = _open_shelf(config, host, layout, *settings)
    cache = OffloadCache(host.num_swap_blocks + 1, host.num_offload_blocks, transfers, host.mover, shelf)
    size = host.num_offload_blocks * layout.block_bytes
    line = f"evicted   {size / 1e6:,.0f} MB of host memory for {host.num_offload_blocks:,} blocks that the pool evicts"
    if shelf is not None:
        host.mover.shelf = shelf
        line += f"; {shelf.folder}: {DISK_PER_HOST * size / 1e6:,.0f} MB, {shelf.num_blocks:,} blocks there from before"
    return cache, (line,)


def _open_shelf(
    config: EngineConfig, host: HostMemory, layout: BlockLayout, *settings: object
) -> FileDiskTier | None:
    asked = config.memory.kv_offload_dir
    if asked is None or host.mover is None:
        return None
    folder = settings_folder(Path(asked).expanduser(), layout, *settings)
    limit = DISK_PER_HOST * host.num_offload_blocks * layout.block_bytes
    try:
        return FileDiskTier(folder, host.mover.arena, host.mover.wait_moved, limit)
    except OSError as error:
        logger.warning(
            "kv_offload_dir %s cannot be used (%s): going on without it; choose a folder that can be written",
            asked, error.strerror or error,
        )  # fmt: skip
        return None

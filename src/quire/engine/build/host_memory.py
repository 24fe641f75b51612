"""Host memory beside the pool, and a folder behind it: how large, how fast, and the lines that report them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from quire.engine.build.rank_memory import GIB, RankTransfers, rank_arenas, rank_pools
from quire.engine.build.resolve import BuildPlan
from quire.layers.attention import Pool
from quire.memory.offload_cache import OffloadCache
from quire.memory.swap import PendingTransfers
from quire.observe.logs import get_logger
from quire.runner.disk_tier import FileDiskTier, settings_folder
from quire.runner.sizing import available_memory
from quire.runner.transfer import HostArena, TransferEngine, WaitMoved

HOST_SHARE = 0.5  # of the memory that is free: an engine should not drive its machine into swapping
DISK_PER_HOST = 8  # the folder may hold this many times the bytes of host memory

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HostMemory:
    transfers: TransferEngine | None  # None: nothing ever leaves the pool
    num_swap_blocks: int
    num_offload_blocks: int
    block_seconds: float  # of moving one block, one way
    lines: tuple[str, ...]  # of the start's report
    pools: tuple[Tensor, ...] = ()  # [blocks, bytes] of every rank of a prefill engine, and else of this one

    def make_offload_cache(self, pending: PendingTransfers) -> OffloadCache | None:
        """Where evicted prefix blocks go; None where no memory is set aside for them."""
        if self.transfers is None or not self.num_offload_blocks:
            return None
        first = self.num_swap_blocks + 1
        return OffloadCache(
            first, self.num_offload_blocks, pending, self.transfers.num_moved, self.transfers.disk_tier
        )

    def prepare_swap(self, num_blocks: int) -> Callable[[], None] | None:
        """Makes host memory ready for swaps of a pool of `num_blocks`, before a step needs it; None without swap."""
        if self.transfers is None or not self.num_swap_blocks:
            return None
        return partial(self.transfers.arena.prepare, min(self.num_swap_blocks, num_blocks))


def make_host_memory(plan: BuildPlan, pool: Pool) -> HostMemory:
    block_bytes = pool.layout.block_bytes
    memory, mode = plan.config.memory, plan.config.scheduler.preemption_mode
    caches = memory.enable_prefix_caching and memory.share and memory.reservation == "paged"
    off: tuple[str, ...] = ()
    if memory.kv_offload_gb and not caches:
        off = ("evicted   off (kv_offload_gb): the prefix cache is off, so nothing is found again",)
    if memory.reservation != "paged":
        return HostMemory(None, 0, 0, 0.0, off)  # there are no preemptions
    allowed = int(HOST_SHARE * available_memory()) // plan.ranks_here()
    swap_bytes = int(memory.swap_space * GIB) if mode != "recompute" else 0
    offload_bytes = int(memory.kv_offload_gb * GIB) if caches else 0
    shrink = min(1.0, allowed / max(1, swap_bytes + offload_bytes))
    num_swap, num_offload = (
        plan.agreed(int(shrink * asked) // block_bytes) for asked in (swap_bytes, offload_bytes)
    )
    arenas = rank_arenas(plan, block_bytes, num_swap + num_offload)
    transfers: TransferEngine | None = None
    if num_swap + num_offload:
        open_disk_tier = partial(_open_disk_tier, plan, pool, num_offload, arenas)
        if plan.part is not None and arenas:
            transfers = RankTransfers(plan.part, pool, arenas, open_disk_tier)
        else:
            transfers = TransferEngine(pool, num_swap + num_offload, open_disk_tier)
    seconds = transfers.block_seconds() if transfers is not None else 0.0
    if num_swap:
        limit = "swap_space" if shrink == 1.0 else "free memory"
        line = (
            f"swap      {num_swap * block_bytes / 1e6:,.0f} MB of host memory as the pool fills: {num_swap:,} blocks, "
            f"{block_bytes / seconds / 1e9:.1f} GB/s (set by {limit}), mode {mode}"
        )
    else:
        why = "preemption_mode=recompute" if mode == "recompute" else f"swap_space={memory.swap_space:g}"
        line = f"swap      off ({why}): preempted requests are computed again"
    evicted = _offload_lines(transfers, num_offload, block_bytes)
    lines, pools = (line, *off, *evicted), rank_pools(plan, pool, arenas)
    return HostMemory(transfers, num_swap, num_offload, seconds, lines, pools)


def _offload_lines(transfers: TransferEngine | None, num_offload: int, block_bytes: int) -> tuple[str, ...]:
    if transfers is None or not num_offload:
        return ()
    size, tier = num_offload * block_bytes, transfers.disk_tier
    line = f"evicted   {size / 1e6:,.0f} MB of host memory for {num_offload:,} blocks that the pool evicts"
    if tier is not None:
        size = DISK_PER_HOST * num_offload * tier.block_bytes
        line += f"; {tier.folder}: {size / 1e6:,.0f} MB, {tier.num_blocks:,} blocks there from before"
    return (line,)


def _open_disk_tier(
    plan: BuildPlan,
    pool: Pool,
    num_offload: int,
    shared: list[HostArena],
    arena: HostArena,
    wait_moved: WaitMoved,
) -> FileDiskTier | None:
    """Its folder is of all that K and V depend on: weights, number format, device, ranks. `shared`: host blocks of all
    ranks, for which rank 0 writes and reads.
    """
    asked, options, part = plan.config.memory.kv_offload_dir, plan.config.model, plan.part
    if asked is None or not num_offload or (part is not None and part.world.rank > 0):
        return None
    arenas = shared or [arena]
    sizes = [each.block_bytes for each in arenas]
    folder = settings_folder(
        Path(asked).expanduser(),
        pool.layout,
        plan.source.fingerprint,
        plan.precision.format.name,
        plan.precision.device.type,
        plan.config.runner.deterministic,
        options.seed if options.load_format == "dummy" else None,
        *(() if part is None else (part, part.stages.size, sizes)),
    )
    try:
        return FileDiskTier(folder, arenas, wait_moved, DISK_PER_HOST * num_offload * sum(sizes))
    except OSError as error:
        logger.warning(
            "kv_offload_dir %s cannot be used (%s): going on without it; choose a folder that can be written",
            asked, error.strerror or error,
        )  # fmt: skip
        return None

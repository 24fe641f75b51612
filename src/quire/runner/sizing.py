"""How large the pool is, and why: decided once, printed at start."""

import os
from dataclasses import dataclass

import torch

from quire.core.config import MemoryConfig
from quire.core.errors import ConfigError
from quire.core.layout import BlockLayout, LayerGroups
from quire.core.stats import PoolSize
from quire.observe.host import memory_left

CPU_POOL_SHARE = 0.25  # of the memory that is free after loading: a laptop has other things to do
CPU_POOL_LIMIT = 4 << 30
GPU_MARGIN = 512 << 20  # libraries allocate workspaces when they are first used


def pool_size(
    memory: MemoryConfig, layout: BlockLayout, groups: LayerGroups,
    max_num_seqs: int, max_model_len: int, free_bytes: int,
) -> PoolSize:  # fmt: skip
    """As many blocks as the first limit allows: an explicit count, explicit bytes, or free memory."""
    useful = max_num_seqs * layout.num_groups * -(-max_model_len // layout.block_size)
    if memory.num_blocks is not None:
        num_blocks, limit = memory.num_blocks * layout.num_groups, "num_blocks"
    elif memory.kv_cache_memory_bytes is not None:
        num_blocks, limit = memory.kv_cache_memory_bytes // layout.block_bytes - 1, "kv_cache_memory_bytes"
    else:
        num_blocks, limit = free_bytes // layout.block_bytes - 1, "free memory"
        if num_blocks > useful:
            num_blocks, limit = useful, "max_num_seqs × max_model_len"
    if num_blocks < 1:
        raise ConfigError(
            f"the pool cannot hold one block of {layout.block_bytes:,} bytes ({limit}): raise "
            "kv_cache_memory_bytes, or lower block_size"
        )
    return PoolSize(
        num_blocks, layout.block_size, (num_blocks + 1) * layout.block_bytes, layout.in_words, limit,
        groups.num_full, groups.num_window, groups.window,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How a GPU's memory is divided, in bytes. Printed at start, so it must add up."""

    total: int
    others: int  # other processes, and the driver's own
    weights: int
    activations: int  # the largest step's, measured, and what adapters pass through
    pool: int
    spare: int  # what gpu_memory_utilization leaves alone

    def __str__(self) -> str:
        parts = (
            (self.weights, "weights"),
            (self.activations, "activations"),
            (self.pool, "pool"),
            (self.others, "others and driver"),
            (self.spare, "left alone"),
        )
        return f"{self.total / 1e9:,.1f} GB = " + " + ".join(f"{n / 1e9:,.1f} {what}" for n, what in parts)


def divide_gpu(device: torch.device, utilization: float, activations: int) -> DeviceMemory:
    """What the pool may take now that weights are loaded, beside other processes on the same card.

    `utilization` is this process's share of the card; memory of other processes is never counted as ours.
    """
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    weights = torch.cuda.memory_allocated(device)
    others = total - free - ours
    allowed = min(int(utilization * total) - weights, free + ours - weights - GPU_MARGIN) - activations
    pool = max(0, allowed)
    return DeviceMemory(
        total, others, weights, activations, pool, total - others - weights - activations - pool
    )


def free_host_bytes(limit: int = CPU_POOL_LIMIT) -> int:
    """What the pool may take on a CPU, or something else with a limit of its own."""
    return int(min(limit, CPU_POOL_SHARE * available_memory()))


def available_memory() -> int:
    """Bytes that can be had without swapping, as far as the system says."""
    left, total = memory_left()
    # macOS: physical memory is the best known bound
    return left if total else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

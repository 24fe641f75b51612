"""How large the pool is, and why: decided once, printed at start."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.core.config import MemoryConfig
from quire.core.errors import ConfigError
from quire.core.layout import BlockLayout

CPU_POOL_SHARE = 0.25  # of the memory that is free after loading: a laptop has other things to do
CPU_POOL_LIMIT = 4 << 30


@dataclass(frozen=True, slots=True)
class PoolSize:
    num_blocks: int  # usable ones; the pool has one more, block 0
    block_size: int
    block_bytes: int
    limit: str  # what set the size, in words

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return (self.num_blocks + 1) * self.block_bytes


def pool_size(
    memory: MemoryConfig, layout: BlockLayout, max_num_seqs: int, max_model_len: int, free_bytes: int
) -> PoolSize:
    """As many blocks as the first limit allows: an explicit count, explicit bytes, or free memory."""
    useful = max_num_seqs * -(-max_model_len // layout.block_size)
    if memory.num_blocks is not None:
        num_blocks, limit = memory.num_blocks, "num_blocks"
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
    return PoolSize(num_blocks, layout.block_size, layout.block_bytes, limit)


def free_bytes_for_pool(device: torch.device, gpu_memory_utilization: float) -> int:
    """What the pool may take on this device now, after the weights are loaded."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1.0 - gpu_memory_utilization) * total))
    return int(min(CPU_POOL_LIMIT, CPU_POOL_SHARE * _available_memory()))


def _available_memory() -> int:
    """Bytes that can be had without swapping, as far as the system says."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    cgroup = Path("/sys/fs/cgroup/memory.max")
    if cgroup.exists() and (text := cgroup.read_text().strip()).isdigit():
        limits.append(int(text))
    if not limits:  # macOS: physical memory is the best known bound
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min(limits)

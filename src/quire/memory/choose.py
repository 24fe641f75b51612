"""Which memory: paged, or reserved up front."""

from quire.core.config import MemoryConfig
from quire.memory.interface import Memory
from quire.memory.paged import PagedMemory
from quire.memory.reserved import ReservedMemory


def make_memory(
    config: MemoryConfig, num_blocks: int, max_model_len: int, fingerprint: str = "", num_swap_blocks: int = 0
) -> Memory:
    """`config` is resolved: where memory is reserved its blocks hold one token."""
    if config.reservation != "paged":
        return ReservedMemory(num_blocks, config.reservation, max_model_len)
    caches, shares = config.enable_prefix_caching, config.share
    return PagedMemory(num_blocks, config.block_size, fingerprint, caches, shares, num_swap_blocks)

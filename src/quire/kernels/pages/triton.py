"""Block copies in Triton. Promises are those of the reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.pages import reference

TILE_WORDS = 4096  # words of 8 bytes that a program holds: 32 KiB
MOST_WORDS = 512  # of one copy: a single block is spread over the device too
MOST_COPIES = 256  # more would leave less than a cache line per copy


@triton.jit
def _copy_kernel(pool, sources, targets, count, stride, words, COPIES: tl.constexpr, WORDS: tl.constexpr):
    """One stretch of every block: all sources are read before any target is written, so chains come out right."""
    copy = tl.arange(0, COPIES)
    source = tl.load(sources + copy, mask=copy < count, other=0).to(tl.int64)
    target = tl.load(targets + copy, mask=copy < count, other=0).to(tl.int64)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)[None, :]
    inside = (copy < count)[:, None] & (word < words)
    held = tl.load(pool + source[:, None] * stride + word, mask=inside)
    tl.debug_barrier()
    tl.store(pool + target[:, None] * stride + word, held, mask=inside)


def copy_blocks(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """pool uint8 [num_blocks, block_bytes]: block targets[i] becomes a copy of sources[i] as it was before."""
    count = sources.shape[0]
    if count == 0:
        return
    if count > MOST_COPIES:
        reference.copy_blocks(pool, sources, targets)
        return
    wide = not any(size % 8 for size in (pool.shape[1], pool.stride(0), pool.storage_offset()))
    words = pool.view(torch.int64) if wide else pool
    copies = triton.next_power_of_2(count)
    stretch = min(MOST_WORDS, TILE_WORDS // copies)
    _copy_kernel[(-(-words.shape[1] // stretch), 1, 1)](
        words, sources, targets, count, words.stride(0), words.shape[1], copies, stretch, num_warps=8
    )

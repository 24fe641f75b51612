"""Prefill attention over contiguous K and V, straight from the projection, by PyTorch's fused attention.

For rows without a cached prefix: their keys are this step's own tokens, so no page is read. On NVIDIA GPUs cuDNN is
preferred; for long prompts it is faster than any kernel over pages, but it plans for half a second at each new length.
So prompts are padded to a few lengths, which are planned at start; prompts that would need much padding go elsewhere.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

# In order of preference on a GPU; elsewhere PyTorch chooses.
GPU_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
STOP = 4096  # tokens: prompts are padded to a multiple of it
MOST_STOPS = 2
MOST_TOGETHER = 2  # prompts in one call: each number of them needs plans of its own
MOST_PADDING = 0.1  # of a stop; work grows with the square, and the kernel over pages is a third slower


def stops(max_tokens: int, max_length: int) -> tuple[int, ...]:
    """The lengths that prompts are padded to, for steps of `max_tokens` and prompts of `max_length`."""
    candidates = range(STOP, max_tokens + 1, STOP)
    return tuple(stop for stop in candidates if (1 - MOST_PADDING) * stop <= max_length)[:MOST_STOPS]


def stop_for(length: int, among: Sequence[int]) -> int:
    """The length that a prompt is padded to; 0 if all would need too much padding."""
    return next((stop for stop in among if (1 - MOST_PADDING) * stop <= length <= stop), 0)


def prepare(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    stop: int,
    max_tokens: int,  # of a step
) -> None:
    """Makes cuDNN plan for one prompt of this length, and for as many as share a call, in this thread."""
    for count in range(1, min(MOST_TOGETHER, max_tokens // stop) + 1):
        heads = torch.zeros(count * stop, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
        rows = [(i * stop, (i + 1) * stop, stop) for i in range(count)]
        out = heads.new_empty(count * stop, num_heads * head_dim)
        contiguous_attention(heads, num_heads, rows, head_dim**-0.5, out)


def contiguous_attention(
    heads: Tensor,  # [T, Hq + 2 Hkv, D]: q, k and v
    num_heads: int,  # Hq
    rows: Sequence[tuple[int, int, int]],  # (first, last + 1, padded length) of each prompt, in host memory
    scale: float,
    out: Tensor,  # [T, Hq * D]
) -> Tensor:
    """Causal attention of each row over its own tokens: in `out`, whose other tokens are left alone, or in new memory.

    Up to MOST_TOGETHER prompts of one length that make up the whole step run in one call, whose result is returned:
    `out` is not written, which saves a copy of every token.
    """
    num_tokens, _, head_dim = heads.shape
    lengths = {(end - first, padded) for first, end, padded in rows}
    length, padded = next(iter(lengths))
    is_all = len(lengths) == 1 and length == padded and len(rows) * length == num_tokens
    if is_all and len(rows) <= MOST_TOGETHER:
        result = _attend(heads.unflatten(0, (len(rows), length)), num_heads, scale)
        return result.reshape(num_tokens, num_heads * head_dim)
    results = out.view(out.shape[0], num_heads, head_dim)
    for first, end, padded in rows:
        # Causal attention never reads the padding behind a prompt.
        piece = pad(heads[first:end], (0, 0, 0, 0, 0, padded - (end - first)))
        results[first:end] = _attend(piece[None], num_heads, scale)[0, : end - first]
    return out


def _attend(heads: Tensor, num_heads: int, scale: float) -> Tensor:
    """[B, T, Hq + 2 Hkv, D] -> [B, T, Hq, D]."""
    num_kv_heads = (heads.shape[2] - num_heads) // 2
    q, k, v = heads.transpose(1, 2).split([num_heads, num_kv_heads, num_kv_heads], 1)
    # Nothing to prefer where PyTorch has one backend.
    preferred = sdpa_kernel(GPU_BACKENDS, set_priority=True) if q.device.type == "cuda" else nullcontext()
    with preferred:
        result = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=num_heads != num_kv_heads
        )
    return result.transpose(1, 2)

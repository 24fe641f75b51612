"""Attention within whole sequences by torch's fused kernels, one sequence after another."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention.reference import by_distance


def full_attention(
    q: Tensor,  # [T, Hq, D], may be a view into qkv, as k and v
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,
    starts: Tensor,  # [R + 1] int32: sequence r is tokens starts[r]:starts[r + 1]
    scale: float,
    out: Tensor | None = None,
    reach: int = 0,  # 0: no limit; else a token sees this many tokens on each side, and itself
    slopes: Tensor | None = None,  # [Hq, 2 * reach + 1] float32, see the reference
) -> Tensor:  # [T, Hq * D]
    """Every token attends to all tokens of its own sequence, and to no other."""
    num_tokens, num_heads, head_dim = q.shape
    bounds = starts.tolist()
    longest = max((last - first for first, last in pairwise(bounds)), default=0)
    mask = _mask(longest, reach, slopes, q)
    if out is None:
        out = q.new_empty(num_tokens, num_heads * head_dim)
    by_head = out.view(num_tokens, num_heads, head_dim)
    for first, last in pairwise(bounds):
        if first == last:
            continue
        query, key, value = (part[first:last].transpose(0, 1)[None] for part in (q, k, v))
        seen = None if mask is None else mask[:, : last - first, : last - first]
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        by_head[first:last] = attended[0].transpose(0, 1)
    return out


def _mask(length: int, reach: int, slopes: Tensor | None, q: Tensor) -> Tensor | None:
    """[heads or 1, length, length] in q's type: what is added to scores of the longest sequence."""
    if not reach and slopes is None:
        return None
    positions = torch.arange(length, device=q.device)
    distances = positions[None, :] - positions[:, None]
    mask = torch.zeros(1, length, length, dtype=q.dtype, device=q.device)
    if slopes is not None:
        mask = by_distance(slopes.to(q.dtype), distances)
    if reach:
        mask = mask.masked_fill(distances.abs() > reach, float("-inf"))
    return mask

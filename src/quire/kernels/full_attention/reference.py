"""Full attention in plain torch, one sequence after another."""

from itertools import pairwise

import torch
from torch import Tensor


def full_attention(
    q: Tensor,  # [T, Hq, D], may be a view into qkv, as k and v
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,
    starts: Tensor,  # [R + 1] int32: sequence r is tokens starts[r]:starts[r + 1]
    scale: float,
    out: Tensor | None = None,
) -> Tensor:  # [T, Hq * D]
    """Every token attends to all tokens of its own sequence, and to no other. A sequence of none is fine."""
    num_tokens, num_heads, head_dim = q.shape
    result = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    bounds = starts.tolist()
    for first, last in pairwise(bounds):
        result[first:last] = _attend(q[first:last], k[first:last], v[first:last], scale)
    flat = result.view(num_tokens, num_heads * head_dim)
    return flat if out is None else out.copy_(flat)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1).float()
    v = v.repeat_interleave(group, dim=1).float()
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v).to(q.dtype)

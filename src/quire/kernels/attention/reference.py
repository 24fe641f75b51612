"""Attention over paged K and V, and within whole sequences, in plain torch, one request after another."""

from itertools import pairwise

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,  # [T, Hq, D], may be a view into qkv
    k_pages: Tensor,  # [num_blocks, block_size, Hkv, D], any strides but the last
    v_pages: Tensor,
    query_starts: Tensor,  # [R + 1] int32
    context_lens: Tensor,  # [R] int32, this step's tokens included
    block_tables: Tensor,  # [R, max_blocks] int32
    scale: float,
    window: int = 0,  # 0: none; else a query sees its last `window` positions, itself included
    out: Tensor | None = None,
    tree_starts: Tensor | None = None,  # [T] int32; -1: the query's request has no token tree in this step
    ancestors: Tensor | None = None,  # [T] int64; bit n: the query sees the tree's node n
    *,
    soft_cap: float = 0.0,  # 0: none; else scores become soft_cap * tanh(score / soft_cap)
    # float32, added to scores: [Hq] times the distance of the key (ALiBi), or, by the distance, an entry of
    # [Hq, 2 * reach + 1], whose middle is distance 0 and whose ends stand for all beyond (T5)
    slopes: Tensor | None = None,
    k_scales: Tensor | None = None,  # [num_blocks, Hkv, block_size]: what int8 pages are multiplied by
    v_scales: Tensor | None = None,
) -> Tensor:  # [T, Hq * D]
    """Causal attention of every request's queries, the last of its context, over its pages.

    A query's result depends on its own context alone. Masked positions never count, not even NaNs in their slots. A
    request with a token tree has node n's K and V at position tree_start + n, parents before their children: a query
    sees everything before the tree, and of the tree its ancestors and itself.
    """
    num_tokens, num_heads, head_dim = q.shape
    result = torch.zeros(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    starts = query_starts.tolist()
    lengths = context_lens.tolist()
    for row, context_len in enumerate(lengths):
        first, last = starts[row], starts[row + 1]
        if first == last or context_len == 0:
            continue
        k = _gather(k_pages, k_scales, block_tables[row], context_len)
        v = _gather(v_pages, v_scales, block_tables[row], context_len)
        if tree_starts is None or ancestors is None or (start := int(tree_starts[first])) < 0:
            result[first:last] = _attend(q[first:last], k, v, context_len, scale, window, soft_cap, slopes)
            continue
        for query in range(first, last):
            path = _path(start, int(ancestors[query]))
            seen = (k[path], v[path], len(path))
            result[query] = _attend(q[query : query + 1], *seen, scale, window, soft_cap, slopes)[0]
    flat = result.view(num_tokens, num_heads * head_dim)
    return flat if out is None else out.copy_(flat)


def full_attention(
    q: Tensor,  # [T, Hq, D], may be a view into qkv, as k and v
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,
    starts: Tensor,  # [R + 1] int32: sequence r is tokens starts[r]:starts[r + 1]
    scale: float,
    out: Tensor | None = None,
    reach: int = 0,  # 0: no limit; else a token sees this many tokens on each side, and itself
    slopes: Tensor | None = None,  # [Hq, 2 * reach + 1] float32: added to scores by distance, as above
) -> Tensor:  # [T, Hq * D]
    """Every token attends to all tokens of its own sequence, and to no other. A sequence of none is fine."""
    num_tokens, num_heads, head_dim = q.shape
    result = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    bounds = starts.tolist()
    for first, last in pairwise(bounds):
        hidden = bias = None
        positions = torch.arange(last - first, device=q.device)
        distances = positions[None, :] - positions[:, None]
        if reach:
            hidden = distances.abs() > reach
        if slopes is not None:
            bias = _by_distance(slopes, distances)
        result[first:last] = _attend_all(
            q[first:last], k[first:last], v[first:last], scale, hidden, bias=bias
        )
    flat = result.view(num_tokens, num_heads * head_dim)
    return flat if out is None else out.copy_(flat)


def _path(tree_start: int, ancestors: int) -> list[int]:
    """The positions that a query in a tree sees, in order."""
    nodes = [tree_start + n for n in range(64) if ancestors >> n & 1]
    return [*range(tree_start), *nodes]


def _gather(pages: Tensor, scales: Tensor | None, block_table: Tensor, context_len: int) -> Tensor:
    block_size = pages.shape[1]
    num_blocks = -(-context_len // block_size)
    blocks = block_table[:num_blocks].long()
    gathered = pages[blocks]
    if scales is not None:
        gathered = gathered.float() * scales[blocks].transpose(1, 2).float()[..., None]
    return gathered.reshape(num_blocks * block_size, *pages.shape[2:])[:context_len].float()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context_len: int,
    scale: float,
    window: int,
    soft_cap: float,
    slopes: Tensor | None,
) -> Tensor:
    num_queries = len(q)
    key_positions = torch.arange(context_len, device=q.device)
    query_positions = key_positions[context_len - num_queries :]
    hidden = key_positions[None, :] > query_positions[:, None]
    if window > 0:
        hidden |= key_positions[None, :] <= query_positions[:, None] - window
    bias = None
    if slopes is not None:
        bias = _by_distance(slopes, key_positions[None, :] - query_positions[:, None])
    return _attend_all(q, k, v, scale, hidden, soft_cap, bias)


def _by_distance(slopes: Tensor, distances: Tensor) -> Tensor:
    """[heads, queries, keys]: what scores gain. distances [queries, keys], of the keys."""
    if slopes.dim() == 1:
        return slopes[:, None, None] * distances
    reach = slopes.shape[1] // 2
    return slopes[:, distances.clamp(-reach, reach) + reach]


def _attend_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    hidden: Tensor | None = None,
    soft_cap: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """hidden [queries, keys]: pairs that do not count; bias [heads, queries, keys] is added to scores."""
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1).float()
    v = v.repeat_interleave(group, dim=1).float()
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v).to(q.dtype)

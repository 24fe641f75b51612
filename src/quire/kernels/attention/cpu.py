"""Attention over paged K and V, and within whole sequences, by native code.

Promises are those of the reference, and one more: a query's result has the same bits in a decode, in a chunk, alone or
in a batch, at any block size.
"""

import torch
from torch import Tensor

from quire.kernels import native


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
    tree_starts: Tensor | None = None,  # [T] int32 and
    ancestors: Tensor | None = None,  # [T] int64, see the reference
    *,
    soft_cap: float = 0.0,  # as in the reference, and
    slopes: Tensor | None = None,  # [Hq] or [Hq, 2 * reach + 1] float32
    k_scales: Tensor | None = None,  # [num_blocks, Hkv, block_size]: what int8 pages are multiplied by
    v_scales: Tensor | None = None,
) -> Tensor:  # [T, Hq * D]
    """Causal attention of every request's queries, the last of its context, over its pages."""
    tokens, heads, head_dim = q.shape
    out = native.empty(tokens, heads * head_dim) if out is None else out
    native.check_floats(q, out, slopes)
    native.check_indices(torch.int32, query_starts, context_lens, tree_starts)
    native.check_indices(torch.int64, ancestors)
    if block_tables.dtype is not torch.int32 or block_tables.stride(-1) != 1:
        raise TypeError(f"block tables must be int32 with dense rows, not {block_tables.dtype}")
    native.call(
        "paged_attention",
        (
            q.data_ptr(), q.stride(0), q.stride(1), heads, k_pages.shape[2], head_dim,
            native.PAGE_CODES[k_pages.dtype], k_pages.shape[1],
            k_pages.data_ptr(), *k_pages.stride()[:3],
            v_pages.data_ptr(), *v_pages.stride()[:3],
            query_starts.data_ptr(), context_lens.data_ptr(), context_lens.shape[0],
            block_tables.data_ptr(), block_tables.stride(0),
            native.real(scale), window, out.data_ptr(), out.stride(0),
            native.address(tree_starts), native.address(ancestors), *native.page_scales(k_pages, k_scales, v_scales),
            native.real(soft_cap), native.address(slopes), _reach(slopes),
        ),
        (
            q, k_pages, v_pages, query_starts, context_lens, block_tables, out, tree_starts, ancestors, k_scales,
            v_scales, slopes,
        ),
    )  # fmt: skip
    return out


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
    tokens, heads, head_dim = q.shape
    out = native.empty(tokens, heads * head_dim) if out is None else out
    native.check_floats(q, k, v, out, slopes)
    native.check_indices(torch.int32, starts)
    if slopes is not None and reach:
        raise ValueError("a table of scores by distance has no window beside it: leave out reach")
    if not 0 <= reach < 2**31:
        raise ValueError(f"reach={reach} must be 0 to {2**31 - 1}")
    if not q.stride() == k.stride() == v.stride():  # views into one qkv, or three alike
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if k.stride() != q.stride():
            raise TypeError("q, k and v must lie alike, as views into one qkv do")
    native.call(
        "full_attention",
        (
            q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(0), q.stride(1), heads, k.shape[1], head_dim,
            starts.data_ptr(), starts.shape[0] - 1, native.real(scale), out.data_ptr(), out.stride(0), reach,
            native.address(slopes), _reach(slopes),
        ),
        (q, k, v, starts, out, slopes),
    )  # fmt: skip
    return out


def _reach(slopes: Tensor | None) -> int:
    """Of a table of scores by distance; 0: there is none."""
    return 0 if slopes is None or slopes.dim() == 1 else slopes.shape[1] // 2

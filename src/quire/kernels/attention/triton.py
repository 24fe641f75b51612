"""Attention over paged K and V by Triton kernels. Promises are those of the reference.

Rows with one query are cut along their context (`triton_decode`), rows with more into tiles of queries
(`triton_prompt`). A plan (`triton_plan`) says how; make it once per step and hand it to every layer.
"""

import math

import torch
from torch import Tensor

from quire.kernels.attention.reference import full_attention
from quire.kernels.attention.triton_decode import decode
from quire.kernels.attention.triton_plan import AttentionPlan, AttentionPlanner, StepPlanner
from quire.kernels.attention.triton_prompt import fixed_decode, prompt
from quire.kernels.attention.triton_tile import PageScales
from quire.kernels.attention.triton_tree import fixed_tree, tree_prompt
from quire.kernels.attention.tuning import AttentionTuning

__all__ = [
    "AttentionPlan",
    "AttentionPlanner",
    "AttentionTuning",
    "StepPlanner",
    "full_attention",
    "paged_attention",
]

MAX_HEAD_DIM = 256


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
    ancestors: Tensor | None = None,  # [T] int64, see the reference; with them
    positions: Tensor | None = None,  # [T] int32, of the queries in their sequences
    *,
    soft_cap: float = 0.0,  # as in the reference, and
    slopes: Tensor | None = None,  # [Hq] or [Hq, 2 * reach + 1] float32
    plan: AttentionPlan | None = None,  # of these rows and this window; made here if None
    max_query_len: int | None = None,  # 1: every row has one query at most, and no prompt kernel is launched
    deterministic: bool = False,  # for a plan made here
    k_scales: Tensor | None = None,  # [num_blocks, Hkv, block_size]: what int8 pages are multiplied by
    v_scales: Tensor | None = None,
) -> Tensor:  # [T, Hq * D]
    """Causal attention of every request's queries, the last of its context, over its pages.

    Rows without context are padding. Of an `out` that is given, those with one query get zeros unless the plan is
    deterministic; the part of others is left as it was. With a deterministic plan, a query's result has the same bits
    in a decode, in a chunk, in a tree, alone or in a batch.
    """
    _check(q, k_pages, v_pages, block_tables, query_starts, context_lens)
    num_tokens, num_heads, head_dim = q.shape
    if out is None:
        out = torch.zeros(num_tokens, num_heads * head_dim, dtype=q.dtype, device=q.device)
    if plan is None:
        planner = AttentionPlanner(
            context_lens.shape[0], num_heads, k_pages.shape[2], head_dim, q.device,
            max_tokens=num_tokens, max_context=block_tables.shape[1] * k_pages.shape[1],
            dtype=q.dtype, deterministic=deterministic,
        )  # fmt: skip
        plan = planner.plan(query_starts, context_lens, context_lens.shape[0], window=window)
    if plan.window != window:
        raise ValueError(
            f"the plan was made for window {plan.window}, this layer has {window}: make one for each"
        )
    # Scores are taken in base 2: that is what the hardware has.
    scales = _page_scales(k_pages, v_pages, k_scales, v_scales)
    base_2 = scale * math.log2(math.e)
    arguments = (q, k_pages, v_pages, block_tables, plan, base_2, scales, out, soft_cap, slopes)
    (fixed_decode if plan.chunk else decode)(*arguments)
    if tree_starts is not None and ancestors is not None and positions is not None:
        (fixed_tree if plan.chunk else tree_prompt)(*arguments, tree_starts, ancestors, positions)
    elif max_query_len is None or max_query_len > 1:
        prompt(*arguments)
    return out


def _page_scales(
    k_pages: Tensor, v_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None
) -> PageScales:
    if k_scales is None or v_scales is None:
        if k_pages.dtype is torch.int8:
            raise TypeError("pages in int8 have scales: give k_scales and v_scales")
        return PageScales(k_pages, v_pages, (0, 0), exist=False)
    if k_scales.stride() != v_scales.stride() or k_scales.stride(-1) != 1:
        raise TypeError("scales of K and V must have the same strides and be dense within a block")
    return PageScales(k_scales, v_scales, k_scales.stride()[:2], exist=True)


def _check(q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, starts: Tensor, lens: Tensor) -> None:
    """Refuses what the kernels would misread."""
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"head size {q.shape[-1]}; these kernels go up to {MAX_HEAD_DIM}")
    if q.shape[1] % k_pages.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k_pages.shape[2]} KV heads evenly")
    if k_pages.stride() != v_pages.stride():
        raise TypeError("K and V pages must have the same strides, as views of one pool have")
    for tensor in (q, k_pages, v_pages):
        if tensor.stride(-1) != 1:
            raise TypeError(f"the last dimension must be dense, not with strides {tensor.stride()}")
    for tensor in (tables, starts, lens):
        if tensor.dtype is not torch.int32 or tensor.stride(-1) != 1:
            raise TypeError(f"index tensors must be dense int32, not {tensor.dtype}")

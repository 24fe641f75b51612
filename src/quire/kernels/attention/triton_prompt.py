"""Attention of rows with several queries: tiles of queries over pages, no score matrix in memory.

A program takes some consecutive queries of one row with all heads that share a KV head, so a page is read once for
the whole group. Keys that every query sees run without masks. The deterministic form of the same kernel also takes
decodes: it sums keys in chunks at fixed positions, in any batch.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.triton_decode import reduce_pieces
from quire.kernels.attention.triton_plan import TOTAL_STRIDE, AttentionPlan, padded_power
from quire.kernels.attention.triton_tile import (
    NEGATIVE_INFINITY,
    PageScales,
    attend_tile,
    load_tile,
    merge,
    page_ids,
    row_slopes_of,
    slot_offsets,
    table_width,
    tile_scales,
    visible_keys,
    with_sinks,
)


def prompt(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, plan: AttentionPlan,
    scale: float, scales: PageScales, out: Tensor, soft_cap: float, slopes: Tensor | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    """Writes the results of all rows with more than one query; leaves other rows of `out` alone."""
    launch_tiles(
        _prompt_kernel, q, k_pages, v_pages, block_tables, plan, scale, scales, out,
        (plan.partial_acc, plan.partial_max, slopes, sinks),
        CHUNK=plan.chunk, CAP=soft_cap, SLOPED=table_width(slopes), SINKS=sinks is not None,
    )  # fmt: skip


def fixed_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, plan: AttentionPlan,
    scale: float, scales: PageScales, out: Tensor, soft_cap: float, slopes: Tensor | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    """`decode` with a deterministic plan: the kernel of prompts, then sums in order."""
    launch_tiles(
        _prompt_kernel, q, k_pages, v_pages, block_tables, plan, scale, scales, out,
        (plan.partial_acc, plan.partial_max, slopes, sinks), decodes=True,
        CHUNK=plan.chunk, CAP=soft_cap, SLOPED=table_width(slopes), SINKS=sinks is not None,
    )  # fmt: skip
    reduce_pieces(plan, q.shape[1], q.shape[2], out, sinks)


def launch_tiles(
    kernel: Any, q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, plan: AttentionPlan,
    scale: float, scales: PageScales, out: Tensor, own: tuple[Tensor | None, ...], decodes: bool = False,
    **constants: float,
) -> None:  # fmt: skip
    """Over the plan's rows with several queries, or its `decodes`; `own` follow the output among the arguments."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, tuning = k_pages.shape[2], plan.tuning
    bound = plan.num_decode_programs if decodes else plan.num_prompt_programs
    grid = min(bound * num_kv_heads, plan.num_multiprocessors * tuning.prompt_programs)
    if grid == 0:
        return
    kernel[(grid,)](
        q, k_pages, v_pages, plan.decode_items if decodes else plan.prompt_items,
        plan.totals[:1] if decodes else plan.totals[TOTAL_STRIDE:], block_tables, out, *own, scale, scales.k, scales.v,
        *q.stride()[:2], *k_pages.stride()[:3], *scales.strides, block_tables.stride(0), out.stride(0),
        KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=max(16, padded_power(head_dim)), BLOCK_SIZE=k_pages.shape[1],
        ROWS=tuning.prompt_rows, TILE=tuning.prompt_tile, WINDOW=plan.window, SCALED=scales.exist, **constants,
        num_warps=tuning.prompt_warps, num_stages=tuning.prompt_stages,
    )  # fmt: skip


@triton.jit
def _seen_keys(positions, tree_starts, ancestors, start, end, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """[rows, TILE]: which places of a tile each query may see."""
    keys = start + tl.arange(0, TILE)
    node = keys[None, :] - tree_starts[:, None]
    shift = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
    before = keys[None, :] <= positions[:, None]
    if WINDOW > 0:
        before = before & (keys[None, :] > positions[:, None] - WINDOW)
    seen = tl.where(node >= 0, ((ancestors[:, None] >> shift) & 1) == 1, before)
    return seen & (node < 64) & (keys < end)[None, :]


@triton.jit
def _attend_range(
    q, k_head, v_head, k_scales, v_scales, table, positions, begin, end, acc, top, total, scale, slopes,
    stride_block, stride_slot, stride_scales,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr,
    tree=None,
):  # fmt: skip
    """Online softmax over keys begin .. end; without masks `end - begin` must be whole tiles seen by all.

    `tree`: where the tree of each query begins, and the nodes that it sees; keys are then slots.
    """
    ids = page_ids(table, begin, end, BLOCK_SIZE, TILE)
    scale_offsets = slot_offsets(ids, begin, stride_scales, 1, BLOCK_SIZE, TILE)
    k_scale, v_scale = tile_scales(k_scales, v_scales, scale_offsets, begin, end, TILE, SCALED)
    for start in range(begin, end, TILE):
        offsets = slot_offsets(ids, start, stride_block, stride_slot, BLOCK_SIZE, TILE)
        k = load_tile(k_head, offsets, start, end, HEAD_DIM, BLOCK_D, TILE, MASKED)
        v = load_tile(v_head, offsets, start, end, HEAD_DIM, BLOCK_D, TILE, MASKED)
        ids = page_ids(table, start + TILE, end, BLOCK_SIZE, TILE)
        if tree is not None:
            visible = _seen_keys(positions, tree[0], tree[1], start, end, WINDOW, TILE)
        elif MASKED:
            visible = visible_keys(positions, start, end, WINDOW, TILE)
        else:
            visible = True
        acc, top, total = attend_tile(
            q, k, v, k_scale, v_scale, visible, acc, top, total, scale, slopes, positions, start, MASKED,
            SCALED, CAP, SLOPED,
        )  # fmt: skip
        scale_offsets = slot_offsets(ids, start + TILE, stride_scales, 1, BLOCK_SIZE, TILE)
        k_scale, v_scale = tile_scales(k_scales, v_scales, scale_offsets, start + TILE, end, TILE, SCALED)
    return acc, top, total


@triton.jit(do_not_specialize=["stride_table"])
def _prompt_kernel(
    q, k_pages, v_pages, items, totals, tables, out, partial_acc, partial_max, slopes, sinks, scale, k_scales, v_scales,
    stride_q_token, stride_q_head, stride_block, stride_slot, stride_head, stride_scales, stride_scale_head,
    stride_table, stride_out,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
    CHUNK: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    num_work = tl.load(totals) * KV_HEADS
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        index = work // KV_HEADS
        kv_head = work % KV_HEADS
        item = items + index * 8
        row, token, count, position = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        begin, end, first_slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)

        member = tl.arange(0, ROWS)
        query = member // GROUP
        heads = kv_head * GROUP + member % GROUP
        columns = tl.arange(0, BLOCK_D)
        real = (query < count)[:, None] & (columns < HEAD_DIM)[None, :]
        tokens = (token + query).to(tl.int64)
        q_tile = tl.load(
            q + tokens[:, None] * stride_q_token + heads[:, None] * stride_q_head + columns[None, :],
            real,
            0.0,
        )
        positions = position + query
        row_slopes = row_slopes_of(slopes, heads, query < count, SLOPED)
        table = tables + row.to(tl.int64) * stride_table
        k_head = k_pages + kv_head * stride_head
        v_head = v_pages + kv_head * stride_head
        k_head_scales = k_scales + kv_head * stride_scale_head
        v_head_scales = v_scales + kv_head * stride_scale_head

        top = tl.full([ROWS], NEGATIVE_INFINITY, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        if CHUNK > 0:
            for chunk in range(begin // CHUNK, tl.cdiv(end, CHUNK)):
                chunk_acc, chunk_top, chunk_total = _attend_range(
                    q_tile, k_head, v_head, k_head_scales, v_head_scales, table, positions,
                    tl.maximum(chunk * CHUNK, begin), tl.minimum(chunk * CHUNK + CHUNK, end),
                    tl.zeros([ROWS, BLOCK_D], tl.float32), tl.full([ROWS], NEGATIVE_INFINITY, tl.float32),
                    tl.zeros([ROWS], tl.float32), scale, row_slopes,
                    stride_block, stride_slot, stride_scales,
                    HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, WINDOW, True, SCALED, CAP, SLOPED,
                )  # fmt: skip
                acc, top, total = merge(acc, top, total, chunk_acc, chunk_top, chunk_total)
        else:
            # Keys below `open_end` are whole tiles that the first query sees, and so every other.
            open_end = begin
            if WINDOW == 0:
                open_end = (position + 1) // TILE * TILE
                acc, top, total = _attend_range(
                    q_tile, k_head, v_head, k_head_scales, v_head_scales, table, positions, begin, open_end,
                    acc, top, total, scale, row_slopes, stride_block, stride_slot, stride_scales,
                    HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, WINDOW, False, SCALED, CAP, SLOPED,
                )  # fmt: skip
            acc, top, total = _attend_range(
                q_tile, k_head, v_head, k_head_scales, v_head_scales, table, positions, open_end, end,
                acc, top, total, scale, row_slopes, stride_block, stride_slot, stride_scales,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, WINDOW, True, SCALED, CAP, SLOPED,
            )  # fmt: skip

        if first_slot < 0:
            # Rows past the last query may have seen nothing; they are not stored.
            result = acc / with_sinks(total, top, sinks, heads, query < count, SINKS)[:, None]
            pointers = out + tokens[:, None] * stride_out + heads[:, None] * HEAD_DIM + columns[None, :]
            tl.store(pointers, result.to(out.dtype.element_ty), real)
        else:
            partial = index.to(tl.int64) * (KV_HEADS * GROUP) + heads
            tl.store(partial_max + partial * 2, top, query < count)
            tl.store(partial_max + partial * 2 + 1, total, query < count)
            tl.store(partial_acc + partial[:, None] * HEAD_DIM + columns[None, :], acc, real)

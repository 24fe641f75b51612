"""Attention of rows with one query: pieces of contexts in parallel, then their sums."""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.triton_plan import AttentionPlan, padded_power, query_rows
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
from quire.kernels.dependents import EARLY, launch_dependents, wait_for_results

SUMS_AT_ONCE = 64  # partial sums × heads that a reduction holds in registers
USUAL_HEAD = 128  # wider heads hold fewer at once, to fit the registers


def decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, plan: AttentionPlan,
    scale: float, scales: PageScales, out: Tensor, soft_cap: float, slopes: Tensor | None, sinks: Tensor | None,
) -> None:  # fmt: skip
    """Writes the results of all rows with one query; leaves other rows of `out` alone."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, group = k_pages.shape[2], num_heads // k_pages.shape[2]
    tuning = plan.tuning
    _decode_kernel[(plan.num_decode_programs * num_kv_heads,)](
        q, k_pages, v_pages, plan.decode_items, plan.totals, block_tables, out,
        plan.row_slots, plan.partial_acc, plan.partial_max, plan.counters, slopes, sinks, scale, scales.k, scales.v,
        *q.stride()[:2], *k_pages.stride()[:3], *scales.strides, block_tables.stride(0), out.stride(0),
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_ROWS=query_rows(group), GROUP_PADDED=padded_power(group),
        HEAD_DIM=head_dim, BLOCK_D=max(16, padded_power(head_dim)), BLOCK_SIZE=k_pages.shape[1],
        TILE=tuning.decode_tile, WINDOW=plan.window, SCALED=scales.exist, FUSED=tuning.fused_reduction,
        SUMS=_sums_at_once(group, head_dim), CAP=soft_cap, SLOPED=table_width(slopes), SINKS=sinks is not None,
        num_warps=tuning.decode_warps, num_stages=tuning.decode_stages, maxnreg=tuning.decode_registers,
        **EARLY,
    )  # fmt: skip
    if not tuning.fused_reduction:
        reduce_pieces(plan, num_heads, head_dim, out, sinks)


def _sums_at_once(group: int, head_dim: int) -> int:
    """How many pieces of a row a reduction adds up at once."""
    return max(2, SUMS_AT_ONCE // padded_power(group) // max(1, padded_power(head_dim) // USUAL_HEAD))


def reduce_pieces(
    plan: AttentionPlan, num_heads: int, head_dim: int, out: Tensor, sinks: Tensor | None
) -> None:
    """Adds up the pieces of every row that has several; one program per row and query head."""
    _reduce_kernel[(plan.num_rows, num_heads)](
        plan.partial_acc, plan.partial_max, plan.row_slots, out, sinks, out.stride(0),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_D=padded_power(head_dim),
        SUMS=32, IN_ORDER=plan.chunk > 0, SINKS=sinks is not None, num_warps=4 if plan.chunk == 0 else 1,
    )  # fmt: skip


@triton.jit
def _merged_sums(
    partial_acc, partial_max, sinks, first, number, heads, inside,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
    SUMS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """[HEADS, BLOCK_D] of the results of one row's heads, from its slots first .. first + number."""
    columns = tl.arange(0, BLOCK_D)
    top = tl.full([HEADS], NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for start in range(0, number, SUMS):
        slots = start + tl.arange(0, SUMS)
        used = (slots < number)[:, None] & inside[None, :]
        at = (first + slots).to(tl.int64)[:, None] * NUM_HEADS + heads[None, :]
        # Other multiprocessors wrote these: read the shared cache, not a stale line of the nearest.
        tops = tl.load(partial_max + at * 2, used, NEGATIVE_INFINITY, cache_modifier=".cg")
        totals = tl.load(partial_max + at * 2 + 1, used, 0.0, cache_modifier=".cg")
        mask = used[:, :, None] & (columns < HEAD_DIM)[None, None, :]
        sums = tl.load(
            partial_acc + at[:, :, None] * HEAD_DIM + columns[None, None, :], mask, 0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == NEGATIVE_INFINITY, 0.0, new_top)
        shares = tl.exp2(tops - base[None, :])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(totals * shares, 0)
        acc = acc * shrink[:, None] + tl.sum(sums * shares[:, :, None], 0)
        top = new_top
    total = with_sinks(total, top, sinks, heads, inside, SINKS)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["stride_table"])
def _decode_kernel(
    q, k_pages, v_pages, items, totals, tables, out, row_slots, partial_acc, partial_max, counters, slopes, sinks,
    scale, k_scales, v_scales,
    stride_q_token, stride_q_head, stride_block, stride_slot, stride_head, stride_scales, stride_scale_head,
    stride_table, stride_out,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SCALED: tl.constexpr, FUSED: tl.constexpr, SUMS: tl.constexpr, CAP: tl.constexpr,
    SLOPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    launch_dependents()
    wait_for_results()
    # Heads of one piece are neighbours: they read the same pages at the same time.
    index = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    num_items = tl.load(totals)
    if index >= num_items:
        return
    item = items + index * 8
    row, token, count, position = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    begin, end, piece = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)

    # Rows of the tile: the group of heads of each sequence that shares this piece.
    tile_row = tl.arange(0, GROUP_ROWS)
    sharer = tile_row // GROUP_PADDED
    columns = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + tile_row % GROUP_PADDED
    used = (tile_row % GROUP_PADDED < GROUP) & (sharer < count)
    real = used[:, None] & (columns < HEAD_DIM)[None, :]
    tokens = (token + sharer).to(tl.int64)
    q_tile = tl.load(
        q + tokens[:, None] * stride_q_token + heads[:, None] * stride_q_head + columns[None, :], real, 0.0
    )
    first_slots = tl.load(row_slots + (row + sharer) * 4, used, 0)
    table = tables + row.to(tl.int64) * stride_table
    k_head = k_pages + kv_head * stride_head
    v_head = v_pages + kv_head * stride_head
    k_head_scales = k_scales + kv_head * stride_scale_head
    v_head_scales = v_scales + kv_head * stride_scale_head
    positions = tl.full([GROUP_ROWS], 0, tl.int32) + position
    row_slopes = row_slopes_of(slopes, heads, used, SLOPED)

    top = tl.full([GROUP_ROWS], NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, BLOCK_D], tl.float32)
    ids = page_ids(table, begin, end, BLOCK_SIZE, TILE)
    scale_offsets = slot_offsets(ids, begin, stride_scales, 1, BLOCK_SIZE, TILE)
    k_scale, v_scale = tile_scales(k_head_scales, v_head_scales, scale_offsets, begin, end, TILE, SCALED)
    for start in range(begin, end, TILE):
        offsets = slot_offsets(ids, start, stride_block, stride_slot, BLOCK_SIZE, TILE)
        k = load_tile(k_head, offsets, start, end, HEAD_DIM, BLOCK_D, TILE, True)
        v = load_tile(v_head, offsets, start, end, HEAD_DIM, BLOCK_D, TILE, True)
        # One tile ahead, so that loads of K and V never wait for the table.
        ids = page_ids(table, start + TILE, end, BLOCK_SIZE, TILE)
        visible = visible_keys(positions, start, end, WINDOW, TILE)
        acc, top, total = attend_tile(
            q_tile, k, v, k_scale, v_scale, visible, acc, top, total, scale, row_slopes, positions, start, True,
            SCALED, CAP, SLOPED,
        )  # fmt: skip
        # Scales are one tile ahead too, read when their blocks are known: too narrow for the compiler to do it.
        scale_offsets = slot_offsets(ids, start + TILE, stride_scales, 1, BLOCK_SIZE, TILE)
        k_scale, v_scale = tile_scales(
            k_head_scales, v_head_scales, scale_offsets, start + TILE, end, TILE, SCALED
        )

    if piece < 0:
        total = with_sinks(total, top, sinks, heads, used, SINKS)
        whole = acc / tl.where(total > 0, total, 1.0)[:, None]
        pointers = out + tokens[:, None] * stride_out + heads[:, None] * HEAD_DIM + columns[None, :]
        tl.store(pointers, whole.to(out.dtype.element_ty), real)
    else:
        partial = (first_slots + piece).to(tl.int64) * (KV_HEADS * GROUP) + heads
        tl.store(partial_max + partial * 2, top, used)
        tl.store(partial_max + partial * 2 + 1, total, used)
        tl.store(partial_acc + partial[:, None] * HEAD_DIM + columns[None, :], acc, real)
        if FUSED:
            # All threads have written before the counter is raised.
            tl.debug_barrier()
            for which in range(row, row + count):
                counter = counters + which * KV_HEADS + kv_head
                first_slot, num_slots = tl.load(row_slots + which * 4), tl.load(row_slots + which * 4 + 1)
                finished = tl.atomic_add(counter, 1, sem="acq_rel")
                if finished == num_slots - 1:
                    tl.store(counter, 0)  # for the next launch
                    few = tl.arange(0, GROUP_PADDED)
                    few_heads = kv_head * GROUP + few
                    result = _merged_sums(
                        partial_acc, partial_max, sinks, first_slot, num_slots, few_heads, few < GROUP,
                        KV_HEADS * GROUP, HEAD_DIM, BLOCK_D, GROUP_PADDED, SUMS, SINKS,
                    )  # fmt: skip
                    out_row = out + (token + which - row).to(tl.int64) * stride_out
                    tl.store(
                        out_row + few_heads[:, None] * HEAD_DIM + columns[None, :],
                        result.to(out.dtype.element_ty),
                        (few < GROUP)[:, None] & (columns < HEAD_DIM)[None, :],
                    )


@triton.jit
def _reduce_kernel(
    partial_acc, partial_max, row_slots, out, sinks, stride_out,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SUMS: tl.constexpr,
    IN_ORDER: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    first = tl.load(row_slots + tl.program_id(0) * 4)
    number = tl.load(row_slots + tl.program_id(0) * 4 + 1)
    if number < 2:
        return
    head = tl.program_id(1)
    token = tl.load(row_slots + tl.program_id(0) * 4 + 2)
    columns = tl.arange(0, BLOCK_D)
    if IN_ORDER:
        # One after another, as a prompt's program does with its chunks.
        top = tl.full([1], NEGATIVE_INFINITY, tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_D], tl.float32)
        single = tl.arange(0, 1)
        for slot in tl.range(0, number, loop_unroll_factor=4):
            at = (first + slot + single).to(tl.int64) * NUM_HEADS + head
            inside = (columns < HEAD_DIM)[None, :]
            sums = tl.load(partial_acc + at[:, None] * HEAD_DIM + columns[None, :], inside, 0.0)
            acc, top, total = merge(
                acc, top, total, sums, tl.load(partial_max + at * 2), tl.load(partial_max + at * 2 + 1)
            )
        result = acc / with_sinks(total, top, sinks, head + single, single == 0, SINKS)[:, None]
    else:
        heads = head + tl.arange(0, 1)
        result = _merged_sums(
            partial_acc, partial_max, sinks, first, number, heads, heads >= 0,
            NUM_HEADS, HEAD_DIM, BLOCK_D, 1, SUMS, SINKS,
        )  # fmt: skip
    pointers = out + token.to(tl.int64) * stride_out + head * HEAD_DIM + columns[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), (columns < HEAD_DIM)[None, :])

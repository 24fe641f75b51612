"""Attention of rows with several queries where some of them are token trees: tiles of queries, as prompts have.

A tree's nodes lie in order after the row's known tokens; each sees everything before the tree, and of the tree the
nodes whose bits are set. Sums of `tree_prompt` follow slots, not depths, so results differ from a decode's in the last
bits. With `fixed_tree`, for deterministic plans, a node has the bits that a decode at its position has: a tile holds
the keys of fixed positions, and tiles and chunks are summed in order. Tiles before the tree are read once for all
queries of a program. From the tree's own tile on each query has a path of its own: its tiles are gathered by position,
wherever the nodes lie, and the other queries see nothing of them, which leaves their bits alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.core.draft import MAX_NODES
from quire.kernels.attention.triton_plan import AttentionPlan
from quire.kernels.attention.triton_prompt import _attend_range, launch_tiles
from quire.kernels.attention.triton_tile import (
    NEGATIVE_INFINITY,
    PageScales,
    attend_tile,
    load_tile,
    merge,
    row_slopes_of,
    table_width,
    tile_scales,
    visible_keys,
    with_sinks,
)

SHORTEST_WINDOW = 64  # a node sees all of its ancestors: no window may end among them


def tree_prompt(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, plan: AttentionPlan,
    scale: float, scales: PageScales, out: Tensor, soft_cap: float, slopes: Tensor | None, sinks: Tensor | None,
    tree_starts: Tensor, ancestors: Tensor, positions: Tensor,
) -> None:  # fmt: skip
    """Writes the results of all rows with more than one query; leaves other rows of `out` alone."""
    if 0 < plan.window < SHORTEST_WINDOW:
        raise ValueError(
            f"attention over {plan.window} positions has no trees: leave out tree_width, or add deterministic"
        )
    if slopes is not None:
        raise ValueError("slopes by distance have no trees: leave out tree_width, or add deterministic")
    if sinks is not None:
        raise ValueError("attention sinks have no trees: leave out tree_width, or add deterministic")
    launch_tiles(
        _tree_kernel, q, k_pages, v_pages, block_tables, plan, scale, scales, out, (tree_starts, ancestors, positions),
        CAP=soft_cap,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_table"])
def _tree_kernel(
    q, k_pages, v_pages, items, totals, tables, out, tree_starts, ancestors, positions, scale, k_scales, v_scales,
    stride_q_token, stride_q_head, stride_block, stride_slot, stride_head, stride_scales, stride_scale_head,
    stride_table, stride_out,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    num_work = tl.load(totals) * KV_HEADS
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        index = work // KV_HEADS
        kv_head = work % KV_HEADS
        item = items + index * 8
        row, token, count, end = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 5)

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
        first_position = tl.load(positions + token)
        position = tl.load(positions + tokens, query < count, first_position)
        seen_nodes = tl.load(ancestors + tokens, query < count, 0)
        tree_start = tl.load(tree_starts + token)
        tree_start = tl.where(tree_start < 0, end, tree_start)  # no tree: it begins past the end
        starts = tl.zeros([ROWS], tl.int32) + tree_start
        table = tables + row.to(tl.int64) * stride_table
        k_head = k_pages + kv_head * stride_head
        v_head = v_pages + kv_head * stride_head
        k_head_scales = k_scales + kv_head * stride_scale_head
        v_head_scales = v_scales + kv_head * stride_scale_head

        top = tl.full([ROWS], NEGATIVE_INFINITY, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        lowest = tl.min(position, 0)
        if WINDOW > 0:
            open_end = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE
        else:
            # Places below `open_end` are whole tiles that every query sees.
            open_end = tl.minimum(lowest + 1, tree_start) // TILE * TILE
            acc, top, total = _attend_range(
                q_tile, k_head, v_head, k_head_scales, v_head_scales, table, position, lowest * 0, open_end,
                acc, top, total, scale, 0.0, stride_block, stride_slot, stride_scales,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, WINDOW, False, SCALED, CAP, False,
            )  # fmt: skip
        acc, top, total = _attend_range(
            q_tile, k_head, v_head, k_head_scales, v_head_scales, table, position, open_end, end,
            acc, top, total, scale, 0.0, stride_block, stride_slot, stride_scales,
            HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, WINDOW, True, SCALED, CAP, False, (starts, seen_nodes),
        )  # fmt: skip
        # Rows past the last query are not stored.
        result = acc / total[:, None]
        pointers = out + tokens[:, None] * stride_out + heads[:, None] * HEAD_DIM + columns[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty), real)


def fixed_tree(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_tables: Tensor, plan: AttentionPlan,
    scale: float, scales: PageScales, out: Tensor, soft_cap: float, slopes: Tensor | None, sinks: Tensor | None,
    tree_starts: Tensor, ancestors: Tensor, positions: Tensor,
) -> None:  # fmt: skip
    """Writes the results of all rows with more than one query; leaves other rows of `out` alone."""
    # Tiles and warps are those of prompts: they decide bits.
    launch_tiles(
        _fixed_tree_kernel, q, k_pages, v_pages, block_tables, plan, scale, scales, out,
        (tree_starts, ancestors, positions, slopes, sinks), CHUNK=plan.chunk, NODES=MAX_NODES,
        CAP=soft_cap, SLOPED=table_width(slopes), SINKS=sinks is not None,
    )  # fmt: skip


@triton.jit
def _path_places(tree_start, seen, start, NODES: tl.constexpr, TILE: tl.constexpr):
    """[TILE]: the places of positions start .. start + TILE on the path of the nodes whose bits are set in `seen`."""
    node = tl.arange(0, NODES)
    on_path = ((seen >> node.to(tl.int64)) & 1).to(tl.int32)
    depth = tl.cumsum(on_path, 0) - on_path
    positions = start + tl.arange(0, TILE)
    found = ((positions - tree_start)[:, None] == depth[None, :]) & (on_path == 1)[None, :]
    of_tree = tl.sum(tl.where(found, node[None, :], 0), 1)
    return tl.where(positions < tree_start, positions, tree_start + of_tree)


@triton.jit
def _attend_paths(
    q, k_head, v_head, k_scales, v_scales, table, positions, query, tree_starts, ancestors, token_positions, token,
    count, begin, end, acc, top, total, scale, slopes, stride_block, stride_slot, stride_scales,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, NODES: tl.constexpr, SCALED: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Online softmax of each query in turn over positions begin .. end of its own path."""
    for which in range(tl.where(begin < end, count, 0)):
        tree_start = tl.load(tree_starts + token + which)
        seen = tl.load(ancestors + token + which)
        last = tl.minimum(tl.load(token_positions + token + which) + 1, end)
        for start in range(begin, last, TILE):
            places = _path_places(tree_start, seen, start, NODES, TILE)
            inside = start + tl.arange(0, TILE) < last
            ids = tl.load(table + places // BLOCK_SIZE, mask=inside, other=0)
            offsets = ids.to(tl.int64) * stride_block + (places % BLOCK_SIZE) * stride_slot
            k = load_tile(k_head, offsets, start, last, HEAD_DIM, BLOCK_D, TILE, True)
            v = load_tile(v_head, offsets, start, last, HEAD_DIM, BLOCK_D, TILE, True)
            scale_offsets = ids.to(tl.int64) * stride_scales + places % BLOCK_SIZE
            k_scale, v_scale = tile_scales(k_scales, v_scales, scale_offsets, start, last, TILE, SCALED)
            visible = visible_keys(positions, start, last, WINDOW, TILE) & (query == which)[:, None]
            acc, top, total = attend_tile(
                q, k, v, k_scale, v_scale, visible, acc, top, total, scale, slopes, positions, start, True,
                SCALED, CAP, SLOPED,
            )  # fmt: skip
    return acc, top, total


@triton.jit(do_not_specialize=["stride_table"])
def _fixed_tree_kernel(
    q, k_pages, v_pages, items, totals, tables, out, tree_starts, ancestors, token_positions, slopes, sinks, scale,
    k_scales, v_scales,
    stride_q_token, stride_q_head, stride_block, stride_slot, stride_head, stride_scales, stride_scale_head,
    stride_table, stride_out,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
    CHUNK: tl.constexpr, NODES: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    num_work = tl.load(totals) * KV_HEADS
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        kv_head = work % KV_HEADS
        item = items + work // KV_HEADS * 8
        row, token, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)

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
        positions = tl.load(token_positions + tokens, query < count, tl.load(token_positions + token))
        row_slopes = row_slopes_of(slopes, heads, query < count, SLOPED)
        begin, end = tl.min(positions, 0) * 0, tl.max(positions, 0) + 1
        if WINDOW > 0:
            begin = tl.maximum(tl.min(positions, 0) - WINDOW + 1, 0) // TILE * TILE
        tree_start = tl.load(tree_starts + token)
        # Whole tiles below this lie at their positions; without a tree all do.
        shared_end = tl.where(tree_start < 0, end, tree_start // TILE * TILE)
        table = tables + row.to(tl.int64) * stride_table
        k_head = k_pages + kv_head * stride_head
        v_head = v_pages + kv_head * stride_head
        k_head_scales = k_scales + kv_head * stride_scale_head
        v_head_scales = v_scales + kv_head * stride_scale_head

        top = tl.full([ROWS], NEGATIVE_INFINITY, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for chunk in range(begin // CHUNK, tl.cdiv(end, CHUNK)):
            first, last = tl.maximum(chunk * CHUNK, begin), tl.minimum(chunk * CHUNK + CHUNK, end)
            chunk_acc, chunk_top, chunk_total = _attend_range(
                q_tile, k_head, v_head, k_head_scales, v_head_scales, table, positions,
                first, tl.minimum(last, shared_end),
                tl.zeros([ROWS, BLOCK_D], tl.float32), tl.full([ROWS], NEGATIVE_INFINITY, tl.float32),
                tl.zeros([ROWS], tl.float32), scale, row_slopes,
                stride_block, stride_slot, stride_scales,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, WINDOW, True, SCALED, CAP, SLOPED,
            )  # fmt: skip
            chunk_acc, chunk_top, chunk_total = _attend_paths(
                q_tile, k_head, v_head, k_head_scales, v_head_scales, table, positions, query, tree_starts, ancestors,
                token_positions, token, count, tl.maximum(first, shared_end), last,
                chunk_acc, chunk_top, chunk_total, scale, row_slopes, stride_block, stride_slot, stride_scales,
                HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, WINDOW, NODES, SCALED, CAP, SLOPED,
            )  # fmt: skip
            acc, top, total = merge(acc, top, total, chunk_acc, chunk_top, chunk_total)

        # Rows past the last query have seen nothing; they are not stored.
        total = with_sinks(total, top, sinks, heads, query < count, SINKS)
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        pointers = out + tokens[:, None] * stride_out + heads[:, None] * HEAD_DIM + columns[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty), real)

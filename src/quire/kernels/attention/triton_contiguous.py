"""Attention of prompts over K and V that lie in one piece, read by the tensor memory accelerator.

Pages of long contexts may be gathered to such a piece first: at 8k tokens that costs a sixtieth of the attention,
and tiles then come by one instruction instead of one address per slot.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.attention.triton_plan import TOTAL_STRIDE, AttentionPlan, padded_power
from quire.kernels.attention.triton_tile import NEGATIVE_INFINITY, attend_tile, visible_keys

GATHER_TILE = 64


def gather(
    pages: Tensor,  # [num_blocks, block_size, Hkv, D]
    block_tables: Tensor,  # [R, max_blocks] int32
    context_lens: Tensor,  # [R] int32
    key_starts: Tensor,  # [R] int32: where each row begins in `out`; -1 for a row that is not gathered
    max_context: int,
    out: Tensor,  # [tokens, Hkv, D]
) -> Tensor:
    """Copies the pages of rows to one piece; the rest of a row's last tile becomes zeros."""
    rows, width = context_lens.shape[0], pages.shape[2] * pages.shape[3]
    if pages.stride(2) != pages.shape[3] or not out.is_contiguous():
        raise TypeError("a slot's heads must lie together in the pages and in the output")
    columns = min(1024, padded_power(width))
    _gather_kernel[(triton.cdiv(max_context, GATHER_TILE), rows, triton.cdiv(width, columns))](
        pages, block_tables, context_lens, key_starts, out, *pages.stride()[:2], block_tables.stride(0),
        WIDTH=width, COLUMNS=columns, BLOCK_SIZE=pages.shape[1], TILE=GATHER_TILE, num_warps=8,
    )  # fmt: skip
    return out


def contiguous_prompt(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [tokens, Hkv, D], dense heads; may be a view into qkv
    v: Tensor,
    key_starts: Tensor,  # [R] int32
    plan: AttentionPlan,
    scale: float,
    out: Tensor,  # [T, Hq * D]
) -> None:
    """Writes the results of all rows with more than one query. What follows a row in k and v must be finite."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, tuning = k.shape[1], plan.tuning
    if padded_power(head_dim) != head_dim:
        raise ValueError(f"head size {head_dim} is no power of two: use the kernel over pages")
    shape, tile = [k.shape[0], num_kv_heads * head_dim], [tuning.prompt_tile, head_dim]
    keys = TensorDescriptor(k, shape, [k.stride(0), 1], tile)
    values = TensorDescriptor(v, shape, [v.stride(0), 1], tile)
    grid = min(plan.num_prompt_programs * num_kv_heads, plan.num_multiprocessors * tuning.prompt_programs)
    _contiguous_kernel[(grid,)](
        q, keys, values, plan.prompt_items, plan.totals[TOTAL_STRIDE:], key_starts, out,
        scale * math.log2(math.e), *q.stride()[:2], out.stride(0),
        KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
        ROWS=tuning.prompt_rows, TILE=tuning.prompt_tile, WINDOW=plan.window,
        num_warps=tuning.prompt_warps, num_stages=tuning.prompt_stages,
    )  # fmt: skip


def aligned_starts(contexts: list[int], device: torch.device | str, tile: int = 128) -> tuple[Tensor, int]:
    """(where each row begins, tokens in all) with rows begun at whole tiles; for host-known lengths."""
    starts, total = [], 0
    for context in contexts:
        starts.append(total)
        total += -(-context // tile) * tile
    return torch.tensor(starts, dtype=torch.int32, device=device), total


@triton.jit(do_not_specialize=["stride_table"])
def _gather_kernel(
    pages, tables, lens, key_starts, out, stride_block, stride_slot, stride_table,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    start = tl.program_id(0) * TILE
    length = tl.load(lens + row)
    base = tl.load(key_starts + row)
    if (start >= length) | (base < 0):
        return
    positions = start + tl.arange(0, TILE)
    ids = tl.load(tables + row.to(tl.int64) * stride_table + positions // BLOCK_SIZE, positions < length, 0)
    offsets = ids.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * stride_slot
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < WIDTH)[None, :]
    content = tl.load(
        pages + offsets[:, None] + columns[None, :], (positions < length)[:, None] & inside, 0.0
    )
    targets = (base + positions).to(tl.int64) * WIDTH
    tl.store(out + targets[:, None] + columns[None, :], content, inside)


@triton.jit
def _attend_range(
    q, keys, values, base, column, positions, begin, end, acc, top, total, scale,
    TILE: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, TILE):
        k = keys.load([base + start, column])
        v = values.load([base + start, column])
        if MASKED:
            visible = visible_keys(positions, start, end, WINDOW, TILE)
        else:
            visible = True
        acc, top, total = attend_tile(q, k, v, visible, acc, top, total, scale, MASKED)
    return acc, top, total


@triton.jit
def _contiguous_kernel(
    q, keys, values, items, totals, key_starts, out, scale, stride_q_token, stride_q_head, stride_out,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    num_work = tl.load(totals) * KV_HEADS
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = items + work // KV_HEADS * 8
        kv_head = work % KV_HEADS
        row, token, count, position = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        begin, end = tl.load(item + 4), tl.load(item + 5)
        base = tl.load(key_starts + row)

        member = tl.arange(0, ROWS)
        query = member // GROUP
        heads = kv_head * GROUP + member % GROUP
        columns = tl.arange(0, HEAD_DIM)
        real = (query < count)[:, None]
        tokens = (token + query).to(tl.int64)
        q_tile = tl.load(
            q + tokens[:, None] * stride_q_token + heads[:, None] * stride_q_head + columns[None, :],
            real,
            0.0,
        )
        positions = position + query
        top = tl.full([ROWS], NEGATIVE_INFINITY, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        open_end = begin
        if WINDOW == 0:
            open_end = (position + 1) // TILE * TILE
            acc, top, total = _attend_range(
                q_tile, keys, values, base, kv_head * HEAD_DIM, positions, begin, open_end,
                acc, top, total, scale, TILE, WINDOW, False,
            )  # fmt: skip
        acc, top, total = _attend_range(
            q_tile, keys, values, base, kv_head * HEAD_DIM, positions, open_end, end,
            acc, top, total, scale, TILE, WINDOW, True,
        )  # fmt: skip
        pointers = out + tokens[:, None] * stride_out + heads[:, None] * HEAD_DIM + columns[None, :]
        tl.store(pointers, (acc / total[:, None]).to(out.dtype.element_ty), real)

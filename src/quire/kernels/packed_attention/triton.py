"""FlashAttention of packed sequences in Triton: softmax in tiles, and a backward pass that computes scores again.

The forward pass keeps each softmax's statistics; the backward pass runs over keys for dK and dV, over queries for dQ.
Blocks that a sparse mask leaves out are neither read nor multiplied. Promises are those of the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.attention.triton_tile import INTERPRETED, LOG2_E, NEGATIVE_INFINITY
from quire.kernels.packed_attention.reference import BLOCK

TILE = BLOCK


@triton.jit
def _load(pointer, rows, last, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[TILE, BLOCK_D] of one head; zeros beyond the sequence and the head."""
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < last)[:, None] & (columns < D)[None, :]
    tile = tl.load(pointer + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0)
    if INTERPRETED:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _store(pointer, rows, last, stride, tile, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < last)[:, None] & (columns < D)[None, :]
    target = pointer + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(target, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _scores(q, k, queries, keys, last, scale):
    """[TILE, TILE] in base 2, minus infinity where a query does not see a key."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
    return tl.where((keys[None, :] <= queries[:, None]) & (keys < last)[None, :], scores, NEGATIVE_INFINITY)


@triton.jit
def _is_seen(mask, query_block, key_block, num_blocks, SPARSE: tl.constexpr):
    if SPARSE:
        return tl.load(mask + query_block * num_blocks + key_block) != 0
    else:
        return True


@triton.jit
def _forward(
    q, k, v, out, sums, starts, mask, scale, num_tokens, num_blocks,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    SPARSE: tl.constexpr,
):  # fmt: skip
    block, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    queries = first + block * TILE + tl.arange(0, TILE)
    if first + block * TILE < last:
        group: tl.constexpr = HQ // HKV
        q_tile = _load(q + head * D, queries, last, HQ * D, D, BLOCK_D)
        top = tl.full([TILE], NEGATIVE_INFINITY, tl.float32)
        total = tl.zeros([TILE], tl.float32)
        result = tl.zeros([TILE, BLOCK_D], tl.float32)
        for key_block in range(block + 1):
            if _is_seen(mask, block, key_block, num_blocks, SPARSE):
                keys = first + key_block * TILE + tl.arange(0, TILE)
                k_tile = _load(k + head // group * D, keys, last, HKV * D, D, BLOCK_D)
                v_tile = _load(v + head // group * D, keys, last, HKV * D, D, BLOCK_D)
                scores = _scores(q_tile, k_tile, queries, keys, last, scale)
                new_top = tl.maximum(top, tl.max(scores, 1))
                safe = tl.where(new_top == NEGATIVE_INFINITY, 0.0, new_top)
                weights = tl.exp2(scores - safe[:, None])
                shrink = tl.exp2(top - safe)
                total = total * shrink + tl.sum(weights, 1)
                product = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
                result = result * shrink[:, None] + product
                top = new_top
        _store(out + head * D, queries, last, HQ * D, result / total[:, None], D, BLOCK_D)
        tl.store(sums + head * num_tokens + queries, (top + tl.log2(total)) / LOG2_E, mask=queries < last)


@triton.jit
def _backward_keys(
    grad, q, k, v, dk, dv, sums, delta, starts, mask, scale, num_tokens, num_blocks,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    SPARSE: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys: over the queries that follow, of every head of the group."""
    key_block, row, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    keys = first + key_block * TILE + tl.arange(0, TILE)
    if first + key_block * TILE < last:
        group: tl.constexpr = HQ // HKV
        k_tile = _load(k + kv_head * D, keys, last, HKV * D, D, BLOCK_D)
        v_tile = _load(v + kv_head * D, keys, last, HKV * D, D, BLOCK_D)
        dk_tile = tl.zeros([TILE, BLOCK_D], tl.float32)
        dv_tile = tl.zeros([TILE, BLOCK_D], tl.float32)
        for head in range(kv_head * group, (kv_head + 1) * group):
            for block in range(key_block, tl.cdiv(last - first, TILE)):
                if _is_seen(mask, block, key_block, num_blocks, SPARSE):
                    queries = first + block * TILE + tl.arange(0, TILE)
                    q_tile = _load(q + head * D, queries, last, HQ * D, D, BLOCK_D)
                    g_tile = _load(grad + head * D, queries, last, HQ * D, D, BLOCK_D)
                    scores = _scores(q_tile, k_tile, queries, keys, last, scale)
                    where = head * num_tokens + queries
                    total = tl.load(sums + where, mask=queries < last, other=0.0) * LOG2_E
                    d_row = tl.load(delta + where, mask=queries < last, other=0.0)
                    weights = tl.where((queries < last)[:, None], tl.exp2(scores - total[:, None]), 0.0)
                    dv_tile += tl.dot(tl.trans(weights.to(g_tile.dtype)), g_tile, input_precision="ieee")
                    dp = tl.dot(g_tile, tl.trans(v_tile), input_precision="ieee")
                    ds = weights * (dp - d_row[:, None]) * scale
                    dk_tile += tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, input_precision="ieee")
        _store(dk + kv_head * D, keys, last, HKV * D, dk_tile, D, BLOCK_D)
        _store(dv + kv_head * D, keys, last, HKV * D, dv_tile, D, BLOCK_D)


@triton.jit
def _backward_queries(
    grad, q, k, v, dq, sums, delta, starts, mask, scale, num_tokens, num_blocks,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    SPARSE: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries: over the keys before."""
    block, row, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    queries = first + block * TILE + tl.arange(0, TILE)
    if first + block * TILE < last:
        group: tl.constexpr = HQ // HKV
        q_tile = _load(q + head * D, queries, last, HQ * D, D, BLOCK_D)
        g_tile = _load(grad + head * D, queries, last, HQ * D, D, BLOCK_D)
        where = head * num_tokens + queries
        total = tl.load(sums + where, mask=queries < last, other=0.0) * LOG2_E
        d_row = tl.load(delta + where, mask=queries < last, other=0.0)
        dq_tile = tl.zeros([TILE, BLOCK_D], tl.float32)
        for key_block in range(block + 1):
            if _is_seen(mask, block, key_block, num_blocks, SPARSE):
                keys = first + key_block * TILE + tl.arange(0, TILE)
                k_tile = _load(k + head // group * D, keys, last, HKV * D, D, BLOCK_D)
                v_tile = _load(v + head // group * D, keys, last, HKV * D, D, BLOCK_D)
                scores = _scores(q_tile, k_tile, queries, keys, last, scale)
                weights = tl.exp2(scores - total[:, None])
                dp = tl.dot(g_tile, tl.trans(v_tile), input_precision="ieee")
                ds = weights * (dp - d_row[:, None]) * scale
                dq_tile += tl.dot(ds.to(k_tile.dtype), k_tile, input_precision="ieee")
        _store(dq + head * D, queries, last, HQ * D, dq_tile, D, BLOCK_D)


def forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,
    starts: Tensor,  # [R + 1] int32
    max_len: int,
    scale: float,
    mask: Tensor | None = None,  # [blocks, blocks] uint8
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    sums = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(max_len, TILE), len(starts) - 1, q.shape[1])
    _forward[grid](
        q, k, v, out, sums, starts, _mask(mask, q), scale, len(q), _width(mask), **_sizes(q, k, mask)
    )
    return out, sums


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    max_len: int,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    grad, q, k, v = (x.contiguous() for x in (grad, q, k, v))
    delta = (grad.float() * out.float()).sum(-1).t().contiguous()  # [Hq, T]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    blocks, rows = triton.cdiv(max_len, TILE), len(starts) - 1
    rest = (sums, delta, starts, _mask(mask, q), scale, len(q), _width(mask))
    sizes = _sizes(q, k, mask)
    warps = 8 if q.shape[2] > 64 else 4  # two accumulators of a tile spill with fewer
    _backward_keys[(blocks, rows, k.shape[1])](grad, q, k, v, dk, dv, *rest, **sizes, num_warps=warps)
    _backward_queries[(blocks, rows, q.shape[1])](grad, q, k, v, dq, *rest, **sizes)
    return dq, dk, dv


def _mask(mask: Tensor | None, like: Tensor) -> Tensor:
    """Without one, a tensor that is not read."""
    return like if mask is None else mask.contiguous()


def _width(mask: Tensor | None) -> int:
    return 0 if mask is None else mask.shape[1]


def _sizes(q: Tensor, k: Tensor, mask: Tensor | None) -> dict[str, object]:
    block_d = max(16, triton.next_power_of_2(q.shape[2]))
    return {
        "HQ": q.shape[1],
        "HKV": k.shape[1],
        "D": q.shape[2],
        "BLOCK_D": block_d,
        "TILE": TILE,
        "SPARSE": mask is not None,
    }

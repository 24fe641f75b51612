"""FlashAttention of packed sequences in Triton: softmax in tiles, and a backward pass that computes scores again.

The forward pass keeps each softmax's statistics. The backward pass runs over queries for dQ, then over keys for dK and
dV, so that no sum depends on the order of programs. Tiles before the diagonal need no mask; blocks that a sparse mask
leaves out are in no list, and cost nothing. Promises are those of the reference.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.attention.triton_tile import INTERPRETED, LOG2_E, NEGATIVE_INFINITY
from quire.kernels.packed_attention.reference import BLOCK


class TileSizes(NamedTuple):
    """How a kernel is launched."""

    queries: int
    keys: int
    warps: int
    stages: int


# Of 16-bit inputs: the fastest that quire_lab.benchmarks.train_gpu compares, with heads of 128 on an H200.
FORWARD, QUERIES, KEYS = TileSizes(128, 128, 8, 3), TileSizes(128, 64, 8, 3), TileSizes(64, 64, 4, 2)


@triton.jit
def _load(pointer, rows, count, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK_D] of one head and sequence; zeros beyond both."""
    columns = tl.arange(0, BLOCK_D)
    pointers = pointer + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if D != BLOCK_D:
        tile = tl.load(pointers, mask=(rows < count)[:, None] & (columns < D)[None, :], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=(rows < count)[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    if INTERPRETED:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _next(
    source, first, start, head, count, stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, LENGTH: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """LENGTH rows of a loop from `start` on, of one head and the sequence that begins at `first`.

    `source` is a tensor map of [T, heads * D], and what lies beyond the sequence is its neighbour's; where D is no
    power of two it is a pointer, and zeros lie beyond.
    """
    if D == BLOCK_D:
        tile = source.load([first + start, head * D])
        if INTERPRETED:
            tile = tile.to(tl.float32)
        return tile
    else:
        own = source + first.to(tl.int64) * stride + head * D
        return _load(own, start + tl.arange(0, LENGTH), count, stride, D, BLOCK_D, BOUNDED)


@triton.jit
def _store(pointer, rows, count, stride, tile, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    target = pointer + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(target, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    q_tile, k, v, first, kv_head, start, queries, count, k_stride, v_stride, scale, top, total, result,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """The online softmax with one more tile of keys. Causality hides what lies beyond the sequence."""
    keys = start + tl.arange(0, BN)
    k_tile = _next(k, first, start, kv_head, count, k_stride, D, BLOCK_D, BN, DIAGONAL)
    v_tile = _next(v, first, start, kv_head, count, v_stride, D, BLOCK_D, BN, DIAGONAL)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if DIAGONAL:
        scores = tl.where(keys[None, :] <= queries[:, None], scores, NEGATIVE_INFINITY)
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    result = tl.dot(weights.to(v_tile.dtype), v_tile, result * shrink[:, None], input_precision="ieee")
    return new_top, total, result


@triton.jit
def _forward(
    q, k, v, out, sums, starts, seen, num_seen, scale, num_tokens, width, q_stride, k_stride, v_stride,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    block, head, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    from_first = first.to(tl.int64)
    if block * BM < count:
        scale *= LOG2_E
        kv_head = head // (HQ // HKV)
        queries = block * BM + tl.arange(0, BM)
        q_tile = _load(q + from_first * q_stride + head * D, queries, count, q_stride, D, BLOCK_D, True)
        top = tl.full([BM], NEGATIVE_INFINITY, tl.float32)
        total = tl.zeros([BM], tl.float32)
        result = tl.zeros([BM, BLOCK_D], tl.float32)
        num_full = block * BM // BN
        for at in range(tl.load(num_seen + block) if SPARSE else num_full):
            start = (tl.load(seen + block * width + at) if SPARSE else at) * BN
            top, total, result = _attend(
                q_tile, k, v, first, kv_head, start, queries, count, k_stride, v_stride, scale, top, total,
                result, D, BLOCK_D, BN, False,
            )  # fmt: skip
        for at in range(num_full, tl.cdiv(tl.minimum(block * BM + BM, count), BN)):
            top, total, result = _attend(
                q_tile, k, v, first, kv_head, at * BN, queries, count, k_stride, v_stride, scale, top, total,
                result, D, BLOCK_D, BN, True,
            )  # fmt: skip
        _store(
            out + (from_first * HQ + head) * D, queries, count, HQ * D, result / total[:, None], D, BLOCK_D
        )
        where = sums + head.to(tl.int64) * num_tokens + from_first + queries
        tl.store(where, (top + tl.log2(total)) / LOG2_E, mask=queries < count)


@triton.jit
def _query_step(
    q_tile, g_tile, total, d_row, k, v, first, kv_head, start, queries, count, k_stride, v_stride, scale, dq_tile,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BN: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    keys = start + tl.arange(0, BN)
    k_tile = _next(k, first, start, kv_head, count, k_stride, D, BLOCK_D, BN, DIAGONAL)
    v_tile = _next(v, first, start, kv_head, count, v_stride, D, BLOCK_D, BN, DIAGONAL)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    dp = tl.dot(g_tile, tl.trans(v_tile), input_precision="ieee")
    weights = tl.exp2(scores * scale - total[:, None])
    if DIAGONAL:
        weights = tl.where(keys[None, :] <= queries[:, None], weights, 0.0)
    ds = weights * (dp - d_row[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision="ieee")


@triton.jit
def _backward_queries(
    grad, q, k, v, out, dq, sums, delta, starts, seen, num_seen, scale, num_tokens, width,
    q_stride, k_stride, v_stride,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, over the keys before; `delta`, the row sums of grad * out, for the other kernel."""
    block, head, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    from_first = first.to(tl.int64)
    if block * BM < count:
        kv_head = head // (HQ // HKV)
        own = (from_first * HQ + head) * D
        queries = block * BM + tl.arange(0, BM)
        q_tile = _load(q + from_first * q_stride + head * D, queries, count, q_stride, D, BLOCK_D, True)
        g_tile = _load(grad + own, queries, count, HQ * D, D, BLOCK_D, True)
        o_tile = _load(out + own, queries, count, HQ * D, D, BLOCK_D, True)
        d_row = tl.sum(g_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
        where = head.to(tl.int64) * num_tokens + from_first + queries
        tl.store(delta + where, d_row, mask=queries < count)
        total = tl.load(sums + where, mask=queries < count, other=0.0) * LOG2_E
        dq_tile = tl.zeros([BM, BLOCK_D], tl.float32)
        num_full = block * BM // BN
        for at in range(tl.load(num_seen + block) if SPARSE else num_full):
            start = (tl.load(seen + block * width + at) if SPARSE else at) * BN
            dq_tile = _query_step(
                q_tile, g_tile, total, d_row, k, v, first, kv_head, start, queries, count, k_stride,
                v_stride, scale * LOG2_E, dq_tile, D, BLOCK_D, BN, False,
            )  # fmt: skip
        for at in range(num_full, tl.cdiv(tl.minimum(block * BM + BM, count), BN)):
            dq_tile = _query_step(
                q_tile, g_tile, total, d_row, k, v, first, kv_head, at * BN, queries, count, k_stride, v_stride,
                scale * LOG2_E, dq_tile, D, BLOCK_D, BN, True,
            )  # fmt: skip
        _store(dq + own, queries, count, HQ * D, dq_tile * scale, D, BLOCK_D)


@triton.jit
def _key_step(
    k_tile, v_tile, q, grad, sums, delta, first, head, start, keys, count, q_stride, g_stride, scale, dk_tile, dv_tile,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Scores are transposed, [keys, queries]: products over queries then read weights from registers.

    Queries beyond the sequence add nothing: their softmax has an infinite sum.
    """
    queries = start + tl.arange(0, BM)
    q_tile = _next(q, first, start, head, count, q_stride, D, BLOCK_D, BM, True)
    g_tile = _next(grad, first, start, head, count, g_stride, D, BLOCK_D, BM, True)
    total = tl.load(sums + queries, mask=queries < count, other=float("inf")) * LOG2_E
    d_row = tl.load(delta + queries, mask=queries < count, other=0.0)
    scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
    weights = tl.exp2(scores * scale - total[None, :])
    if DIAGONAL:
        weights = tl.where(keys[:, None] <= queries[None, :], weights, 0.0)
    rounded = weights.to(g_tile.dtype)  # kept in place of the float32 ones: registers are what limits tiles
    dv_tile = tl.dot(rounded, g_tile, dv_tile, input_precision="ieee")
    dp = tl.dot(v_tile, tl.trans(g_tile), input_precision="ieee")
    ds = rounded.to(tl.float32) * (dp - d_row[None, :])
    dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision="ieee")
    return dk_tile, dv_tile


@triton.jit
def _backward_keys(
    grad, q, k, v, dk, dv, sums, delta, starts, seen, num_seen, scale, num_tokens, width,
    q_stride, k_stride, v_stride,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys: over the queries that follow, of every head of the group."""
    block, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    from_first = first.to(tl.int64)
    if block * BN < count:
        group: tl.constexpr = HQ // HKV
        keys = block * BN + tl.arange(0, BN)
        k_tile = _load(k + from_first * k_stride + kv_head * D, keys, count, k_stride, D, BLOCK_D, True)
        v_tile = _load(v + from_first * v_stride + kv_head * D, keys, count, v_stride, D, BLOCK_D, True)
        dk_tile = tl.zeros([BN, BLOCK_D], tl.float32)
        dv_tile = tl.zeros([BN, BLOCK_D], tl.float32)
        for head in range(kv_head * group, (kv_head + 1) * group):
            own = from_first + head * num_tokens
            num_diagonal = tl.cdiv(tl.minimum(block * BN + BN, count), BM)
            for at in range(block * BN // BM, num_diagonal):
                dk_tile, dv_tile = _key_step(
                    k_tile, v_tile, q, grad, sums + own, delta + own, first, head, at * BM, keys, count, q_stride,
                    HQ * D, scale * LOG2_E, dk_tile, dv_tile, D, BLOCK_D, BM, True,
                )  # fmt: skip
            if SPARSE:
                for at in range(tl.load(num_seen + block)):
                    start = tl.load(seen + block * width + at) * BM
                    dk_tile, dv_tile = _key_step(
                        k_tile, v_tile, q, grad, sums + own, delta + own, first, head, start, keys, count, q_stride,
                        HQ * D, scale * LOG2_E, dk_tile, dv_tile, D, BLOCK_D, BM, False,
                    )  # fmt: skip
            else:
                for at in range(num_diagonal, tl.cdiv(count, BM)):
                    dk_tile, dv_tile = _key_step(
                        k_tile, v_tile, q, grad, sums + own, delta + own, first, head, at * BM, keys, count, q_stride,
                        HQ * D, scale * LOG2_E, dk_tile, dv_tile, D, BLOCK_D, BM, False,
                    )  # fmt: skip
        own = (from_first * HKV + kv_head) * D
        _store(dk + own, keys, count, HKV * D, dk_tile * scale, D, BLOCK_D)
        _store(dv + own, keys, count, HKV * D, dv_tile, D, BLOCK_D)


@triton.jit
def _list_kernel(
    mask, lists, counts, blocks, row_stride, column_stride, LATER: tl.constexpr, BLOCK: tl.constexpr
):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = (column < blocks) & (column > row if LATER else column < row)
    seen = tl.load(mask + row * row_stride + column * column_stride, mask=inside, other=0) != 0
    place = tl.cumsum(seen.to(tl.int32), 0) - seen.to(tl.int32)
    tl.store(lists + row * blocks + place, column, mask=seen)
    tl.store(counts + row, tl.sum(seen.to(tl.int32)))


def forward(
    q: Tensor,  # [T, Hq, D], rows of any stride
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,
    starts: Tensor,  # [R + 1] int32
    max_len: int,
    scale: float,
    mask: Tensor | None = None,  # [blocks, blocks] uint8
) -> tuple[Tensor, Tensor]:
    """As the reference."""
    q, k, v = rows_of_heads(q), rows_of_heads(k), rows_of_heads(v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    tiles = _tiles(FORWARD, q, mask)
    grid = (triton.cdiv(max_len, tiles.queries), q.shape[1], len(starts) - 1)
    given = (q, _source(k, tiles.keys), _source(v, tiles.keys), out, sums, starts)
    _launch(_forward, grid, tiles, given, (q, k, v), scale, mask)
    return out, sums


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor, max_len: int,
    scale: float, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As the reference."""
    grad, q, k, v = grad.contiguous(), rows_of_heads(q), rows_of_heads(k), rows_of_heads(v)
    dq, delta = backward_queries(grad, q, k, v, out, sums, starts, max_len, scale, mask)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    tiles = _tiles(KEYS, q, mask)
    grid = (triton.cdiv(max_len, tiles.keys), k.shape[1], len(starts) - 1)
    given = (_source(grad, tiles.queries), _source(q, tiles.queries), k, v, dk, dv, sums, delta, starts)
    _launch(_backward_keys, grid, tiles, given, (q, k, v), scale, mask, of_keys=True)
    return dq, dk, dv


def backward_queries(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, starts: Tensor, max_len: int,
    scale: float, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dQ, and the row sums of grad * out [Hq, T] float32. Heads lie side by side."""
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(sums)
    tiles = _tiles(QUERIES, q, mask)
    grid = (triton.cdiv(max_len, tiles.queries), q.shape[1], len(starts) - 1)
    given = (grad, q, _source(k, tiles.keys), _source(v, tiles.keys), out, dq, sums, delta, starts)
    _launch(_backward_queries, grid, tiles, given, (q, k, v), scale, mask)
    return dq, delta


def rows_of_heads(x: Tensor) -> Tensor:
    """With whole heads side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _source(x: Tensor, length: int) -> TensorDescriptor | Tensor:
    """What `_next` reads tiles of this length from."""
    tokens, heads, width = x.shape
    if width != _padded(width):
        return x
    return TensorDescriptor(x, [tokens, heads * width], [x.stride(0), 1], [length, width])


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _lists(mask: Tensor, of_keys: bool) -> tuple[Tensor, Tensor]:
    """[blocks, blocks] and [blocks] int32: the earlier blocks of keys that each block of queries sees, and their
    number; with `of_keys` the later blocks of queries that see each block of keys."""
    blocks = len(mask)
    lists, counts = (mask.new_empty(shape, dtype=torch.int32) for shape in ((blocks, blocks), (blocks,)))
    strides = mask.stride()[::-1] if of_keys else mask.stride()
    _list_kernel[blocks,](mask, lists, counts, blocks, *strides, of_keys, triton.next_power_of_2(blocks))
    return lists, counts


def _tiles(usual: TileSizes, q: Tensor, mask: Tensor | None) -> TileSizes:
    if mask is not None:
        return TileSizes(BLOCK, BLOCK, 4, 2)
    return usual if q.element_size() == 2 else TileSizes(64, 32, 4, 2)


def _launch(
    kernel: triton.JITFunction,
    grid: tuple[int, int, int],
    tiles: TileSizes,
    given: tuple[TensorDescriptor | Tensor, ...],
    qkv: tuple[Tensor, Tensor, Tensor],
    scale: float,
    mask: Tensor | None,
    of_keys: bool = False,
) -> None:
    q, k, _ = qkv
    lists = (q, q) if mask is None else _lists(mask, of_keys)  # without a mask not read
    kernel[grid](
        *given, *lists, scale, len(q), 0 if mask is None else len(mask), *(x.stride(0) for x in qkv),
        q.shape[1], k.shape[1], q.shape[2], _padded(q.shape[2]),
        tiles.queries, tiles.keys, mask is not None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip

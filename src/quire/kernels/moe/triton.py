"""Mixture of experts in Triton. Promises are those of the reference.

Nothing waits for the host: grids follow from the number of tokens alone, and programs find their expert from offsets on
the device, so that a CUDA graph may hold these launches. Nothing is added atomically: a token's results are summed in
the order of its experts. A few tokens read the rows of their own experts (GEMV); more are sorted by expert, and each
expert multiplies its rows in tiles, the last one of an expert partly empty (grouped GEMM).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.moe.records import AwayExperts, ClampedGate, Routing

FEW_TOKENS = 4  # from here on two tokens often have an expert in common, whose weights a GEMM reads once
GATE_UP, DOWN = "gate_up", "down"  # matrices of AwayExperts
BLOCK = 1024  # elements per program of the kernels around the products
# Tiles of rows, outputs, inputs (in 16 bits); warps; stages: by the mean number of rows of an expert, up to the first
# number. They take at most 96 KiB of shared memory, which every chip since 2020 has.
TILES = ((16, (16, 64, 64, 4, 4)), (64, (64, 64, 64, 4, 4)), (1 << 62, (128, 64, 64, 8, 3)))
INVARIANT_TILE = (32, 64, 64, 4, 4)  # for any number of rows: other tiles may round differently


def choose(logits: Tensor, num_experts: int, top_k: int, renormalize: bool) -> Routing:
    """As the reference."""
    tokens, width = logits.shape
    experts = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    gates = None
    if width > num_experts:
        gates = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        _choose_kernel[(tokens,)](
            logits, experts, weights, gates, logits.stride(0), num_experts, renormalize, gates is not None,
            top_k, triton.next_power_of_2(top_k), triton.next_power_of_2(num_experts), num_warps=1,
        )  # fmt: skip
    return Routing(experts, weights, gates)


def experts(
    x: Tensor,  # [T, H]
    gate_up: Tensor,  # [E, 2F, H]
    down: Tensor,  # [E, H, F]
    routing: Routing,
    residual: Tensor,  # [T, H]
    shared: Tensor | None = None,  # [T, H]
    invariant: bool = False,
    clamped: ClampedGate | None = None,
    away: AwayExperts | None = None,
) -> Tensor:  # [T, H]
    """As the reference."""
    if x.shape[0] == 0:
        return residual
    if x.shape[0] <= FEW_TOKENS and not invariant:
        return _few(x, gate_up, down, routing, residual, shared, clamped, away)
    tokens, top_k = routing.experts.shape
    num_experts = down.shape[0] if away is None else len(away.places)
    hidden, inner = down.shape[1:]
    pairs, padded = tokens * top_k, triton.next_power_of_2(num_experts)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    _sort_kernel[(num_experts,)](routing.experts, order, starts, pairs, BLOCK, num_warps=4)
    rows, columns, depth, warps, stages = _tile(pairs // num_experts, invariant)
    depth = depth * 2 // x.element_size()
    # as many as there can be; those beyond the last one end at once
    tiles = pairs // rows + min(num_experts, pairs)
    gated, results = x.new_empty(pairs, inner), x.new_empty(pairs, hidden)
    _grouped_gate_up[(triton.cdiv(inner, columns), tiles)](
        x, gate_up, *_away(away, GATE_UP), order, starts, gated, *_gate(clamped), x.stride(0), gate_up.stride(0),
        num_experts, inner, hidden, top_k, padded, rows, columns, depth, clamped is not None, away is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    _grouped_down[(triton.cdiv(hidden, columns), tiles)](
        gated, down, *_away(away, DOWN), order, starts, results, _down_bias(clamped), down.stride(0), num_experts,
        hidden, inner, padded, rows, columns, depth, clamped is not None, away is not None, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    out = torch.empty_like(residual)
    _combine_kernel[(tokens, triton.cdiv(hidden, BLOCK))](
        results, routing.weights, shared, routing.gates, residual, out, residual.stride(0), hidden,
        top_k, shared is not None, BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def _few(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Routing,
    residual: Tensor,
    shared: Tensor | None,
    clamped: ClampedGate | None,
    away: AwayExperts | None,
) -> Tensor:
    tokens, top_k = routing.experts.shape
    hidden, inner = x.shape[1], down.shape[2]
    gated, out = x.new_empty(tokens * top_k, inner), torch.empty_like(residual)
    rows, columns = 4, min(1024, triton.next_power_of_2(hidden))
    _few_gate_up[(triton.cdiv(inner, rows), tokens * top_k)](
        x, gate_up, *_away(away, GATE_UP), routing.experts, gated, *_gate(clamped), x.stride(0), gate_up.stride(0),
        inner, hidden, top_k, rows, columns, hidden % columns == 0 and inner % rows == 0, clamped is not None,
        away is not None, num_warps=4,
    )  # fmt: skip
    columns = min(1024, triton.next_power_of_2(inner))
    _few_down[(triton.cdiv(hidden, rows), tokens)](
        gated, down, *_away(away, DOWN), routing.experts, routing.weights, shared, routing.gates, residual, out,
        _down_bias(clamped),
        down.stride(0), residual.stride(0), hidden,
        inner, top_k, shared is not None, rows, columns,
        inner % columns == 0 and hidden % rows == 0, clamped is not None, away is not None, num_warps=4,
    )  # fmt: skip
    return out


def _gate(clamped: ClampedGate | None) -> tuple[Tensor | None, float, float]:
    """What kernels take of it."""
    return (None, 0.0, 0.0) if clamped is None else (clamped.gate_up_bias, clamped.alpha, clamped.limit)


def _down_bias(clamped: ClampedGate | None) -> Tensor | None:
    return None if clamped is None else clamped.down_bias


def _away(away: AwayExperts | None, matrix: str) -> tuple[Tensor | None, Tensor | None]:
    """What kernels take of one matrix of it."""
    return (None, None) if away is None else (getattr(away, matrix), away.places)


def _tile(mean_rows: int, invariant: bool) -> tuple[int, int, int, int, int]:
    if invariant:
        return INVARIANT_TILE
    return next(tile for most, tile in TILES if mean_rows <= most)


@triton.jit
def _choose_kernel(
    logits, experts, weights, gates, stride, num_experts,
    RENORMALIZE: tl.constexpr, GATE: tl.constexpr,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDTH)
    inside = expert < num_experts
    row = logits + token * stride
    value = tl.load(row + expert, mask=inside, other=float("-inf")).to(tl.float32)
    power = tl.exp(value - tl.max(value, 0))
    share = tl.where(inside, power / tl.sum(power, 0), -1.0)
    choice = tl.arange(0, CHOICES)
    chosen = tl.zeros((CHOICES,), tl.int32)
    weight = tl.zeros((CHOICES,), tl.float32)
    for i in range(TOP_K):
        best = tl.max(share, 0)
        first = tl.min(tl.where(share == best, expert, WIDTH), 0)
        first = tl.minimum(first, num_experts - 1)  # of NaN none is the best
        chosen = tl.where(choice == i, first, chosen)
        weight = tl.where(choice == i, best, weight)
        share = tl.where(expert == first, -1.0, share)
    if RENORMALIZE:
        weight = weight / tl.sum(weight, 0)
    tl.store(experts + token * TOP_K + choice, chosen, mask=choice < TOP_K)
    tl.store(weights + token * TOP_K + choice, weight, mask=choice < TOP_K)
    if GATE:
        gate = tl.load(row + num_experts).to(tl.float32)
        tl.store(gates + token, 1.0 / (1.0 + tl.exp(-gate)))


@triton.jit
def _gated(gate, up, bias, expert, column, known, width, alpha, limit, CLAMPED: tl.constexpr):
    """silu(gate) * up, or what ClampedGate says; `column` of each gate among `width`, in a shape that fits."""
    if CLAMPED:
        bias += expert.to(tl.int64) * 2 * width + column
        gate += tl.load(bias, mask=known, other=0.0).to(tl.float32)
        up += tl.load(bias + width, mask=known, other=0.0).to(tl.float32)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _matrix(stack, away, places, expert, stride, AWAY: tl.constexpr):
    """Where one expert's matrix begins: in the stack, or beside it."""
    if AWAY:
        place = tl.load(places + expert).to(tl.int64)
        return tl.where(place >= 0, stack + place * stride, away + (-1 - place) * stride)
    else:
        return stack + expert.to(tl.int64) * stride


@triton.jit
def _few_gate_up(
    x, gate_up, away, places, experts, out, bias, alpha, limit, x_stride, expert_stride, num_rows,
    LENGTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
    CLAMPED: tl.constexpr, AWAY: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of some rows, for one token and one of its experts."""
    pair = tl.program_id(1)
    expert = tl.load(experts + pair).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    x += (pair // TOP_K).to(tl.int64) * x_stride
    matrix = _matrix(gate_up, away, places, expert, expert_stride, AWAY)
    gates = matrix + row.to(tl.int64)[:, None] * LENGTH + column[None, :]
    ups = gates + tl.cast(num_rows, tl.int64) * LENGTH
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, LENGTH, COLUMNS, loop_unroll_factor=2):
        known = (row < num_rows)[:, None] & (column + first < LENGTH)[None, :]
        value = _row(x + first + column, column + first < LENGTH, EVEN)
        gate += _row(gates + first, known, EVEN) * value[None, :]
        up += _row(ups + first, known, EVEN) * value[None, :]
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    result = _gated(gate_sum, up_sum, bias, expert, row, row < num_rows, num_rows, alpha, limit, CLAMPED)
    target = out + pair.to(tl.int64) * num_rows + row
    tl.store(target, result.to(out.dtype.element_ty), mask=row < num_rows)


@triton.jit
def _few_down(
    x, down, away, places, experts, weights, shared, gates, residual, out, bias, expert_stride, stride, num_rows,
    LENGTH: tl.constexpr, TOP_K: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, CLAMPED: tl.constexpr,
    AWAY: tl.constexpr,
):  # fmt: skip
    """Some rows of a token's result: all of its experts, one after the other."""
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < num_rows
    entries = row.to(tl.int64)[:, None] * LENGTH + column[None, :]
    total = tl.zeros((ROWS,), tl.float32)
    for choice in tl.range(0, TOP_K, loop_unroll_factor=2):
        pair = token * TOP_K + choice
        expert = tl.load(experts + pair).to(tl.int64)
        weight = tl.load(weights + pair)
        matrix = _matrix(down, away, places, expert, expert_stride, AWAY)
        values = x + pair.to(tl.int64) * LENGTH
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in tl.range(0, LENGTH, COLUMNS):
            known = inside[:, None] & (column + first < LENGTH)[None, :]
            value = _row(values + first + column, column + first < LENGTH, EVEN)
            sums += _row(matrix + entries + first, known, EVEN) * value[None, :]
        result = tl.sum(sums, 1)
        if CLAMPED:
            result += tl.load(bias + expert * num_rows + row, mask=inside, other=0.0).to(tl.float32)
        total += weight * result
    at = token.to(tl.int64) * num_rows + row
    if SHARED:
        total += tl.load(gates + token) * tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + token.to(tl.int64) * stride + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row(places, known, EVEN: tl.constexpr):
    if EVEN:
        values = tl.load(places)
    else:
        values = tl.load(places, mask=known, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _sort_kernel(experts, order, starts, num_pairs, BLOCK: tl.constexpr):
    """One program per expert: its pairs (token, choice) in order, behind those of lower experts."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    start = 0
    for first in range(0, num_pairs, BLOCK):
        ids = tl.load(experts + first + index, mask=first + index < num_pairs, other=2147483647)
        start += tl.sum((ids < expert).to(tl.int32), 0)
    tl.store(starts + expert, start)
    for first in range(0, num_pairs, BLOCK):
        ids = tl.load(experts + first + index, mask=first + index < num_pairs, other=2147483647)
        mine = (ids == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(mine, 0) - 1, first + index, mask=mine > 0)
        start += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, start)


@triton.jit
def _expert_tile(starts, tile, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert, the tile's first row among the sorted pairs, the end of the expert's rows).

    The expert is num_experts beyond the last tile.
    """
    index = tl.arange(0, EXPERTS)
    start = tl.load(starts + index, mask=index < num_experts, other=0)
    end = tl.load(starts + index + 1, mask=index < num_experts, other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum(((ends <= tile) & (index < num_experts)).to(tl.int32), 0)
    here = index == expert
    before = tl.sum(tl.where(here, ends - tiles, 0), 0)
    first = tl.sum(tl.where(here, start, 0), 0) + (tile - before) * ROWS
    return expert, first, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def _grouped_gate_up(
    x, gate_up, away, places, order, starts, out, bias, alpha, limit, x_stride, expert_stride, num_experts, num_columns,
    LENGTH: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, CLAMPED: tl.constexpr, AWAY: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of a tile of one expert's rows, gathered from x; stored in sorted order."""
    expert, first, end = _expert_tile(starts, tl.program_id(1), num_experts, EXPERTS, ROWS)
    if expert < num_experts:
        row = first + tl.arange(0, ROWS)
        token = tl.load(order + row, mask=row < end, other=0) // TOP_K
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        values = x + token.to(tl.int64)[:, None] * x_stride + depth[None, :]
        matrix = _matrix(gate_up, away, places, expert, expert_stride, AWAY)
        gates = matrix + column.to(tl.int64)[None, :] * LENGTH + depth[:, None]
        ups = gates + tl.cast(num_columns, tl.int64) * LENGTH
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, LENGTH, DEPTH):
            inside = depth + at < LENGTH
            value = tl.load(values + at, mask=(row < end)[:, None] & inside[None, :], other=0.0)
            known = inside[:, None] & (column < num_columns)[None, :]
            gate = tl.dot(value, tl.load(gates + at, mask=known, other=0.0), gate, input_precision="ieee")
            up = tl.dot(value, tl.load(ups + at, mask=known, other=0.0), up, input_precision="ieee")
        inside = (column < num_columns)[None, :]
        result = _gated(gate, up, bias, expert, column[None, :], inside, num_columns, alpha, limit, CLAMPED)
        target = out + row.to(tl.int64)[:, None] * num_columns + column[None, :]
        known = (row < end)[:, None] & (column < num_columns)[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=known)


@triton.jit
def _grouped_down(
    x, down, away, places, order, starts, out, bias, expert_stride, num_experts, num_columns,
    LENGTH: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, CLAMPED: tl.constexpr, AWAY: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's sorted rows; stored where the pair (token, choice) has its result."""
    expert, first, end = _expert_tile(starts, tl.program_id(1), num_experts, EXPERTS, ROWS)
    if expert < num_experts:
        row = first + tl.arange(0, ROWS)
        pair = tl.load(order + row, mask=row < end, other=0)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        depth = tl.arange(0, DEPTH)
        values = x + row.to(tl.int64)[:, None] * LENGTH + depth[None, :]
        matrix = _matrix(down, away, places, expert, expert_stride, AWAY)
        weights = matrix + column.to(tl.int64)[None, :] * LENGTH + depth[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, LENGTH, DEPTH):
            inside = depth + at < LENGTH
            value = tl.load(values + at, mask=(row < end)[:, None] & inside[None, :], other=0.0)
            known = inside[:, None] & (column < num_columns)[None, :]
            weight = tl.load(weights + at, mask=known, other=0.0)
            total = tl.dot(value, weight, total, input_precision="ieee")
        if CLAMPED:
            biases = bias + expert.to(tl.int64) * num_columns + column
            total += tl.load(biases, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
        target = out + pair.to(tl.int64)[:, None] * num_columns + column[None, :]
        known = (row < end)[:, None] & (column < num_columns)[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=known)


@triton.jit
def _combine_kernel(
    results, weights, shared, gates, residual, out, stride, width,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        result = tl.load(results + pair * width + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * result
    at = token * width + column
    if SHARED:
        total += tl.load(gates + token) * tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)

"""One token's GEMVs by a kernel that streams the matrix once, with norm, activation and residual fused.

A program owns a few rows of the matrix and walks along them. Only the matrix is large, so throughput depends on the
bytes in flight: loads go straight to registers, several steps ahead. Norm, activation and the split-K reduction need no
launches of their own; the norm's divisor is summed along the same walk.
"""

import triton
import triton.language as tl
from torch import Tensor

SERVES = True
_LONG = 8192  # a walk longer than this keeps memory busy with smaller steps


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """As the reference. The residual, if any, holds the result."""
    num_rows, num_columns = weight.shape
    rows, columns, warps = _walk(num_columns)
    out = x.new_empty(1, num_rows) if residual is None else residual
    _linear[(triton.cdiv(num_rows, rows),)](
        x, weight, bias, out, norm_weight, weight.stride(0), num_rows, eps,
        bias is not None, residual is not None, norm_weight is not None,
        num_rows % rows == 0 and num_columns % columns == 0, num_columns, rows, columns,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return out


def linear_silu_mul(x: Tensor, weight: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """As the reference."""
    num_rows, num_columns = weight.shape[0] // 2, weight.shape[1]
    rows, columns, warps = _walk(num_columns)
    rows //= 2
    out = x.new_empty(1, num_rows)
    _linear_silu_mul[(triton.cdiv(num_rows, rows),)](
        x, weight, out, norm_weight, weight.stride(0), num_rows, eps, norm_weight is not None,
        num_rows % rows == 0 and num_columns % columns == 0, num_columns, rows, columns,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return out


def _walk(num_columns: int) -> tuple[int, int, int]:
    """(rows of a program, columns of a step, warps): wide steps, if they divide the row."""
    if num_columns > _LONG:
        return 4, 512, 4
    if num_columns % 2048 == 0:
        return 4, 2048, 8
    return 4, 1024 if num_columns % 1024 == 0 else 512, 4


@triton.jit
def _linear(
    x, weight, bias, out, norm_weight, weight_stride, num_rows, eps,
    BIAS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
    LENGTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    column = tl.arange(0, COLUMNS)
    pointers = weight + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for first in tl.range(0, LENGTH, COLUMNS, loop_unroll_factor=4):
        tile = _tile(pointers + first, inside, column + first, LENGTH, EVEN)
        value = _values(x + first + column, column + first, LENGTH, EVEN)
        if NORM:
            squares += value * value
            value *= _values(norm_weight + first + column, column + first, LENGTH, EVEN)
        sums += tile * value[None, :]
    total = tl.sum(sums, 1)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, 0) / LENGTH + eps)
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(out + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _linear_silu_mul(
    x, weight, out, norm_weight, weight_stride, num_rows, eps,
    NORM: tl.constexpr, EVEN: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    column = tl.arange(0, COLUMNS)
    gates = weight + row.to(tl.int64)[:, None] * weight_stride + column[None, :]
    ups = gates + tl.cast(num_rows, tl.int64) * weight_stride
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for first in tl.range(0, LENGTH, COLUMNS, loop_unroll_factor=4):
        gate_tile = _tile(gates + first, inside, column + first, LENGTH, EVEN)
        up_tile = _tile(ups + first, inside, column + first, LENGTH, EVEN)
        value = _values(x + first + column, column + first, LENGTH, EVEN)
        if NORM:
            squares += value * value
            value *= _values(norm_weight + first + column, column + first, LENGTH, EVEN)
        gate += gate_tile * value[None, :]
        up += up_tile * value[None, :]
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / LENGTH + eps)
        gate_sum *= scale
        up_sum *= scale
    result = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tile(places, inside, column, LENGTH: tl.constexpr, EVEN: tl.constexpr):
    """Weights are read once: they should not evict anything else from the cache."""
    if EVEN:
        tile = tl.load(places, eviction_policy="evict_first")
    else:
        known = inside[:, None] & (column < LENGTH)[None, :]
        tile = tl.load(places, mask=known, other=0.0, eviction_policy="evict_first")
    return tile.to(tl.float32)


@triton.jit
def _values(places, column, LENGTH: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        values = tl.load(places)
    else:
        values = tl.load(places, mask=column < LENGTH, other=0.0)
    return values.to(tl.float32)

"""Batch-invariant GEMMs: one tile shape and one order of summation for any number of rows.

Libraries choose other tiles and another split-K for one row than for a hundred, so a row's last bits depend on the
batch. Here every element is summed along K in the same steps by the same instruction; docs/performance.md has the cost.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _DEPTH = 64, 64, 64  # of x, of the result, along the sum
_GROUP = 8  # row tiles that share a column tile while it is in the cache


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    sums: Tensor | None = None,
) -> Tensor:
    """As the reference; with `residual`, the result overwrites it. Columns before `sums` are a multiple of 64."""
    tokens, depth = x.shape
    columns = weight.shape[0]
    out = sums if sums is not None else residual
    if out is None:
        out = x.new_empty(tokens, columns, dtype=dtype or x.dtype)
    grid = (triton.cdiv(tokens, _ROWS) * triton.cdiv(columns, _COLUMNS),)
    _linear[grid](
        x, weight, bias, out, tokens, columns, depth, x.stride(0), weight.stride(0), out.stride(0),
        bias is not None, residual is not None, sums is not None, x.dtype is torch.float32,
        _ROWS, _COLUMNS, _DEPTH, _GROUP, num_warps=4, num_stages=4 if x.dtype is not torch.float32 else 2,
    )  # fmt: skip
    return out


@triton.jit
def _linear(
    x, weight, bias, out, num_tokens, num_columns, depth, x_stride, weight_stride, out_stride,
    BIAS: tl.constexpr, ADD: tl.constexpr, CONTINUE: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    num_row_tiles = tl.cdiv(num_tokens, ROWS)
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    index = tl.program_id(0)
    group = index // (GROUP * num_column_tiles)
    size = min(num_row_tiles - group * GROUP, GROUP)
    within = index % (GROUP * num_column_tiles)
    row = (group * GROUP + within % size) * ROWS + tl.arange(0, ROWS)
    column = within // size * COLUMNS + tl.arange(0, COLUMNS)
    real_row, real_column = row < num_tokens, column < num_columns
    step = tl.arange(0, DEPTH)
    left = x + row.to(tl.int64)[:, None] * x_stride + step[None, :]
    right = weight + column.to(tl.int64)[None, :] * weight_stride + step[:, None]
    target = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    inside = real_row[:, None] & real_column[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if CONTINUE:
        sums = tl.load(target, mask=inside, other=0.0)
    for first in range(0, depth, DEPTH):
        known = step < depth - first
        a = tl.load(left + first, mask=real_row[:, None] & known[None, :], other=0.0)
        b = tl.load(right + first, mask=real_column[None, :] & known[:, None], other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee" if EXACT else None)
    if BIAS:
        sums += tl.load(bias + column, mask=real_column, other=0.0).to(tl.float32)[None, :]
    if ADD:
        sums += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside)

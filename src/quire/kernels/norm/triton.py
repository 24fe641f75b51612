"""Normalisation in Triton: whole rows in registers, fp32 inside. Promises are those of the reference."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependents import EARLY, launch_dependents, wait_for_results


@triton.jit
def _norm_kernel(
    x, residual, weight, bias, out,
    rows, x_stride, residual_stride, out_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRED: tl.constexpr, ONTO: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program. The residual is rounded to its own type before it is normalised, as in torch.

    ONTO: the rounded result is added to what `out` holds.
    """
    launch_dependents()
    wait_for_results()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        pointers = residual + row * residual_stride + column
        before = tl.load(pointers, mask=inside, other=0.0)
        value = (before.to(tl.float32) + value.to(tl.float32)).to(before.dtype)
        tl.store(pointers, value, mask=inside)
    value = value.to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(value, axis=1) / WIDTH
        value = tl.where(inside, value - mean[:, None], 0.0)
    variance = tl.sum(value * value, axis=1) / WIDTH
    value = value * tl.rsqrt(variance + eps)[:, None] * scale
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    value = value.to(out.dtype.element_ty)
    if ONTO:
        before = tl.load(out + row * out_stride + column, mask=inside, other=0.0)
        value = (before.to(tl.float32) + value.to(tl.float32)).to(before.dtype)
    tl.store(out + row * out_stride + column, value, mask=inside)


@triton.jit
def _head_norm_kernel(
    x, weight, rows, token_stride, head_stride, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS heads per program, counted through the tokens; in pointers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < HEAD_DIM)
    pointers = x + (row // NUM_HEADS) * token_stride + (row % NUM_HEADS) * head_stride + column
    value = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    variance = tl.sum(value * value, axis=1) / HEAD_DIM
    scale = tl.load(weight + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(variance + eps)[:, None] * scale
    tl.store(pointers, value.to(x.dtype.element_ty), mask=inside)


@cache
def _shape(width: int) -> tuple[int, int, int]:
    """(columns of a tile, rows of a tile, warps) for rows of this width: 16 to 32 elements per thread."""
    block = triton.next_power_of_2(width)
    rows = max(1, 1024 // block)
    return block, rows, max(1, min(16, block * rows // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x [T, d] / sqrt(mean(x^2) + eps) * weight [d]."""
    return _norm_rows(x, None, weight, None, eps, out, False)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x in pointers, then `rms_norm` of residual."""
    return _norm_rows(x, residual, weight, None, eps, out, False)


def rms_norm_onto(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, d] += `rms_norm` of x, in place; returns residual."""
    return _norm_rows(x, None, weight, None, eps, residual, False, onto=True)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
) -> Tensor:
    """Layer normalisation of x [T, d]."""
    return _norm_rows(x, None, weight, bias, eps, out, True)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x in pointers, then `layer_norm` of residual."""
    return _norm_rows(x, residual, weight, bias, eps, out, True)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Normalises every head of x [T, H, D] (a strided view, last dimension dense) in pointers; weight [D]."""
    tokens, heads, head_dim = x.shape
    if tokens == 0:
        return
    block, rows, warps = _shape(head_dim)
    token_stride, head_stride, _ = x.stride()
    _head_norm_kernel[(-(-tokens * heads // rows), 1, 1)](
        x, weight, tokens * heads, token_stride, head_stride, eps, heads, head_dim, block, rows,
        num_warps=warps,
    )  # fmt: skip


def _norm_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor | None,
    centred: bool,
    onto: bool = False,
) -> Tensor:
    tokens, width = x.shape
    summed = x if residual is None else residual
    if out is None:
        out = torch.empty_like(summed, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    block, rows, warps = _shape(width)
    _norm_kernel[(-(-tokens // rows), 1, 1)](
        x, summed, weight, weight if bias is None else bias, out,
        tokens, x.stride(0), summed.stride(0), out.stride(0), eps,
        width, block, rows, residual is not None, bias is not None, centred, onto,
        num_warps=warps, **EARLY,
    )  # fmt: skip
    return out

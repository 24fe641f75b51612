"""Activations in Triton, fp32 inside. Promises are those of the reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependents import EARLY, launch_dependents, wait_for_results

BLOCK = 1024  # elements per program, 8 per thread: one 16-byte access in half precision

RELU, GELU, GELU_TANH, SILU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _activated(wide, KIND: tl.constexpr):
    if KIND == SILU:
        return wide / (1.0 + tl.exp(-wide))
    if KIND == GELU:
        return 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    # x * (1 + tanh(u)) / 2 = x * sigmoid(2u)
    inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    return wide / (1.0 + tl.exp(-inner))


@triton.jit
def _gate_kernel(x, out, width, x_stride, out_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    launch_dependents()
    wait_for_results()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0)
    # rounded in between as torch does, so that eager and fused models agree
    value = _activated(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _pointwise_kernel(x, out, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    value = tl.load(x + index, mask=inside, other=0.0)
    if KIND == RELU:
        value = tl.maximum(value, tl.zeros_like(value), propagate_nan=tl.PropagateNan.ALL)
    else:
        value = _activated(value.to(tl.float32), KIND)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_backward_kernel(grad, x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    upstream = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = upstream * up * share * (1.0 + gate * (1.0 - share))
    tl.store(out + row * 2 * width + column, of_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(
        out + row * 2 * width + width + column,
        (upstream * gate * share).to(out.dtype.element_ty),
        mask=inside,
    )


def silu_mul_backward(grad: Tensor, x: Tensor) -> Tensor:
    """As the reference."""
    grad, x = grad.contiguous(), x.contiguous()
    rows, width = grad.shape
    out = torch.empty_like(x)
    if rows:
        _silu_backward_kernel[(rows, -(-width // BLOCK))](grad, x, out, width, BLOCK, num_warps=4)
    return out


def silu_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, 2F] (gate | up) -> silu(gate) * up [T, F]."""
    return _gated(x, out, SILU.value)


def gelu_mul(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """x [T, 2F] (gate | up) -> gelu(gate) * up [T, F]; approximate is "none" (erf) or "tanh"."""
    return _gated(x, out, _kind(approximate))


def gelu(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """GELU; approximate is "none" (erf) or "tanh"."""
    return _pointwise(x, out, _kind(approximate))


def relu(x: Tensor, out: Tensor | None = None) -> Tensor:
    """max(x, 0)."""
    return _pointwise(x, out, RELU.value)


def _kind(approximate: str) -> int:
    if approximate not in ("none", "tanh"):
        raise ValueError(f'approximate is "none" or "tanh", not {approximate!r}')
    return GELU_TANH.value if approximate == "tanh" else GELU.value


def _gated(x: Tensor, out: Tensor | None, kind: int) -> Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _gate_kernel[(rows, -(-width // BLOCK), 1)](
            x, out, width, x.stride(0), out.stride(0), kind, BLOCK, num_warps=4, **EARLY
        )
    return out


def _pointwise(x: Tensor, out: Tensor | None, kind: int) -> Tensor:
    dense = x.contiguous()
    made = torch.empty_like(dense) if out is None or not out.is_contiguous() else out
    count = dense.numel()
    if count:
        _pointwise_kernel[(-(-count // BLOCK), 1, 1)](dense, made, count, kind, BLOCK, num_warps=4)
    return made if out is None or made is out else out.copy_(made)

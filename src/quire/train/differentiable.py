"""Norms and activations that autograd can differentiate, with the signatures of kernels/norm and kernels/activation.

Residual sums stay in place, as model files expect. What a norm saves for the backward pass is a copy for this reason.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation.reference import gelu, gelu_mul, relu
from quire.kernels.registry import REFERENCE, choose, load

__all__ = [
    "add_layer_norm", "add_rms_norm", "gelu", "gelu_mul", "layer_norm", "relu", "rms_norm", "rms_norm_onto", "silu_mul",
]  # fmt: skip


def silu_mul(x: Tensor) -> Tensor:
    """x [T, 2F] (gate | up) -> silu(gate) * up [T, F]; x alone is kept for the backward pass."""
    result: Tensor = _SiluMul.apply(x, _activation(x.device.type))
    return result


@cache
def _activation(device: str) -> ModuleType:
    return choose("activation", device) if device == "cuda" else load("activation", REFERENCE)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: ModuleType) -> Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(x)
        return kernel.silu_mul(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.kernel.silu_mul_backward(grads[0], *ctx.saved_tensors), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., d] / sqrt(mean(x^2) + eps) * weight [d], in float32."""
    wide = x.float() if x.dtype is not weight.dtype else x.clone()
    return F.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x in place, then `rms_norm` of residual."""
    return rms_norm(residual.add_(x), weight, eps)


def rms_norm_onto(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual + `rms_norm` of x."""
    return residual + rms_norm(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer normalisation of x [T, d]."""
    return F.layer_norm(x.clone(), (x.shape[-1],), weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """residual += x in place, then `layer_norm` of residual."""
    return layer_norm(residual.add_(x), weight, bias, eps)

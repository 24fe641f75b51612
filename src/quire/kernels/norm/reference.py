"""Normalisation in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x [T, d] / sqrt(mean(x^2) + eps) * weight [d]."""
    wide = x.float()
    y = (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
    return y if out is None else out.copy_(y)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x in place, then `rms_norm` of residual."""
    residual.add_(x)
    return rms_norm(residual, weight, eps, out)


def rms_norm_onto(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, d] += `rms_norm` of x, in place; returns residual."""
    return residual.add_(rms_norm(x, weight, eps))


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
) -> Tensor:
    """Layer normalisation of x [T, d]."""
    y = F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return y if out is None else out.copy_(y)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor | None = None
) -> Tensor:
    """residual += x in place, then `layer_norm` of residual."""
    residual.add_(x)
    return layer_norm(residual, weight, bias, eps, out)


def head_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Normalises every head of x [T, H, D] (a strided view, last dimension dense) in place; weight [D]."""
    x.copy_(rms_norm(x, weight, eps))

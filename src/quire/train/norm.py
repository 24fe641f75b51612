"""Norms that autograd can differentiate, with the signatures of kernels/norm.

Residual sums stay in place, as model files expect. What a norm saves for the backward pass is a copy for this reason.
"""

import torch.nn.functional as F
from torch import Tensor


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

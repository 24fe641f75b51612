"""Activations in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x [T, 2F] (gate | up) -> silu(gate) * up [T, F]."""
    gate, up = x.chunk(2, dim=-1)
    y = F.silu(gate) * up
    return y if out is None else out.copy_(y)


def silu_mul_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x [T, 2F], given that of silu_mul's result [T, F]."""
    gate, up = x.chunk(2, dim=-1)
    share = gate.sigmoid()
    return torch.cat((grad * up * share * (1 + gate * (1 - share)), grad * gate * share), dim=-1)


def gelu_mul(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """x [T, 2F] (gate | up) -> gelu(gate) * up [T, F]; approximate is "none" (erf) or "tanh"."""
    gate, up = x.chunk(2, dim=-1)
    y = F.gelu(gate, approximate=approximate) * up
    return y if out is None else out.copy_(y)


def gelu(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> Tensor:
    """GELU; approximate is "none" (erf) or "tanh"."""
    y = F.gelu(x, approximate=approximate)
    return y if out is None else out.copy_(y)


def relu(x: Tensor, out: Tensor | None = None) -> Tensor:
    """max(x, 0)."""
    y = F.relu(x)
    return y if out is None else out.copy_(y)

"""One token's GEMVs in plain torch. With `norm_weight`, x is divided by its root mean square first."""

import torch
import torch.nn.functional as F
from torch import Tensor

SERVES = False  # torch's own GEMM is as fast: callers should not prefer this


def linear(
    x: Tensor,  # [1, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [1, N], added; may be overwritten
    norm_weight: Tensor | None = None,  # [K]
    eps: float = 0.0,
    scales: Tensor | None = None,  # [N] float32, of the weight's rows, which may be float8
) -> Tensor:  # [1, N]
    """x @ weight.T (+ bias) (+ residual); sums in float32."""
    y = F.linear(_normed(x, norm_weight, eps), _wide(weight, scales))
    if bias is not None:
        y = y + bias.float()
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype)


def linear_silu_mul(
    x: Tensor,  # [1, K]
    weight: Tensor,  # [2 N, K], gate then up
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,  # [2 N]
) -> Tensor:  # [1, N]
    """silu(gate) * up."""
    gate, up = F.linear(_normed(x, norm_weight, eps), _wide(weight, scales)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _wide(weight: Tensor, scales: Tensor | None) -> Tensor:
    return weight.float() if scales is None else weight.float() * scales[:, None]


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    if weight is None:
        return wide
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()

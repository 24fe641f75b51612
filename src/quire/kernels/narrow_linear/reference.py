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
) -> Tensor:  # [1, N]
    """x @ weight.T (+ bias) (+ residual); sums in float32."""
    y = F.linear(_normed(x, norm_weight, eps), weight.float())
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
) -> Tensor:  # [1, N]
    """silu(gate) * up."""
    gate, up = F.linear(_normed(x, norm_weight, eps), weight.float()).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.float()
    if weight is None:
        return wide
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()

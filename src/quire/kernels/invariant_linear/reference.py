"""Batch-invariant GEMMs in plain torch, row by row, so that no library picks another order for many rows."""

import torch
from torch import Tensor


def linear(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N]; may be overwritten
    dtype: torch.dtype | None = None,  # of the result; x's unless told
) -> Tensor:  # [T, N]
    """x @ weight.T (+ bias) (+ residual), sums in float32; a row's bits depend on that row alone."""
    wide = weight.float()
    y = torch.stack([wide @ row for row in x.float()]) if len(x) else x.new_zeros(0, len(weight)).float()
    if bias is not None:
        y = y + bias.float()
    if residual is not None:
        y = y + residual.float()
    return y.to(dtype or x.dtype)

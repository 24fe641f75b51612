"""Batch-invariant GEMMs in plain torch, row by row, so that no library picks another order for many rows."""

import torch
from torch import Tensor


def linear(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    residual: Tensor | None = None,  # [T, N]; may be overwritten
    dtype: torch.dtype | None = None,  # of the result; x's unless told
    sums: Tensor | None = None,  # [T, N] float32; overwritten
) -> Tensor:  # [T, N]
    """x @ weight.T (+ bias) (+ residual), sums in float32; a row's bits depend on that row alone.

    `sums`: of the columns before these, which go on as one GEMM over all columns would; the result is float32.
    """
    wide = weight.float()
    y = torch.stack([wide @ row for row in x.float()]) if len(x) else x.new_zeros(0, len(weight)).float()
    if sums is not None:
        return sums.add_(y)
    if bias is not None:
        y = y + bias.float()
    if residual is not None:
        y = y + residual.float()
    return y.to(dtype or x.dtype)

"""Rows to float8 (e4m3) in plain torch."""

import torch
from torch import Tensor

LARGEST = 448.0  # of e4m3
SMALLEST_SCALE = 1e-12  # a row of zeros has some scale


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (float8_e4m3fn [T, K], scales [T, 1] float32); x is about the product of both."""
    wide = x.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (wide / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales

"""Rows to float8 (e4m3), one program per row, the row kept in registers between its two uses."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.fp8_rows.reference import LARGEST, SMALLEST_SCALE


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference."""
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    size = triton.next_power_of_2(width)
    _quantize[(tokens,)](
        x, out, scales, width, x.stride(0), LARGEST, SMALLEST_SCALE, size, num_warps=4 if size <= 4096 else 8
    )
    return out, scales


@triton.jit
def _quantize(x, out, scales, width, stride, largest, smallest_scale, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    inside = column < width
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0) / largest, smallest_scale)
    small = tl.minimum(tl.maximum(values / scale, -largest), largest)
    tl.store(out + row * width + column, small.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)

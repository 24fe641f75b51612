"""Embedding rows in Triton. Promises are those of the reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gather_kernel(
    table, token_ids, out, width, table_stride, out_stride, scale, BLOCK: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token).to(tl.int64)
    value = tl.load(table + row * table_stride + column, mask=(column < width) & (row >= 0), other=0.0)
    if SCALED:
        value = value.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + token * out_stride + column, value.to(out.dtype.element_ty), mask=column < width)


def gather(
    table: Tensor,
    token_ids: Tensor,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> Tensor:
    """table [V, d], token_ids [T] int32 or int64 -> scale * rows [T, d] in `dtype` (fp32 unless told).

    Zeros for an id of -1.
    """
    tokens, width = token_ids.shape[0], table.shape[1]
    if out is None:
        out = torch.empty((tokens, width), dtype=dtype or torch.float32, device=table.device)
    if tokens:
        _gather_kernel[(tokens, -(-width // BLOCK), 1)](
            table,
            token_ids,
            out,
            width,
            table.stride(0),
            out.stride(0),
            scale,
            BLOCK,
            scale != 1.0,
            num_warps=4,
        )
    return out

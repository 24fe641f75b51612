"""Embedding rows by native code. Promises are those of the reference."""

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.embedding import reference


def gather(
    table: Tensor,
    token_ids: Tensor,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
) -> Tensor:
    """table [V, d], token_ids [T] int32 or int64 -> scale * rows [T, d] in `dtype` (fp32 unless told; else by torch).

    Zeros for an id of -1.
    """
    if dtype not in (None, torch.float32):
        return reference.gather(table, token_ids, out, dtype, scale)
    wide = token_ids.dtype is torch.int64
    native.check_indices(torch.int64 if wide else torch.int32, token_ids)
    tokens, width = token_ids.shape[0], table.shape[1]
    out = native.empty(tokens, width) if out is None else out
    native.check_floats(out)
    native.call(
        "gather",
        (
            table.data_ptr(), table.stride(0), native.DTYPE_CODES[table.dtype],
            token_ids.data_ptr(), int(wide), tokens, width, out.data_ptr(), out.stride(0), native.real(scale),
        ),
        (table, token_ids, out),
    )  # fmt: skip
    return out

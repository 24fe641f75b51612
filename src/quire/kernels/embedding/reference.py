"""Embedding rows in plain torch."""

import torch
from torch import Tensor


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
    rows = table[token_ids.long()].to(dtype or torch.float32).masked_fill_((token_ids < 0)[:, None], 0.0)
    if scale != 1.0:
        rows = (rows.float() * scale).to(rows.dtype)
    return rows if out is None else out.copy_(rows)

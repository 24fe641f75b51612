"""Embedding rows in plain torch."""

import torch
from torch import Tensor


def gather(
    table: Tensor, token_ids: Tensor, out: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """table [V, d], token_ids [T] int32 or int64 -> [T, d] in `dtype` (fp32 unless told)."""
    rows = table[token_ids.long()].to(dtype or torch.float32)
    return rows if out is None else out.copy_(rows)

"""Sampling by native code, without a full sort. Promises are those of the reference."""

import torch
from torch import Tensor

from quire.kernels import native


def argmax(logits: Tensor) -> Tensor:
    """logits [S, V] -> int64 [S]; ties go to the lowest id."""
    return _per_row("argmax", logits, torch.int64)


def peaks(logits: Tensor) -> Tensor:
    """logits [S, V] -> fp32 [S], each row's largest; NaN where the row has one."""
    return _per_row("peaks", logits, torch.float32)


def log_softmax_gather(logits: Tensor, token_ids: Tensor) -> Tensor:
    """logits [S, V], token_ids [S] int64 -> fp32 [S], the log probability of each token."""
    return _per_row("log_softmax_gather", logits, torch.float32, token_ids)


def token_ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """int64 [S]: 1 + how many tokens of the row have a strictly larger logit."""
    return _per_row("token_ranks", logits, torch.int64, token_ids)


def sample_filtered(
    logits: Tensor,  # [S, V] fp32
    temperature: Tensor,  # [S] fp32; 0 means greedy
    top_k: Tensor,  # [S] int32; 0 is off
    top_p: Tensor,  # [S] fp32; 1 is off
    min_p: Tensor,  # [S] fp32; 0 is off
    uniforms: Tensor,  # [S] fp64 in [0, 1)
) -> Tensor:  # [S] int64
    """Draws a token per row: temperature, then min-p, then top-k, then top-p, then inverse CDF by token id."""
    out = native.empty(logits.shape[0], dtype=torch.int64)
    native.check_floats(logits, temperature, top_p, min_p)
    native.check_indices(torch.int32, top_k)
    if uniforms.dtype is not torch.float64:
        raise TypeError(f"uniforms must be fp64, not {uniforms.dtype}")
    native.call(
        "sample_filtered",
        (
            logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1],
            temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(),
            uniforms.data_ptr(), out.data_ptr(),
        ),
        (logits, temperature, top_k, top_p, min_p, uniforms, out),
    )  # fmt: skip
    return out


def _per_row(name: str, logits: Tensor, dtype: torch.dtype, token_ids: Tensor | None = None) -> Tensor:
    """One number of each row [S], of its token where `token_ids` are given."""
    out = native.empty(logits.shape[0], dtype=dtype)
    native.check_floats(logits)
    token_ids = None if token_ids is None else token_ids.long().contiguous()
    ids = () if token_ids is None else (token_ids.data_ptr(),)
    native.call(
        name,
        (logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1], *ids, out.data_ptr()),
        (logits, token_ids, out),
    )
    return out

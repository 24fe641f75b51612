"""Attention of packed sequences and its gradients in plain torch, one sequence after another, with whole matrices."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 64  # queries and keys of a block of a sparse mask


def forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hkv, D]
    v: Tensor,  # [T, Hkv, D]
    starts: Tensor,  # [R + 1] int32: sequence r is tokens starts[r] … starts[r + 1] - 1
    max_len: int,  # of a sequence
    scale: float,
    mask: Tensor
    | None = None,  # [blocks, blocks] uint8: which blocks of keys a block of queries sees; None: all
) -> tuple[Tensor, Tensor]:  # [T, Hq, D], and [Hq, T] float32: the logarithm of each softmax's sum
    """Every query sees the keys of its own sequence up to itself. Its own block must be seen."""
    out, sums = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for tokens, scores, values in _sequences(q, k, v, starts, scale, mask):
        sums[:, tokens] = scores.logsumexp(-1)
        out[tokens] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, sums


def backward(
    grad: Tensor,  # [T, Hq, D], of `out`
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    max_len: int,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # of q, k and v
    """Probabilities are computed again from `sums`."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    group = q.shape[1] // k.shape[1]
    for tokens, scores, values in _sequences(q, k, v, starts, scale, mask):
        probabilities = torch.exp(scores - sums[:, tokens, None])
        upstream = grad[tokens].float()
        delta = (upstream * out[tokens].float()).sum(-1).t()  # [Hq, T]
        ds = probabilities * (torch.einsum("qhd,khd->hqk", upstream, values) - delta[:, :, None]) * scale
        keys = k[tokens].float().repeat_interleave(group, 1)
        dq[tokens] = torch.einsum("hqk,khd->qhd", ds, keys).to(q.dtype)
        for target, whole in (
            (dk, torch.einsum("hqk,qhd->khd", ds, q[tokens].float())),
            (dv, torch.einsum("hqk,qhd->khd", probabilities, upstream)),
        ):
            target[tokens] = whole.unflatten(1, (-1, group)).sum(2).to(k.dtype)
    return dq, dk, dv


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, mask: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(tokens, scores [Hq, T, T] float32, values [T, Hq, D] float32) of each sequence."""
    group = q.shape[1] // k.shape[1]
    for first, last in pairwise(starts.tolist()):
        tokens = slice(first, last)
        keys, values = (x[tokens].float().repeat_interleave(group, 1) for x in (k, v))
        at = torch.arange(last - first, device=q.device)
        hidden = at[None, :] > at[:, None]
        if mask is not None:
            hidden |= mask.bool()[at // BLOCK][:, at // BLOCK].logical_not()
        scores = torch.einsum("qhd,khd->hqk", q[tokens].float(), keys) * scale
        yield tokens, scores.masked_fill(hidden, float("-inf")), values

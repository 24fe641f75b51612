"""Multi-round rejection sampling: accepts drafted tokens such that the output follows the target's distribution.

A node of a token tree has children x1, x2, … drawn one after another, without replacement, from the draft's
distribution q. With p the target's: x1 is accepted with the chance min(1, p(x1) / q(x1)); else p becomes max(0, p - q),
q loses x1, both are scaled to 1, and x2 is judged by them, and so on. Where none is accepted, a token is sampled from
the remaining p. The result is distributed as p for any q (SpecInfer's multi-step speculative sampling; with one child,
speculative sampling).
"""

import numpy as np
import torch
from torch import Tensor

from quire.sampling.columns import Purpose, stream_key, uniforms

MOST_CHILDREN = 16  # numbers that a position has for one purpose


def numbers(seeds: np.ndarray, indices: np.ndarray, positions: np.ndarray, purpose: Purpose) -> np.ndarray:
    """[N, MOST_CHILDREN] float64: the random numbers of each (seed, sample index, position) for one purpose."""
    keys = np.array(
        [stream_key(int(seed), int(index), purpose) for seed, index in zip(seeds, indices, strict=True)],
        np.uint64,
    )
    counters = positions[:, None] * MOST_CHILDREN + np.arange(MOST_CHILDREN)
    return uniforms(np.repeat(keys, MOST_CHILDREN), counters.reshape(-1)).reshape(-1, MOST_CHILDREN)


def draw_distinct(
    probabilities: Tensor,  # [N, V] float32
    random: Tensor,  # [N, W] float64 in [0, 1)
) -> Tensor:  # [N, W] int64
    """W tokens of each row, drawn one after another without replacement; -1 where none is left."""
    left = probabilities.clone()
    drawn = torch.full(random.shape, -1, dtype=torch.int64, device=left.device)
    for round_ in range(random.shape[1]):
        some = left.sum(dim=1) > 0
        drawn[:, round_] = torch.where(some, _draw(left, random[:, round_]), -1)
        _remove(left, drawn[:, round_])
    return drawn


def accept(
    target: Tensor,  # [N, V] float32, the target's distribution at each of N nodes
    draft: Tensor,  # [N, V] float32, the draft's
    children: Tensor,  # [N, W] int64, in the order in which they were drawn; -1: no more
    judged: Tensor,  # [N, W] float64 in [0, 1): decide which are accepted
    resampled: Tensor,  # [N] float64 in [0, 1): decide what replaces them
) -> Tensor:  # [N] int64
    """The token that each node goes on with: one of its children, or another."""
    p, q = target.clone(), _scaled(draft)
    chosen = torch.full((len(p),), -1, dtype=torch.int64, device=p.device)
    for round_ in range(children.shape[1]):
        child = children[:, round_]
        at = child.clamp(min=0)[:, None]
        judging = (child >= 0) & (chosen < 0)
        stays = judged[:, round_] * q.gather(1, at).squeeze(1) < p.gather(1, at).squeeze(1)
        chosen = torch.where(judging & stays, child, chosen)
        refused = judging & ~stays
        rest = (p - q).clamp_(min=0.0)
        # Nothing is left where both are the same but for rounding: then p itself is as good.
        p = torch.where((refused & (rest.sum(dim=1) > 0))[:, None], _scaled(rest), p)
        _remove(q, child)
        q = _scaled(q)
    return torch.where(chosen < 0, _draw(p, resampled), chosen)


def _scaled(weights: Tensor) -> Tensor:
    """To a sum of 1; a row of zeros stays one."""
    return weights / weights.sum(dim=1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).tiny)


def _remove(weights: Tensor, tokens: Tensor) -> None:
    """In place; -1 removes nothing."""
    at = tokens.clamp(min=0)[:, None]
    weights.scatter_(1, at, torch.where(tokens[:, None] >= 0, 0.0, weights.gather(1, at)))


def _draw(weights: Tensor, random: Tensor) -> Tensor:
    """One token of each row [N, V], by the inverse of its distribution function; never one of no weight."""
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    wanted = torch.minimum(random[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=weights.shape[1] - 1)
    # A parallel sum may step up by a rounding where the weight is zero.
    possible = weights.gather(1, drawn) > 0
    return torch.where(possible, drawn, weights.argmax(dim=1, keepdim=True)).squeeze(1)

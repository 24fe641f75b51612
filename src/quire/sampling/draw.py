"""Samples tokens in plain torch, for devices without a fused kernel. Sorts only for rows that filter by rank.

The same order of filters as the kernel: temperature, min-p, top-k, top-p, then one uniform number through the
inverse of the distribution function in token-id order. Ties at a filter's edge are kept lowest id first.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.sampling.columns import SamplingColumns
from quire.sampling.records import on_device

ELEMENTS_PER_PASS = 1 << 22  # bounds what is alive at once: about 30 bytes per element


@dataclass(frozen=True, slots=True)
class Draws:
    """How each of N rows wants its token sampled. On the host: it decides which stages run."""

    temperature: np.ndarray  # [N] float32, above 0
    top_k: np.ndarray  # [N] int32; 0 is off
    top_p: np.ndarray  # [N] float32; 1 is off
    min_p: np.ndarray  # [N] float32; 0 is off
    uniforms: np.ndarray  # [N] float64 in [0, 1)

    @classmethod
    def of(cls, columns: SamplingColumns, rows: np.ndarray, uniforms: np.ndarray) -> "Draws":
        """As these rows' parameters say."""
        return cls(
            columns.temperature[rows], columns.top_k[rows], columns.top_p[rows], columns.min_p[rows], uniforms
        )

    def take(self, indices: np.ndarray) -> "Draws":
        return Draws(
            self.temperature[indices],
            self.top_k[indices],
            self.top_p[indices],
            self.min_p[indices],
            self.uniforms[indices],
        )


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """logits [N, V] float32 -> int64 [N]. A row of NaN, or of minus infinity only, yields some id below V."""
    by_count = draws.top_k > 0
    by_mass = (draws.top_p < 1.0) & ~by_count
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    rows_per_pass = max(1, ELEMENTS_PER_PASS // logits.shape[1])
    for group in (by_count, by_mass, ~(by_count | by_mass)):
        members = np.flatnonzero(group)
        for start in range(0, len(members), rows_per_pass):
            indices = members[start : start + rows_per_pass]
            selected = on_device(indices, logits.device)
            chosen[selected] = _draw_alike(logits.index_select(0, selected), draws.take(indices))
    return chosen


def _draw_alike(logits: Tensor, draws: Draws) -> Tensor:
    """Rows of one group; `logits` is this function's own copy."""
    best = logits.argmax(dim=-1)
    weights = filtered_weights(logits, draws)
    uniform = on_device(draws.uniforms, logits.device)[:, None]
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    sampled = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1).squeeze(1)
    # A parallel sum may step up by a rounding where the weight is zero; a banned token must not come of it.
    possible = weights.gather(1, sampled[:, None]).squeeze(1) > 0
    return torch.where(possible, sampled, best)


def filtered_weights(logits: Tensor, draws: Draws) -> Tensor:
    """[N, V]: what each token's chance is in proportion to; zero where a filter leaves it out. Overwrites `logits`."""
    packed = np.stack([draws.temperature, draws.min_p, draws.top_p, draws.top_k])
    columns = on_device(packed, logits.device)[:, :, None].double()
    temperature, min_p, top_p, top_k = columns.unbind(0)  # each [N, 1] float64
    peak = logits.amax(dim=-1)
    weights = logits.sub_(peak[:, None]).div_(temperature.float()).exp_()
    if draws.min_p.any():
        weights.masked_fill_(weights < min_p.float(), 0.0)
    if draws.top_k.any():
        whole = weights.shape[1]
        limits = torch.where(top_k > 0, top_k, whole).long()  # rows of other groups may stand beside these
        descending = weights.topk(int(limits.max()), dim=-1).values
        weights.masked_fill_(~_kept(weights, descending, limits, top_p), 0.0)
    elif (draws.top_p < 1.0).any():
        descending = weights.sort(dim=-1, descending=True).values
        limits = torch.full_like(top_k, weights.shape[1], dtype=torch.int64)
        weights.masked_fill_(~_kept(weights, descending, limits, top_p), 0.0)
    return weights


def _kept(
    weights: Tensor,  # [N, V] float32
    descending: Tensor,  # [N, D] float32, the D largest weights
    limits: Tensor,  # [N, 1] int64, top-k, at most D
    top_p: Tensor,  # [N, 1] float64
) -> Tensor:  # [N, V] bool
    """Which tokens top-k and then top-p leave: the sorted values give a count, the count a threshold."""
    ranks = torch.arange(descending.shape[1], device=weights.device)
    sorted_weights = descending.double().masked_fill_(ranks >= limits, 0.0)
    cumulative = sorted_weights.cumsum(dim=-1)
    before = cumulative - sorted_weights
    within = ((before < top_p * cumulative[:, -1:]) | (top_p >= 1.0)) & (ranks < limits)
    number = within.sum(dim=-1, keepdim=True).clamp_(min=1)
    threshold = descending.gather(1, number - 1)
    above = weights > threshold
    level = weights == threshold
    room = number - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))

"""Sampling in plain torch. Every row's result depends on that row alone."""

import torch
from torch import Tensor

GREEDY = 1e-6  # a temperature below this is none


def argmax(logits: Tensor) -> Tensor:
    """logits [S, V] -> int64 [S]; ties go to the lowest id."""
    largest = logits.amax(dim=-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == largest, ids, logits.shape[-1]).amin(dim=-1)


def peaks(logits: Tensor) -> Tensor:
    """logits [S, V] -> fp32 [S], each row's largest; NaN where the row has one."""
    return logits.amax(dim=-1)


def log_softmax_gather(logits: Tensor, token_ids: Tensor) -> Tensor:
    """logits [S, V], token_ids [S] int64 -> fp32 [S], the log probability of each token."""
    chosen = logits.gather(-1, token_ids.long()[:, None]).squeeze(-1).float()
    return chosen - logits.float().logsumexp(dim=-1)


def token_ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """int64 [S]: 1 + how many tokens of the row have a strictly larger logit."""
    chosen = logits.gather(-1, token_ids.long()[:, None])
    return (logits > chosen).sum(dim=-1) + 1


def sample_filtered(
    logits: Tensor,  # [S, V] fp32
    temperature: Tensor,  # [S] fp32; 0 means greedy
    top_k: Tensor,  # [S] int32; 0 is off
    top_p: Tensor,  # [S] fp32; 1 is off
    min_p: Tensor,  # [S] fp32; 0 is off
    uniforms: Tensor,  # [S] fp64 in [0, 1)
) -> Tensor:  # [S] int64
    """Draws a token per row: temperature, then min-p, then top-k, then top-p, then inverse CDF by token id.

    Ties are kept lowest id first. top-p keeps the smallest set, by falling probability over what the earlier
    filters left, whose probability reaches p; never fewer than one token.
    """
    greedy = argmax(logits)
    warm = temperature >= GREEDY
    safe = torch.where(warm, temperature, torch.ones_like(temperature))
    scaled = logits.float() / safe[:, None].float()
    weights = torch.exp((scaled - scaled.amax(dim=-1, keepdim=True)).double())
    weights = torch.where(weights < min_p[:, None].double(), torch.zeros_like(weights), weights)
    descending, order = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[-1], device=logits.device)
    limits = torch.where(top_k > 0, top_k.long(), weights.shape[-1])
    descending = descending.masked_fill(ranks[None, :] >= limits[:, None], 0.0)
    cumulative = descending.cumsum(dim=-1)
    reached = cumulative - descending >= top_p[:, None].double() * cumulative[:, -1:]
    off = (top_p >= 1)[:, None]
    descending = descending.masked_fill(reached & ~off & (ranks[None, :] > 0), 0.0)
    kept = torch.zeros_like(weights).scatter_(-1, order, descending)
    cumulative = kept.cumsum(dim=-1)
    targets = uniforms[:, None].double() * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    last = torch.where(kept > 0, ranks, 0).amax(dim=-1)
    return torch.where(warm, torch.minimum(drawn, last), greedy)

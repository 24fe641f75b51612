"""Log probabilities of the model's raw distribution, for chosen tokens and for prompts."""

from dataclasses import replace
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from quire.core.step import TokenLogprobs
from quire.kernels import choose
from quire.sampling.records import LogprobTensors, Sampled

ROWS_PER_PASS = 64  # prompt positions turned into logprobs at once


def measure(
    logits: Tensor,  # [M, V] float32, raw
    token_ids: Tensor,  # [M] int64
    indices: np.ndarray,  # [M] int64
    num_top: np.ndarray,  # [M] int64
    kernel: ModuleType,
) -> LogprobTensors:
    """Logprob and rank of `token_ids`, and as many of the best tokens as the most demanding row wants."""
    largest = min(int(num_top.max(initial=0)), logits.shape[1])
    # From the peak's own logprob, -log sum exp(x - peak), all others follow with one rounding; and a token
    # has the same logprob as the chosen one and as one of the best.
    best = kernel.argmax(logits).clamp_(max=logits.shape[1] - 1)[:, None]
    peak = logits.gather(1, best)
    peak_logprob = kernel.log_softmax_gather(logits, best.squeeze(1))[:, None]
    top_logits, top_ids = _best(logits, largest)
    return LogprobTensors(
        indices=indices,
        num_top=num_top,
        token_ids=token_ids,
        logprobs=(logits.gather(1, token_ids[:, None]) - peak + peak_logprob).squeeze(1),
        ranks=kernel.token_ranks(logits, token_ids),
        top_ids=top_ids,
        top_logprobs=top_logits - peak + peak_logprob,
    )


def prompt_logprobs(
    logits: Tensor,  # [n, V] float32, of consecutive positions
    next_token_ids: Tensor,  # [n] int64, the token that follows each position
    num_top: int,
) -> list[TokenLogprobs]:
    """Logprobs of each next token. Computed in pieces, so memory does not grow with the prompt."""
    kernel = choose("sample", logits.device)
    entries: list[TokenLogprobs] = []
    for start in range(0, len(logits), ROWS_PER_PASS):
        piece = logits[start : start + ROWS_PER_PASS]
        wanted = np.full(len(piece), num_top, np.int64)
        following = next_token_ids[start : start + ROWS_PER_PASS].long()
        entries += _entries(measure(piece, following, np.arange(len(piece)), wanted, kernel))
    return entries


def on_host(sampled: Sampled) -> Sampled:
    """With host copies of the logprobs, complete once the device has come this far; nothing waits."""
    given = sampled.logprobs
    if given is None:
        return sampled
    columns = (given.token_ids, given.logprobs, given.ranks, given.top_ids, given.top_logprobs)
    copies = (column.to("cpu", non_blocking=True) for column in columns)
    return replace(sampled, logprobs=LogprobTensors(given.indices, given.num_top, *copies))


def logprob_entries(sampled: Sampled) -> tuple[TokenLogprobs | None, ...]:
    """The contents of `StepResult.logprobs`: one per token, None where not wanted; empty if none is wanted."""
    if sampled.logprobs is None:
        return ()
    entries: list[TokenLogprobs | None] = [None] * len(sampled.token_ids)
    for index, entry in zip(sampled.logprobs.indices, _entries(sampled.logprobs), strict=True):
        entries[index] = entry
    return tuple(entries)


def _best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest, [M, count] values and ids, falling; equal ones with the lower id first."""
    if count == 0:
        ids = torch.zeros(len(logits), 0, dtype=torch.int64, device=logits.device)
        return logits[:, :0], ids
    ids = logits.topk(count, dim=-1).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _entries(measured: LogprobTensors) -> list[TokenLogprobs]:
    columns = (
        measured.token_ids.tolist(),
        measured.logprobs.tolist(),
        measured.ranks.tolist(),
        measured.top_ids.tolist(),
        measured.top_logprobs.tolist(),
        measured.num_top.tolist(),
    )
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(top_ids[:count]), tuple(top_logprobs[:count]))
        for token_id, logprob, rank, top_ids, top_logprobs, count in zip(*columns, strict=True)
    ]

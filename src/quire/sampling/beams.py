"""Beams: the best continuations over all beams of a request, chosen in one top-k over beams and vocabulary."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.core.request import ints
from quire.core.step import BeamCandidates, BeamSet
from quire.sampling.columns import token_array
from quire.sampling.records import BeamTensors, on_device

CHUNKS = (256, 128, 64, 32)


def normalise(logits: Tensor, beams: Sequence[BeamSet]) -> Tensor:
    """Turns the beams' logits [S, V] into log probabilities, before biases and bans are added.

    In place where they are float32; else a float32 copy, since 16 bits are too few for sums of them.
    """
    logits = logits.float()
    samples = on_device(np.concatenate([np.asarray(beam.samples, np.int64) for beam in beams]), logits.device)
    logits[samples] = torch.log_softmax(logits[samples], dim=-1)
    return logits


def best_candidates(logprobs: Tensor, beams: Sequence[BeamSet]) -> tuple[BeamTensors, ...]:
    """One top-k for all requests with as many beams and candidates; logprobs [S, V] as `normalise` left them."""
    alike: dict[tuple[int, int, frozenset[int]], list[int]] = {}
    for index, request in enumerate(beams):
        key = (len(request.samples), request.num_candidates, request.stop_token_ids)
        alike.setdefault(key, []).append(index)
    candidates = []
    for (_, num_candidates, stop_token_ids), indices in alike.items():
        samples = np.array([beams[i].samples for i in indices], np.int64)
        scores = np.array([beams[i].scores for i in indices], np.float32)
        best = _best(logprobs, samples, scores, num_candidates, stop_token_ids)
        candidates.append(BeamTensors(tuple(indices), *best))
    return tuple(candidates)


def _best(
    logprobs: Tensor,  # [S, V]
    samples: np.ndarray,  # [G, B] int64
    scores: np.ndarray,  # [G, B] float32
    num_candidates: int,
    stop_token_ids: frozenset[int],
) -> tuple[Tensor, Tensor, Tensor]:  # samples, token ids, scores, each [G, C]
    device, vocab_size = logprobs.device, logprobs.shape[1]
    rows = on_device(samples, device)
    totals = logprobs[rows].add_(on_device(scores, device)[:, :, None])  # [G, B, V]
    indices, values = _top(totals.flatten(1), num_candidates)
    if stop_token_ids:  # then the best that go on, of those not found yet
        totals.view(len(rows), -1).scatter_(1, indices, -torch.inf)
        totals.index_fill_(2, on_device(token_array(stop_token_ids, vocab_size), device), -torch.inf)
        more_indices, more_values = _top(totals.flatten(1), num_candidates)
        indices, order = torch.cat((indices, more_indices), dim=1).sort(dim=1)
        values = torch.cat((values, more_values), dim=1).gather(1, order)
    values, order = values.sort(dim=1, descending=True, stable=True)
    indices = indices.gather(1, order)
    return rows.gather(1, indices // vocab_size), indices % vocab_size, values


def _top(totals: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices [G, C], ascending, of the largest totals [G, N], and their values."""
    indices = _largest(totals, min(count, totals.shape[1])).sort(dim=1).values
    return indices, totals.gather(1, indices)


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices [G, count] of the largest values [G, N], in no order; ties at the end are broken arbitrarily.

    They lie in the `count` chunks with the largest maxima, and maxima are faster than a top-k of all.
    """
    chunk = next((size for size in CHUNKS if values.shape[1] % size == 0), None)
    if chunk is None or 4 * count * chunk > values.shape[1]:
        return values.topk(count, dim=1).indices
    chunks = values.view(len(values), -1, chunk)
    best = chunks.amax(dim=2).topk(count, dim=1).indices
    kept = chunks.gather(1, best[:, :, None].expand(-1, -1, chunk)).flatten(1)
    indices = kept.topk(count, dim=1).indices
    return best.gather(1, indices // chunk) * chunk + indices % chunk


def on_host(tensors: tuple[BeamTensors, ...]) -> tuple[BeamTensors, ...]:
    """Host copies, complete once the device has come this far; no later step is waited for."""
    return tuple(
        BeamTensors(
            group.requests,
            group.samples.to("cpu", non_blocking=True),
            group.token_ids.to("cpu", non_blocking=True),
            group.scores.to("cpu", non_blocking=True),
        )
        for group in tensors
    )


def candidate_records(tensors: tuple[BeamTensors, ...]) -> tuple[BeamCandidates, ...]:
    """The contents of `StepResult.beams`, one per request. Waits for the device."""
    records: dict[int, BeamCandidates] = {}
    for group in tensors:
        columns = group.samples.tolist(), group.token_ids.tolist(), group.scores.tolist()
        for request, samples, token_ids, scores in zip(group.requests, *columns, strict=True):
            records[request] = BeamCandidates(ints(samples), ints(token_ids), tuple(scores))
    return tuple(records[request] for request in sorted(records))

"""Beams: the best continuations over all beams of a request, chosen in one top-k over beams and vocabulary."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.core.ints import ints
from quire.core.step import BeamCandidates, BeamSet
from quire.sampling.records import BeamTensors, on_device

CHUNKS = (256, 128, 64, 32)


def normalise(logits: Tensor, beams: Sequence[BeamSet]) -> Tensor:
    """Beams' logits [S, V] become log probabilities, to which biases and bans are added then.

    In place where they are float32; a copy in float32 where 16 bits would not tell sums of them apart.
    """
    logits = logits.float()
    samples = on_device(np.concatenate([np.asarray(one.samples, np.int64) for one in beams]), logits.device)
    logits[samples] = torch.log_softmax(logits[samples], dim=-1)
    return logits


def best_candidates(logprobs: Tensor, beams: Sequence[BeamSet]) -> tuple[BeamTensors, ...]:
    """One top-k for all requests with as many beams and candidates; logprobs [S, V] as `normalise` left them."""
    alike: dict[tuple[int, int], list[int]] = {}
    for index, one in enumerate(beams):
        alike.setdefault((len(one.samples), one.num_candidates), []).append(index)
    found = []
    for (_, num_candidates), indices in alike.items():
        samples = np.array([beams[i].samples for i in indices], np.int64)
        scores = np.array([beams[i].scores for i in indices], np.float32)
        found.append(BeamTensors(tuple(indices), *_best(logprobs, samples, scores, num_candidates)))
    return tuple(found)


def _best(
    logprobs: Tensor,  # [S, V]
    samples: np.ndarray,  # [G, B] int64
    scores: np.ndarray,  # [G, B] float32
    num_candidates: int,
) -> tuple[Tensor, Tensor, Tensor]:  # samples, token ids, scores, each [G, C]
    device, vocab_size = logprobs.device, logprobs.shape[1]
    rows = on_device(samples, device)
    totals = logprobs[rows].add_(on_device(scores, device)[:, :, None]).flatten(1)  # [G, B * V]
    places = _largest(totals, min(num_candidates, totals.shape[1])).sort(dim=1).values
    values, order = totals.gather(1, places).sort(dim=1, descending=True, stable=True)
    places = places.gather(1, order)
    return rows.gather(1, places // vocab_size), places % vocab_size, values


def _largest(values: Tensor, count: int) -> Tensor:
    """Places [G, count] of the largest values [G, N], in no order. Which of several equal last ones is left open.

    They lie in the `count` chunks with the largest peaks, and peaks are found faster than an order is.
    """
    chunk = next((size for size in CHUNKS if values.shape[1] % size == 0), None)
    if chunk is None or 4 * count * chunk > values.shape[1]:
        return values.topk(count, dim=1).indices
    chunks = values.view(len(values), -1, chunk)
    best = chunks.amax(dim=2).topk(count, dim=1).indices
    kept = chunks.gather(1, best[:, :, None].expand(-1, -1, chunk)).flatten(1)
    places = kept.topk(count, dim=1).indices
    return best.gather(1, places // chunk) * chunk + places % chunk


def on_host(tensors: tuple[BeamTensors, ...]) -> tuple[BeamTensors, ...]:
    """Copies that are whole once the device has come this far; a later step is not waited for."""
    return tuple(
        BeamTensors(
            one.requests,
            one.samples.to("cpu", non_blocking=True),
            one.token_ids.to("cpu", non_blocking=True),
            one.scores.to("cpu", non_blocking=True),
        )
        for one in tensors
    )


def candidate_records(tensors: tuple[BeamTensors, ...]) -> tuple[BeamCandidates, ...]:
    """As `StepResult.beams` wants them, one per request. Waits for the device."""
    found: dict[int, BeamCandidates] = {}
    for one in tensors:
        columns = one.samples.tolist(), one.token_ids.tolist(), one.scores.tolist()
        for request, samples, token_ids, scores in zip(one.requests, *columns, strict=True):
            found[request] = BeamCandidates(ints(samples), ints(token_ids), tuple(scores))
    return tuple(found[request] for request in sorted(found))

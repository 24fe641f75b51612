"""Sampling as a textbook would write it: one row, loops, float64. The tests hold the sampler to it."""

from dataclasses import dataclass

import numpy as np
import torch

from quire.core.sampling import SamplingParams
from quire.sampling.columns import SamplingColumns
from quire.sampling.records import SampleRequests


@dataclass(frozen=True)
class Case:
    """One row's question: its parameters, history and raw logits."""

    sampling: SamplingParams
    history: tuple[int, ...]  # prompt and output
    num_prompt_tokens: int
    logits: np.ndarray  # [V] float32
    seed: int = 0
    sample_index: int = 0
    stop_token_ids: tuple[int, ...] = ()


def batch_of(
    cases: list[Case], max_len: int = 64, rows: list[int] | None = None
) -> tuple[torch.Tensor, SampleRequests]:
    """The cases as the sampler takes them, each in a row of its own."""
    rows = list(range(len(cases))) if rows is None else rows
    columns = SamplingColumns(max(rows) + 1, len(cases[0].logits))
    # -7 is no token: reading past a row's end would show
    token_ids = torch.full((max(rows) + 1, max_len), -7, dtype=torch.int32)
    for row, case in zip(rows, cases, strict=True):
        columns.start_row(
            row, case.sampling, case.seed, case.sample_index, case.num_prompt_tokens, case.stop_token_ids
        )
        token_ids[row, : len(case.history)] = torch.tensor(case.history, dtype=torch.int32)
    positions = np.array([len(case.history) for case in cases], np.int64)
    logits = torch.from_numpy(np.stack([case.logits for case in cases]))
    return logits, SampleRequests(np.array(rows, np.int64), positions, columns, token_ids)


def edited_logits(case: Case) -> np.ndarray:
    """[V] float32 after bias, bans and penalties."""
    sampling, history = case.sampling, case.history
    logits = case.logits.copy()
    outputs = history[case.num_prompt_tokens :]
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += np.float32(bias)
    for token_id in set(history):
        penalty = np.float32(sampling.repetition_penalty)
        value = logits[token_id]
        logits[token_id] = value / penalty if value > 0 else value * penalty
    for token_id in set(outputs):
        logits[token_id] -= np.float32(sampling.frequency_penalty) * np.float32(outputs.count(token_id))
        logits[token_id] -= np.float32(sampling.presence_penalty)
    for word in sampling.bad_words_token_ids:
        before = tuple(word[:-1])
        if not before or history[-len(before) :] == before:
            logits[word[-1]] = -np.inf
    if len(outputs) < sampling.min_tokens:
        for token_id in case.stop_token_ids:
            logits[token_id] = -np.inf
    if sampling.allowed_token_ids is not None:
        for token_id in range(len(logits)):
            if token_id not in sampling.allowed_token_ids:
                logits[token_id] = -np.inf
    return logits


def weights_of(case: Case) -> tuple[np.ndarray, float]:
    """[V] float64 weights after all filters, and how near the closest decision was to going the other way."""
    sampling = case.sampling
    logits = edited_logits(case).astype(np.float64)
    weights = np.exp((logits - logits.max()) / np.float32(sampling.temperature))
    margins = [1.0]
    if sampling.min_p > 0:
        least = float(np.float32(sampling.min_p))
        margins.append(float(np.abs(weights - least).min()))
        weights[weights < least] = 0.0
    order = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))
    if sampling.top_k > 0:
        for token_id in order[sampling.top_k :]:
            weights[token_id] = 0.0
    if sampling.top_p < 1.0:
        share = float(np.float32(sampling.top_p)) * weights.sum()
        before = 0.0
        for token_id in order:
            margins.append(abs(before - share) if weights[token_id] > 0 else 1.0)
            before, kept = before + weights[token_id], before < share or token_id == order[0]
            weights[token_id] *= kept
    return weights, min(margins)


def raw_logprobs(case: Case) -> np.ndarray:
    """[V] float64."""
    logits = case.logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

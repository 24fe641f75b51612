"""What comes up over many positions follows the filtered distribution."""

import numpy as np
import pytest
import torch

from quire.core.sampling import SamplingParams
from quire.sampling.records import SampleRequests
from quire.sampling.sampler import Sampler
from tests.sampling.oracle import Case, batch_of, weights_of

DRAWS = 20_000
VOCAB = 64


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.08},
        {"top_k": 20, "top_p": 0.9},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.01, "temperature": 1.7},
        {"temperature": 0.5, "top_p": 0.99},
        {"logit_bias": {3: 4.0, 5: -100.0}},
    ],
)
def test_draws_follow_the_distribution(sampler: Sampler, filters: dict) -> None:
    logits = np.random.default_rng(12).standard_normal(VOCAB).astype(np.float32) * 2
    case = Case(SamplingParams(**filters), (1, 2, 3), 3, logits, seed=77)
    _, requests = batch_of([case])
    rows, positions = np.zeros(DRAWS, np.int64), np.arange(3, 3 + DRAWS)
    many = SampleRequests(rows, positions, requests.columns, requests.token_ids)
    sampled = sampler(torch.from_numpy(logits).expand(DRAWS, VOCAB).contiguous(), many)
    weights, margin = weights_of(case)
    assert margin > 1e-5
    assert sampled.finite.all()
    observed = np.bincount(sampled.token_ids.numpy(), minlength=VOCAB)
    expected = weights / weights.sum() * DRAWS
    assert (observed[weights == 0] == 0).all()
    likely = expected >= 5
    rest = np.array([observed[~likely].sum(), expected[~likely].sum()])
    chi_square = ((observed[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    chi_square += (rest[0] - rest[1]) ** 2 / rest[1] if rest[1] > 1 else 0.0
    freedom = max(int(likely.sum()), 1)
    assert chi_square < freedom + 4.5 * np.sqrt(2 * freedom)

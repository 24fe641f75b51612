"""Prompt logprobs: the numbers that likelihood evaluation adds up."""

import numpy as np
import pytest
import torch

from quire.sampling.logprobs import ROWS_PER_PASS, prompt_logprobs


@pytest.mark.parametrize("count", [1, ROWS_PER_PASS, 2 * ROWS_PER_PASS + 3])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_each_next_token_is_measured(count: int, num_top: int) -> None:
    generator = np.random.default_rng(count)
    logits = (generator.standard_normal((count, 501)) * 4).astype(np.float32)
    following = generator.integers(0, 501, count)
    entries = prompt_logprobs(torch.from_numpy(logits), torch.from_numpy(following), num_top)
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert len(entries) == count
    for row, entry in enumerate(entries):
        best = np.argsort(-exact[row], kind="stable")[:num_top]
        assert entry.token_id == following[row]
        assert entry.logprob == pytest.approx(exact[row, following[row]], abs=1e-5)
        assert entry.rank == 1 + (logits[row] > logits[row, following[row]]).sum()
        assert list(entry.top_ids) == best.tolist()
        assert entry.top_logprobs == pytest.approx(exact[row, best], abs=1e-5)


def test_the_sum_is_accurate_enough_for_likelihoods() -> None:
    """Over a real vocabulary, with logits far from zero, the sum keeps six digits."""
    generator = np.random.default_rng(3)
    logits = (generator.standard_normal((80, 49152)) * 3 + 25).astype(np.float32)
    following = np.argpartition(logits, -40)[:, -40]
    entries = prompt_logprobs(torch.from_numpy(logits), torch.from_numpy(following), 0)
    exact = logits.astype(np.float64)
    peak = exact.max(axis=1, keepdims=True)
    exact = exact - peak - np.log(np.exp(exact - peak).sum(axis=1, keepdims=True))
    wanted = exact[np.arange(80), following].sum()
    assert sum(entry.logprob for entry in entries) == pytest.approx(wanted, rel=1e-6)


def test_a_vocabulary_smaller_than_the_number_of_best_tokens() -> None:
    entry = prompt_logprobs(torch.tensor([[0.0, 1.0, 1.0]]), torch.tensor([0]), 20)[0]
    assert entry.top_ids == (1, 2, 0)
    assert entry.rank == 3

"""A request's candidates are the best over all of its beams, whoever else is sampled."""

import pytest
import torch

from quire.core.request import ints
from quire.core.step import BeamSet
from quire.sampling.beams import best_candidates, candidate_records, normalise


@pytest.mark.parametrize("vocab_size", [97, 512, 4096 + 32])
def test_candidates_are_the_best_over_beams_and_vocabulary(vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(9, vocab_size) * 3
    logits[4, 7] = logits[4, 5] = logits[4].max() + 1  # a tie
    untouched = logits[0].clone()
    beams = (
        BeamSet(ints([1, 2, 3]), (-1.0, -2.5, -3.0), 6),
        BeamSet(ints([4]), (0.0,), 6),
        BeamSet(ints([5, 6, 8]), (-4.0, -4.0, -4.5), 6),
    )
    expected = []
    for one in beams:
        scores = torch.log_softmax(logits[list(one.samples)], dim=-1) + torch.tensor(one.scores)[:, None]
        ranked = [
            (score, sample, token)
            for sample, row in zip(one.samples, scores.tolist(), strict=True)
            for token, score in enumerate(row)
        ]
        ranked.sort(key=lambda entry: -entry[0])
        expected.append(ranked[:6])
    normalise(logits, beams)
    found = candidate_records(best_candidates(logits, beams))
    for one, ranked in zip(found, expected, strict=True):
        assert list(zip(one.samples, one.token_ids, strict=True)) == [
            (sample, token) for _, sample, token in ranked
        ]
        assert one.scores == pytest.approx([score for score, _, _ in ranked], abs=1e-5)
    assert torch.equal(logits[0], untouched)


def test_a_vocabulary_may_be_smaller_than_what_is_wanted() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 2] = -torch.inf
    beams = (BeamSet(ints([0]), (0.0,), 16),)
    normalise(logits, beams)
    (found,) = candidate_records(best_candidates(logits, beams))
    assert list(found.token_ids) == [0, 1, 3, 2]
    assert found.scores[-1] == float("-inf")

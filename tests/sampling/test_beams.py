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


@pytest.mark.parametrize("vocab_size", [40, 512])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_with_many_stop_tokens_the_best_that_go_on_are_found_beside_the_best(
    vocab_size: int, every: int
) -> None:
    torch.manual_seed(every)
    logits = (torch.randn(3, vocab_size) * 8).round() / 4  # with ties
    stops = frozenset(range(0, vocab_size, every)) | {
        vocab_size + 7
    }  # a model's end token may be no row of its head
    beams = (BeamSet(ints([0, 2]), (-1.0, -1.5), 6, stops), BeamSet(ints([1]), (0.0,), 4))
    normalise(logits, beams)
    found, other = candidate_records(best_candidates(logits, beams))
    ranked = sorted(
        (-(logits[sample, token] + score).item(), sample, token)
        for sample, score in zip(beams[0].samples, beams[0].scores, strict=True)
        for token in range(vocab_size)
    )
    scores = [-score for score, _, _ in ranked]
    entries = zip(found.samples, found.token_ids, found.scores, strict=True)
    kept = [entry for entry in entries if entry[2] > -1e9]
    assert len({(sample, token) for sample, token, _ in kept}) == len(kept) <= 12
    assert [score for _, _, score in kept[:6]] == pytest.approx(scores[:6], abs=1e-5)
    going_on = [-score for score, _, token in ranked if token not in stops]
    found_going_on = [score for _, token, score in kept if token not in stops]
    assert found_going_on[:6] == pytest.approx(going_on[:6], abs=1e-5)
    assert len(other.token_ids) == 4

"""Draft lengths follow acceptance_rate and costs, as plain arithmetic."""

from collections.abc import Callable

import pytest

from quire.core.draft import TokenTree
from quire.core.request import ints
from quire.scheduler.drafts import trimmed
from quire.speculate.adapt import (
    Shape,
    best_shape,
    expected_tokens,
    expected_tree_tokens,
    update_acceptance_rate,
    update_branch_acceptance,
)
from quire.speculate.costs import STALE, StepCosts
from quire.speculate.tree import num_accepted


def flat(num_running: int, shape: Shape) -> float:
    """A step whose cost is the weights: its tokens are nearly free."""
    return 1.0 + 0.01 * num_running * (1 + shape.num_tokens)


def steep(num_running: int, shape: Shape) -> float:
    """A step that costs as much as it has tokens."""
    return float(num_running * (1 + shape.num_tokens))


def best_length(
    acceptance_rate: float, num_running: int, most: int, seconds: Callable[[int, Shape], float]
) -> int:
    """Of a chain."""
    return best_shape(acceptance_rate, 0.0, num_running, Shape(most), most, seconds).length


def test_expected_tokens() -> None:
    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)


def test_right_drafts_are_long_and_wrong_ones_are_not_made() -> None:
    lengths = [best_length(acceptance_rate, 1, 8, flat) for acceptance_rate in (0.0, 0.2, 0.5, 0.8, 1.0)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] == 8


def test_where_tokens_cost_what_they_bring_nothing_is_drafted() -> None:
    assert best_length(0.99, 4, 8, steep) == 0


def test_a_larger_batch_drafts_less() -> None:
    lengths = [best_length(0.8, rows, 8, flat) for rows in (1, 16, 64, 512)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_a_tree_is_as_wide_as_its_other_branches_are_worth() -> None:
    most = Shape(4, 4)
    assert best_shape(0.5, 0.0, 1, most, 16, flat).width == 1
    assert best_shape(0.5, 0.3, 1, most, 16, flat).width == 4
    assert (
        best_shape(0.5, 0.3, 16, most, 16, flat).num_tokens
        < best_shape(0.5, 0.3, 1, most, 16, flat).num_tokens
    )
    assert best_shape(0.5, 0.3, 1, most, 5, flat).num_tokens <= 5
    assert best_shape(0.9, 0.3, 4, most, 16, steep) == Shape(0)


def test_expected_tokens_of_a_tree() -> None:
    assert expected_tree_tokens(0.5, 0.3, Shape(3)) == expected_tokens(0.5, 3)
    assert expected_tree_tokens(0.5, 0.2, Shape(1, 3)) == pytest.approx(1.0 + 0.5 + 0.5 * 0.4)
    assert expected_tree_tokens(0.0, 1.0, Shape(3, 2)) == pytest.approx(2.0)


def test_rescue_follows_what_other_branches_do() -> None:
    branch_acceptance = 0.2
    for _ in range(40):
        branch_acceptance = update_branch_acceptance(branch_acceptance, 2, True)
    assert branch_acceptance == pytest.approx(0.5, abs=0.01)
    for _ in range(40):
        branch_acceptance = update_branch_acceptance(branch_acceptance, 2, False)
    assert branch_acceptance < 0.01


def test_agreement_follows_the_newest_tokens() -> None:
    assert update_acceptance_rate(0.5, 0, False) == 0.5
    assert update_acceptance_rate(0.5, 20, False) > 0.98
    assert update_acceptance_rate(0.5, 3, True) < update_acceptance_rate(0.5, 3, False)
    acceptance_rate = 1.0
    for _ in range(20):
        acceptance_rate = update_acceptance_rate(acceptance_rate, 0, True)
    assert acceptance_rate < 0.02


def test_a_drafted_token_stays_where_the_target_chose_it() -> None:
    assert num_accepted([], [7]) == 0
    assert num_accepted([7, 8], [7, 8, 9]) == 2
    assert num_accepted([7, 8, 9], [7, 1, 9, 4]) == 1
    assert num_accepted([7], [1, 7]) == 0


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts()
    for _ in range(2):
        costs.note(1, 0.010)
        costs.note(5, 0.018)
    assert costs.seconds(1) == pytest.approx(0.010)
    assert costs.seconds(3) == pytest.approx(0.014)
    assert costs.seconds(9) == pytest.approx(0.026)


def test_a_first_step_and_a_disturbed_one_count_little() -> None:
    costs = StepCosts()
    for seconds in (0.090, 0.010, 0.010, 5.0):
        costs.note(4, seconds)
    assert costs.seconds(4) < 0.015


def test_a_machine_that_slows_down_slows_the_sizes_that_are_seldom_seen() -> None:
    costs = StepCosts()
    for _ in range(8):
        costs.note(1, 1.0)
        costs.note(8, 1.5)
    for _ in range(40):
        costs.note(1, 2.0)
    assert costs.seconds(1) == pytest.approx(2.0, rel=0.05)
    assert 1.2 < costs.seconds(8) / costs.seconds(1) < 1.6  # no sudden bargain


def test_a_size_that_is_not_seen_again_is_forgotten() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.note(8, 9.0)
    for _ in range(STALE + 64):
        costs.note(1, 0.010)
    assert costs.seconds(8) < 0.1


def test_sizes_of_steps_with_drafts_are_few() -> None:
    for total, kept in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (11, 8)):
        halves = total // 2, total - total // 2
        drafts = trimmed([TokenTree(ints(range(half))) for half in halves])
        assert sum(map(len, drafts)) == kept

"""Draft shapes from measured acceptance rates and step costs. Pure functions."""

from collections.abc import Callable
from dataclasses import dataclass

GAIN = 1.05  # the least expected speed-up of a draft: it is an estimate
FIRST_ACCEPTANCE_RATE = 0.5  # acceptance rate of a new sequence
FIRST_LONG_MATCH_RATE = 0.8  # the same, of drafts from long matches
FIRST_BRANCH_ACCEPTANCE = 0.2  # of another branch, where the first is rejected
FORGETTING = 0.2  # weight of the newest token


@dataclass(frozen=True, slots=True)
class Shape:
    """Length of a draft, and its number of branches."""

    length: int
    width: int = 1

    @property
    def num_tokens(self) -> int:
        return self.length * self.width


def expected_tokens(acceptance_rate: float, length: int) -> float:
    """Expected tokens of a step with a draft of `length`, each accepted at this rate if the ones before are."""
    if acceptance_rate >= 1.0:
        return length + 1.0
    return (1.0 - acceptance_rate ** (length + 1)) / (1.0 - acceptance_rate)


def expected_tree_tokens(acceptance_rate: float, branch_acceptance: float, shape: Shape) -> float:
    """Expected tokens of a step with a tree whose branches part at the root.

    `branch_acceptance`: the chance of each other branch to begin right where the first does not.
    """
    if shape.width == 1 or not shape.length:
        return expected_tokens(acceptance_rate, shape.length)
    begins = acceptance_rate + (1.0 - acceptance_rate) * min(1.0, branch_acceptance * (shape.width - 1))
    return 1.0 + begins * expected_tokens(acceptance_rate, shape.length - 1)


def best_shape(
    acceptance_rate: float,
    branch_acceptance: float,
    num_running: int,
    most: Shape,
    most_tokens: int,
    seconds: Callable[[int, Shape], float],
) -> Shape:
    """The shape, up to `most` and `most_tokens`, with the highest throughput if every running sequence drafts so.

    `seconds(num_running, shape)`: the time of such a draft and of the step that verifies it. A length of 0 where
    nothing is gained.
    """
    best, best_rate = Shape(0), GAIN * num_running / seconds(num_running, Shape(0))
    for width in range(1, most.width + 1):
        for length in range(1, min(most.length, most_tokens // width) + 1):
            shape = Shape(length, width)
            rate = (
                num_running
                * expected_tree_tokens(acceptance_rate, branch_acceptance, shape)
                / seconds(num_running, shape)
            )
            if rate > best_rate:
                best, best_rate = shape, rate
    return best


def update_branch_acceptance(branch_acceptance: float, num_others: int, is_accepted: bool) -> float:
    """The estimate after the first branch was rejected, beside `num_others` other branches."""
    return branch_acceptance + FORGETTING * (is_accepted / num_others - branch_acceptance)


def update_acceptance_rate(acceptance_rate: float, num_right: int, is_wrong: bool) -> float:
    """The moving average after `num_right` accepted tokens in a row and perhaps a rejected one."""
    acceptance_rate = 1.0 - (1.0 - acceptance_rate) * (1.0 - FORGETTING) ** num_right
    return acceptance_rate * (1.0 - FORGETTING) if is_wrong else acceptance_rate

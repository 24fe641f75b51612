"""How far to draft: from how often drafts are right and from what a step costs. Functions of what was measured."""

from collections.abc import Callable
from dataclasses import dataclass

GAIN = 1.05  # a draft must promise at least so much: what it promises is an estimate
FIRST_AGREEMENT = 0.5  # of a sequence that nothing is known of
FIRST_STRONG = 0.8  # the same, of drafts of the better kind
FIRST_RESCUE = 0.2  # of one other branch, where the first went wrong
FORGETTING = 0.2  # how much the newest token counts


@dataclass(frozen=True, slots=True)
class Shape:
    """How far a draft goes, and in how many branches."""

    length: int
    width: int = 1

    @property
    def num_tokens(self) -> int:
        return self.length * self.width


def expected_tokens(agreement: float, length: int) -> float:
    """Tokens that a step yields with a draft of so many, each right with that chance if those before it were."""
    if agreement >= 1.0:
        return length + 1.0
    return (1.0 - agreement ** (length + 1)) / (1.0 - agreement)


def expected_of_tree(agreement: float, rescue: float, shape: Shape) -> float:
    """Tokens that a step yields with a tree whose branches part at the root.

    `rescue` is the chance of each branch but the first that it begins right where the first does not.
    """
    if shape.width == 1 or not shape.length:
        return expected_tokens(agreement, shape.length)
    begins = agreement + (1.0 - agreement) * min(1.0, rescue * (shape.width - 1))
    return 1.0 + begins * expected_tokens(agreement, shape.length - 1)


def best_shape(
    agreement: float,
    rescue: float,
    num_running: int,
    most: Shape,
    most_tokens: int,
    seconds: Callable[[int, Shape], float],
) -> Shape:
    """The shape, up to `most` and so many tokens, that yields most per second if every running sequence drafted so.

    `seconds(num_running, shape)` is what such a draft and the step that verifies it cost. No shape but a length of 0
    where nothing is gained.
    """
    best, best_rate = Shape(0), GAIN * num_running / seconds(num_running, Shape(0))
    for width in range(1, most.width + 1):
        for length in range(1, min(most.length, most_tokens // width) + 1):
            shape = Shape(length, width)
            rate = num_running * expected_of_tree(agreement, rescue, shape) / seconds(num_running, shape)
            if rate > best_rate:
                best, best_rate = shape, rate
    return best


def rescue_after(rescue: float, num_others: int, is_rescued: bool) -> float:
    """The estimate after the first of several branches went wrong where so many others went on."""
    return rescue + FORGETTING * (is_rescued / num_others - rescue)


def agreement_after(agreement: float, num_right: int, is_wrong: bool) -> float:
    """The estimate after so many right tokens in a row and perhaps a wrong one; the newest count most."""
    agreement = 1.0 - (1.0 - agreement) * (1.0 - FORGETTING) ** num_right
    return agreement * (1.0 - FORGETTING) if is_wrong else agreement

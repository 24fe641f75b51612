"""How far to draft: from how often drafts are right and from what a step costs. Functions of what was measured."""

from collections.abc import Callable

GAIN = 1.05  # a draft must promise at least so much: what it promises is an estimate
FIRST_AGREEMENT = 0.5  # of a sequence that nothing is known of
FORGETTING = 0.2  # how much the newest token counts


def expected_tokens(agreement: float, length: int) -> float:
    """Tokens that a step yields with a draft of so many, each right with that chance if those before it were."""
    if agreement >= 1.0:
        return length + 1.0
    return (1.0 - agreement ** (length + 1)) / (1.0 - agreement)


def best_length(agreement: float, num_running: int, most: int, seconds: Callable[[int, int], float]) -> int:
    """The length, 0 to `most`, that yields most tokens per second if every running sequence drafted as far.

    `seconds(num_running, length)` is what such a draft and the step that verifies it cost.
    """
    best, best_rate = 0, GAIN * num_running / seconds(num_running, 0)
    for length in range(1, most + 1):
        rate = num_running * expected_tokens(agreement, length) / seconds(num_running, length)
        if rate > best_rate:
            best, best_rate = length, rate
    return best


def agreement_after(agreement: float, num_right: int, is_wrong: bool) -> float:
    """The estimate after so many right tokens in a row and perhaps a wrong one; the newest count most."""
    agreement = 1.0 - (1.0 - agreement) * (1.0 - FORGETTING) ** num_right
    return agreement * (1.0 - FORGETTING) if is_wrong else agreement

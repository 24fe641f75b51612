"""Acceptance: which of a draft's tokens stay.

The target chooses its own token at each position of a draft, with that position's own random number, exactly as
it would have without the draft. A drafted token stays where it is that token. So an answer has the same tokens
with and without speculation, greedy or drawn, seeded or not, and nothing about the draft's distribution matters.
"""

from collections.abc import Sequence


def num_accepted(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of a draft's tokens stay; `chosen` has the target's token at each of them, and one more."""
    for index, token_id in enumerate(drafted):
        if chosen[index] != token_id:
            return index
    return len(drafted)

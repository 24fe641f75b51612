"""Shortest job first, with ageing: short answers are not held up by long ones, and nobody starves."""

from quire.scheduler.group import SequenceGroup

AGEING = 16  # tokens by which a request is behind each that came before it


def rank(group: SequenceGroup) -> float:
    """Prompt and longest output together, of all its sequences, plus what makes latecomers wait.

    All age alike, so that an order between two requests never changes: a place in the queue is found once. A request
    of N tokens is overtaken by N / AGEING later ones at most, however short they are.
    """
    request = group.request
    num_outputs = request.max_len - request.num_prompt_tokens
    num_tokens = request.num_prompt_tokens + num_outputs * request.sampling.num_sequences
    return num_tokens + AGEING * group.order

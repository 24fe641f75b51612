"""Schedules: the order in which waiting groups are admitted, and in reverse preempted. One queue for each."""

from collections.abc import Callable

from quire.core.config import SchedulerConfig
from quire.scheduler.fair_queue import FairQueue, adapter_of, tenant_and_adapter_of, tenant_of
from quire.scheduler.queue import SequenceGroup, WaitingQueue, first_come

AGEING = 16  # tokens by which a request is behind each that came before it


def by_priority(group: SequenceGroup) -> float:
    """The request's priority, lower first. Strict: while lower values keep coming, higher ones wait."""
    return group.request.priority


def shortest_first(group: SequenceGroup) -> float:
    """Prompt and longest output of all its sequences together, plus ageing, so that no request starves.

    All age alike, so the order of two requests never changes and a rank is computed once. A request of N tokens is
    overtaken by at most N / AGEING later ones, however short they are.
    """
    request = group.request
    num_outputs = request.max_len - request.num_prompt_tokens
    num_tokens = request.num_prompt_tokens + num_outputs * request.sampling.num_sequences
    return num_tokens + AGEING * group.order


RANKS: dict[str, Callable[[SequenceGroup], float]] = {
    "fcfs": first_come,
    "priority": by_priority,
    "shortest": shortest_first,
}


def make_queue(config: SchedulerConfig, by_adapter: bool = False) -> WaitingQueue:
    """`by_adapter`: requests may have adapters, which share fairly; within one it is first come, first served."""
    if config.schedule == "fair":
        share_of = tenant_and_adapter_of if by_adapter else tenant_of
        return FairQueue(config.max_queue_requests, config.max_queue_tokens, share_of)
    if by_adapter and config.schedule == "fcfs":
        return FairQueue(config.max_queue_requests, config.max_queue_tokens, adapter_of)
    return WaitingQueue(config.max_queue_requests, config.max_queue_tokens, RANKS[config.schedule])

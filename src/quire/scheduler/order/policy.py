"""Which schedules there are, and the queue of each."""

from collections.abc import Callable

from quire.core.config import SchedulerConfig
from quire.scheduler.group import SequenceGroup
from quire.scheduler.order import fcfs, priority, shortest
from quire.scheduler.order.fair import FairQueue, adapter_of, tenant_and_adapter_of, tenant_of
from quire.scheduler.queue import WaitingQueue

RANKS: dict[str, Callable[[SequenceGroup], float]] = {
    "fcfs": fcfs.rank,
    "priority": priority.rank,
    "shortest": shortest.rank,
}


def make_queue(config: SchedulerConfig, by_adapter: bool = False) -> WaitingQueue:
    """`by_adapter`: requests may have adapters, which share fairly; within one it is first come, first served."""
    if config.schedule == "fair":
        share_of = tenant_and_adapter_of if by_adapter else tenant_of
        return FairQueue(config.max_queue_requests, config.max_queue_tokens, share_of)
    if by_adapter and config.schedule == "fcfs":
        return FairQueue(config.max_queue_requests, config.max_queue_tokens, adapter_of)
    return WaitingQueue(config.max_queue_requests, config.max_queue_tokens, RANKS[config.schedule])

"""Which schedules there are, and the queue of each."""

from collections.abc import Callable

from quire.core.config import SchedulerConfig
from quire.scheduler.group import Group
from quire.scheduler.order import fcfs, priority, shortest
from quire.scheduler.order.fair import FairQueue
from quire.scheduler.queue import WaitingQueue

RANKS: dict[str, Callable[[Group], float]] = {
    "fcfs": fcfs.rank,
    "priority": priority.rank,
    "shortest": shortest.rank,
}


def make_queue(config: SchedulerConfig) -> WaitingQueue:
    if config.schedule == "fair":
        return FairQueue(config.max_queue_requests, config.max_queue_tokens)
    return WaitingQueue(config.max_queue_requests, config.max_queue_tokens, RANKS[config.schedule])

"""What a batching policy decides, and which there are."""

from typing import Protocol

from quire.core.clock import Clock
from quire.core.config import SchedulerConfig
from quire.scheduler.batching.continuous import ContinuousBatching
from quire.scheduler.batching.dynamic import DynamicBatching
from quire.scheduler.batching.static import StaticBatching
from quire.scheduler.queue import WaitingQueue


class Batching(Protocol):
    """Asked once per step; told of every group that is admitted."""

    keeps_ended: bool  # who ends keeps row, memory and computation until the last of its batch ends

    def room(self, waiting: WaitingQueue, idle: bool) -> int:
        """How many waiting groups may be admitted now, memory and rows permitting. `idle`: no row is taken."""
        ...

    def admitted(self) -> None:
        """One more group runs."""
        ...

    def close(self) -> None:
        """Whoever is next does not fit beside the others."""
        ...

    def is_open(self, waiting: WaitingQueue) -> bool:
        """Whether someone who waits will still be admitted to the batch that runs."""
        ...

    def starts_at(self, waiting: WaitingQueue) -> float | None:
        """When those who wait for company start without it, by the clock; None where nobody waits for company."""
        ...


def choose_batching(config: SchedulerConfig, clock: Clock) -> Batching:
    max_num_seqs, _ = config.limits
    batch_size = min(config.batch_size or max_num_seqs, max_num_seqs)
    if config.batching == "static":
        return StaticBatching(batch_size)
    if config.batching == "dynamic":
        return DynamicBatching(batch_size, config.batch_window_ms / 1e3, clock)
    return ContinuousBatching()

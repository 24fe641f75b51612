"""Dynamic batching: static batches that wait a little for company, as Triton Inference Server's batcher does."""

from quire.core.clock import Clock
from quire.scheduler.batching.static import StaticBatching
from quire.scheduler.queue import WaitingQueue


class DynamicBatching(StaticBatching):
    """A batch starts when it is full, or when its first request has waited as long as the window."""

    def __init__(self, batch_size: int, window: float, clock: Clock) -> None:
        """`window` in seconds."""
        super().__init__(batch_size)
        self._window = window
        self._clock = clock

    def starts_at(self, waiting: WaitingQueue) -> float | None:
        if not len(waiting) or len(waiting) >= self.batch_size:
            return None
        return min(group.request.arrival for group in waiting) + self._window

    def _num_starting(self, waiting: WaitingQueue) -> int:
        moment = self.starts_at(waiting)
        if moment is not None and self._clock() < moment:
            return 0
        return super()._num_starting(waiting)

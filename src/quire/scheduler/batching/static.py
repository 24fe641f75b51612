"""Static, or request-level, batching: a batch starts and ends together, as before Orca."""

from quire.scheduler.queue import WaitingQueue


class StaticBatching:
    """When nothing runs, up to `batch_size` of those who wait start together, and nobody joins them.

    A batch that is not full starts all the same: an idle engine gains nothing by waiting for requests that may never
    come. So offline, where all requests wait from the start, every batch but the last is full, and on a server a
    request waits for the batch before it at most. Who wants full batches takes dynamic batching with a long window.

    Prompts of a batch are computed together, in as many steps as max_num_batched_tokens makes of them. A batch takes
    fewer requests where rows or memory do not last; whoever is preempted returns in a later batch.
    """

    keeps_ended = True

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._left = 0  # groups of the batch that are still to be admitted

    def room(self, waiting: WaitingQueue, idle: bool) -> int:
        if idle:
            self._left = self._num_starting(waiting)
        return self._left

    def admitted(self) -> None:
        self._left -= 1

    def close(self) -> None:
        self._left = 0

    def is_open(self, waiting: WaitingQueue) -> bool:
        return self._left > 0 and len(waiting) > 0

    def starts_at(self, waiting: WaitingQueue) -> float | None:
        return None

    def _num_starting(self, waiting: WaitingQueue) -> int:
        return min(self.batch_size, len(waiting))

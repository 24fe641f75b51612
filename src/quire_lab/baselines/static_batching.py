"""Static and dynamic batching: the baselines of continuous batching. A batch starts and ends together."""

import time
from collections.abc import Sequence as Listed

from quire.core.request import Clock, Sequence
from quire.scheduler.plan import StepPlan
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.running import AdmissionPolicy
from quire_lab.simulate.clock import VirtualClock

MAX_WAIT = 0.001  # seconds that an idle engine waits for a batch at a time


class StaticBatching(AdmissionPolicy):
    """Request-level batching, as before Orca: when nothing runs, up to `batch_size` waiting groups start together.

    A batch that is not full starts at once: an idle engine gains nothing by waiting for requests that may never come.
    So offline, where all requests wait from the start, every batch but the last is full, and on a server a request
    waits for at most one batch. Dynamic batching with a long window gives full batches.

    Prompts of a batch are prefilled together, in as many steps as max_num_batched_tokens makes of them. A batch has
    fewer requests if rows or memory run out; a preempted group returns in a later batch.

    Finished sequences hold row and memory until the batch is over, and are computed as long as others are: each
    computes its last position again, with the same weights, attention and memory as a decode, and what is sampled is
    discarded. (Systems that pad let such rows grow instead, which costs a little more: this baseline is no worse than
    real static batching.)
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.kept: list[Sequence] = []
        self.num_wasted_tokens = 0  # computed for finished sequences
        self._num_to_admit = 0  # groups of the current batch

    def room(self, waiting: WaitingQueue, running: Listed[Sequence]) -> int:
        if not running and not self.kept:
            self._num_to_admit = self._num_starting(waiting)
        return self._num_to_admit

    def admitted(self, num_groups: int, is_full: bool) -> None:
        self._num_to_admit = 0 if is_full else self._num_to_admit - num_groups

    def keep(self, sequence: Sequence) -> bool:
        self.kept.append(sequence)
        return True

    def release(
        self, waiting: WaitingQueue, running: Listed[Sequence], request_id: str | None = None
    ) -> list[Sequence]:
        """Of the request; without one, all of the batch if no group of it runs or is to be admitted."""
        if request_id is not None:
            released = [s for s in self.kept if s.request.request_id == request_id]
            self.kept = [s for s in self.kept if s.request.request_id != request_id]
            return released
        if running or (self._num_to_admit > 0 and len(waiting)):
            return []
        released, self.kept = self.kept, []
        return released

    def extend(self, plan: StepPlan, num_tokens: int) -> None:
        for sequence in self.kept[: max(0, num_tokens)]:
            # candidates of a finished beam would be compared with those of other beams
            plan.recompute_last(sequence, samples=not sequence.is_beam)
            self.num_wasted_tokens += 1

    def _num_starting(self, waiting: WaitingQueue) -> int:
        return min(self.batch_size, len(waiting))


class DynamicBatching(StaticBatching):
    """A batch starts when it is full, or `window` seconds after its first request arrived (as in Triton Inference
    Server's dynamic batcher).
    """

    def __init__(self, batch_size: int, window: float, clock: Clock) -> None:
        super().__init__(batch_size)
        self._window = window
        self._clock = clock

    def deadline(self, waiting: WaitingQueue) -> float | None:
        """When an incomplete batch starts; None if the next batch is full or empty."""
        if not len(waiting) or len(waiting) >= self.batch_size:
            return None
        return min(group.request.arrival for group in waiting) + self._window

    def wait(self, waiting: WaitingQueue) -> None:
        deadline = self.deadline(waiting)
        if deadline is None:
            return
        now = self._clock()
        if isinstance(self._clock, VirtualClock):
            self._clock.advance_to(min(deadline, now + MAX_WAIT))
        else:
            time.sleep(min(MAX_WAIT, max(0.0, deadline - now)))

    def _num_starting(self, waiting: WaitingQueue) -> int:
        deadline = self.deadline(waiting)
        if deadline is not None and self._clock() < deadline:
            return 0
        return super()._num_starting(waiting)

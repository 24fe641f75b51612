"""WaitingQueue: bounded, in the schedule's order; preempted groups come back at their old place."""

import heapq
from collections.abc import Callable, Iterable, Iterator

from quire.core.queue_bounds import QueueBounds
from quire.core.request import Sequence
from quire.scheduler.group import SequenceGroup
from quire.scheduler.order import fcfs


class WaitingQueue:
    """In the schedule's order, those who ran before first: no one new is admitted before they run again."""

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        rank: Callable[[SequenceGroup], float] = fcfs.rank,
    ) -> None:
        self._heap: list[tuple[bool, tuple[float, int], SequenceGroup]] = []  # whether it never ran, its rank
        self._rank = rank
        self._removed: set[int] = set()  # arrival numbers that left the queue out of turn
        self._bounds = QueueBounds(max_requests, max_tokens)
        self.num_tokens = 0

    def add(self, group: SequenceGroup) -> None:
        """Takes a new group or raises QueueFull."""
        tokens = group.request.num_prompt_tokens
        self._bounds.check_requests(len(self), 1)
        self._bounds.check_tokens(self.num_tokens, tokens)
        group.rank = (self._rank(group), group.order)
        self._push(group)

    def charge(self, receivers: Iterable[Sequence]) -> None:
        """Each of these is given a token by the step that is planned now: for schedules that count what was served."""

    def put_back(self, group: SequenceGroup) -> None:
        """A preempted group returns; the bound does not apply to those who were in."""
        group.returns = True
        self._push(group)

    def lay_aside(self) -> SequenceGroup:
        """The first group leaves the line for a moment: those behind it may be looked at."""
        return self.pop()

    def take_up(self, group: SequenceGroup) -> None:
        """One that was laid aside stands where it stood."""
        self._push(group)

    def peek(self) -> SequenceGroup | None:
        while self._heap and self._heap[0][2].order in self._removed:
            self._removed.discard(heapq.heappop(self._heap)[2].order)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> SequenceGroup:
        group = self.peek()
        if group is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        group.queued = False
        self.num_tokens -= group.request.num_prompt_tokens
        return group

    def remove(self, group: SequenceGroup) -> None:
        """An aborted group leaves; its place in the heap is dropped when it comes up."""
        self._removed.add(group.order)
        group.queued = False
        self.num_tokens -= group.request.num_prompt_tokens

    def _push(self, group: SequenceGroup) -> None:
        heapq.heappush(self._heap, (not group.returns, group.rank, group))
        group.queued = True
        self.num_tokens += group.request.num_prompt_tokens

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (group for _, _, group in self._heap if group.order not in self._removed)

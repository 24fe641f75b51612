"""WaitingQueue: bounded, in the schedule's order; preempted groups return to their old position."""

import heapq
from collections.abc import Callable, Iterator

from quire.core.request import QueueBounds
from quire.scheduler.group import SequenceGroup


def first_come(group: SequenceGroup) -> float:
    """First come, first served: equal for all, the arrival number decides."""
    return 0.0


class WaitingQueue:
    """In the schedule's order, preempted groups first: no new group is admitted before they run again."""

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        rank: Callable[[SequenceGroup], float] = first_come,
    ) -> None:
        self._heap: list[tuple[bool, tuple[float, int], SequenceGroup]] = []  # (never ran, rank, group)
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

    def put_back(self, group: SequenceGroup) -> None:
        """Takes a preempted group; the bound does not apply to it."""
        group.returns = True
        self._push(group)

    def skip(self) -> SequenceGroup:
        """Takes the first group out for now, to look at those behind it. `unskip` puts it back."""
        return self.pop()

    def unskip(self, group: SequenceGroup) -> None:
        """Puts a skipped group back to its position."""
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
        """Removes an aborted group; its heap entry is dropped when it comes up."""
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

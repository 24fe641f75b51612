"""WaitingQueue: bounded, first come, first served; preempted groups come back at their old place."""

import heapq
from collections.abc import Iterator

from quire.core.errors import QueueFull
from quire.scheduler.group import Group


class WaitingQueue:
    """Ordered by arrival number, those who ran before first: no one new is admitted before they run again."""

    def __init__(self, max_requests: int, max_tokens: int | None) -> None:
        self._heap: list[tuple[bool, int, Group]] = []  # whether it never ran, its arrival number
        self._removed: set[int] = set()  # arrival numbers that left the queue out of turn
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.num_tokens = 0

    def add(self, group: Group) -> None:
        """Takes a new group or raises QueueFull."""
        tokens = group.request.num_prompt_tokens
        if len(self) >= self._max_requests:
            raise QueueFull(
                f"{len(self)} requests are waiting already: try again later, or raise max_queue_requests"
            )
        if self._max_tokens is not None and self and self.num_tokens + tokens > self._max_tokens:
            raise QueueFull(
                f"{self.num_tokens} prompt tokens are waiting and {tokens} more would pass "
                f"{self._max_tokens}: try again later, or raise max_queue_tokens"
            )
        self._push(group)

    def put_back(self, group: Group) -> None:
        """A preempted group returns; the bound does not apply to those who were in."""
        group.returns = True
        self._push(group)

    def peek(self) -> Group | None:
        while self._heap and self._heap[0][1] in self._removed:
            self._removed.discard(heapq.heappop(self._heap)[1])
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Group:
        group = self.peek()
        if group is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        group.queued = False
        self.num_tokens -= group.request.num_prompt_tokens
        return group

    def remove(self, group: Group) -> None:
        """An aborted group leaves; its place in the heap is dropped when it comes up."""
        self._removed.add(group.order)
        group.queued = False
        self.num_tokens -= group.request.num_prompt_tokens

    def _push(self, group: Group) -> None:
        heapq.heappush(self._heap, (not group.returns, group.order, group))
        group.queued = True
        self.num_tokens += group.request.num_prompt_tokens

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    def __iter__(self) -> Iterator[Group]:
        return (group for _, order, group in self._heap if order not in self._removed)

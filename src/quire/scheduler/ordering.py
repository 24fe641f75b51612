"""Orders in which waiting groups are admitted, and in reverse preempted: by rank, or with fair shares."""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from quire.core.config import SchedulerConfig
from quire.core.request import Request, Sequence
from quire.scheduler.queue import SequenceGroup, WaitingQueue, first_come

AGEING = 16  # tokens by which a request is behind each that came before it
PROMPT_WEIGHT = 1.0  # cost of a token in its share's counter
OUTPUT_WEIGHT = 2.0
MAX_SHARES = 4096  # counters, beyond which the lowest idle ones are dropped


def tenant_of(request: Request) -> str:
    return request.tenant


def adapter_of(request: Request) -> str:
    return request.adapter or ""


def tenant_and_adapter_of(request: Request) -> str:
    return f"{request.tenant}\0{request.adapter or ''}"


@dataclass(slots=True)
class _Share:
    served: float = 0.0  # weighted tokens
    waiting: list[tuple[int, SequenceGroup]] = field(default_factory=list)  # a heap, first come, first served
    listed: bool = False  # whether the heap of shares has an entry of it


class FairQueue(WaitingQueue):
    """Fair shares among tenants and adapters: the virtual token counter of Sheng et al., OSDI 2024.

    Among shares with waiting requests the one that was served fewest tokens is next; within a share, the oldest.

    Tokens are counted as they are served: a prompt's when it is admitted, outputs when they are committed. A
    share that returns after a pause starts at the counter of the least served waiting share, so a pause saves nothing
    up. While two shares both have requests waiting, the tokens they are served differ by a bounded number, and none
    starves.

    A group's rank, which decides the order of preemption, is the counter of its share when it was admitted. Preempted
    groups come first.
    """

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        share_of: Callable[[Request], str] = tenant_of,
    ) -> None:
        super().__init__(max_requests, max_tokens)
        self._share_of = share_of
        self._shares: dict[str, _Share] = {}
        # a heap: (counter when it was pushed, arrival of its oldest, name); a skipped group keeps its entry
        self._heads: list[tuple[float, int, str]] = []
        self._returned: list[tuple[tuple[float, int], SequenceGroup]] = []  # a heap, by rank
        self._last = _Share()  # of the last admitted request
        self._num_waiting = 0

    def charge(self, sequence: Sequence) -> None:
        """Counts one output token."""
        self._share(sequence.request).served += OUTPUT_WEIGHT

    def served(self, name: str) -> float:
        """Weighted tokens that a share was served."""
        share = self._shares.get(name)
        return 0.0 if share is None else share.served

    def put_back(self, group: SequenceGroup) -> None:
        group.returns = True
        heapq.heappush(self._returned, (group.rank, group))
        self._enter(group)

    def skip(self) -> SequenceGroup:
        """Takes the first group out for now; nothing is charged."""
        group = self.peek()
        if group is None:
            raise IndexError("skip in an empty queue")
        if self._returned:
            heapq.heappop(self._returned)
        else:
            heapq.heappop(self._share(group.request).waiting)
        self._leave(group)
        return group

    def unskip(self, group: SequenceGroup) -> None:
        if group.returns:
            heapq.heappush(self._returned, (group.rank, group))
        else:
            share = self._share(group.request)
            heapq.heappush(share.waiting, (group.order, group))
            if not share.listed:  # it keeps its counter: it never stopped waiting
                share.listed = True
                heapq.heappush(self._heads, (share.served, group.order, self._share_of(group.request)))
        self._enter(group)

    def peek(self) -> SequenceGroup | None:
        while self._returned and not self._returned[0][1].queued:
            heapq.heappop(self._returned)
        if self._returned:
            return self._returned[0][1]
        while self._heads:
            served, _, name = self._heads[0]
            share = self._shares[name]
            while share.waiting and not share.waiting[0][1].queued:
                heapq.heappop(share.waiting)
            if not share.waiting:
                share.listed = False
                heapq.heappop(self._heads)
            elif served < share.served:  # it was served since it was pushed
                heapq.heapreplace(self._heads, (share.served, share.waiting[0][0], name))
            else:
                return share.waiting[0][1]
        return None

    def pop(self) -> SequenceGroup:
        group = self.peek()
        if group is None:
            raise IndexError("pop from an empty queue")
        if self._returned:
            heapq.heappop(self._returned)
        else:
            share = self._share(group.request)
            heapq.heappop(share.waiting)
            group.rank = (share.served, group.order)
            self._last = share
            share.served += PROMPT_WEIGHT * group.request.num_prompt_tokens
        self._leave(group)
        return group

    def remove(self, group: SequenceGroup) -> None:
        self._leave(group)

    def _push(self, group: SequenceGroup) -> None:
        share = self._share(group.request)
        if not share.listed:
            share.served = max(share.served, self._least_served())
            share.listed = True
            heapq.heappush(self._heads, (share.served, group.order, self._share_of(group.request)))
        heapq.heappush(share.waiting, (group.order, group))
        self._enter(group)

    def _enter(self, group: SequenceGroup) -> None:
        group.queued = True
        self._num_waiting += 1
        self.num_tokens += group.request.num_prompt_tokens

    def _leave(self, group: SequenceGroup) -> None:
        group.queued = False
        self._num_waiting -= 1
        self.num_tokens -= group.request.num_prompt_tokens

    def _least_served(self) -> float:
        """The lowest counter of the waiting shares; if none waits, that of the last admitted request."""
        self.peek()
        return self._heads[0][0] if self._heads else self._last.served

    def _share(self, request: Request) -> _Share:
        name = self._share_of(request)
        share = self._shares.get(name)
        if share is None:
            if len(self._shares) >= MAX_SHARES:
                self._drop_idle_shares()
            share = self._shares[name] = _Share()
        return share

    def _drop_idle_shares(self) -> None:
        """Drops the lower half of the idle counters: such shares start at the least served one in any case."""
        idle = sorted((share.served, name) for name, share in self._shares.items() if not share.listed)
        for _, name in idle[: max(1, len(idle) // 2)]:
            del self._shares[name]

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[SequenceGroup]:
        returned = (group for _, group in self._returned)
        others = (group for share in self._shares.values() for _, group in share.waiting)
        return (group for group in itertools.chain(returned, others) if group.queued)


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

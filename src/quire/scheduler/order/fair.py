"""Fair shares among tenants: who was served least is next (the virtual token counter of Sheng et al., OSDI 2024)."""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from quire.core.request import Request, Sequence
from quire.scheduler.group import SequenceGroup
from quire.scheduler.queue import WaitingQueue

PROMPT_WEIGHT = 1.0  # what a token costs in the account of its share
OUTPUT_WEIGHT = 2.0
KEPT_SHARES = 4096  # accounts, beyond which those that say least are closed


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
    listed: bool = False  # whether the line of shares names it


class FairQueue(WaitingQueue):
    """Among shares with waiting requests the one that was served fewest tokens is next; within a share, the oldest.

    Tokens are counted as they are served: a prompt's when it is admitted, outputs step by step. A share that comes
    back after a pause starts where the least served of those who wait stands, so that nobody saves up. While two
    shares both have requests waiting, what they are served differs by a bounded number of tokens, and nobody starves.

    A group's rank, which decides who is preempted, is what its share had been served when it was admitted. Those who
    were preempted come first.
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
        # a heap: (served when it was put there, arrival of its oldest, name); whoever is laid aside keeps its place
        self._line: list[tuple[float, int, str]] = []
        self._returned: list[tuple[tuple[float, int], SequenceGroup]] = []  # a heap, by rank
        self._last = _Share()  # whose request was the last to be admitted
        self._num_waiting = 0

    def charge(self, receivers: Iterable[Sequence]) -> None:
        for sequence in receivers:
            self._share(sequence.request).served += OUTPUT_WEIGHT

    def served(self, name: str) -> float:
        """Weighted tokens in the account of a share."""
        share = self._shares.get(name)
        return 0.0 if share is None else share.served

    def put_back(self, group: SequenceGroup) -> None:
        group.returns = True
        heapq.heappush(self._returned, (group.rank, group))
        self._enter(group)

    def lay_aside(self) -> SequenceGroup:
        """Nothing is served yet, so nothing is charged."""
        group = self.peek()
        if group is None:
            raise IndexError("lay aside from an empty queue")
        if self._returned:
            heapq.heappop(self._returned)
        else:
            heapq.heappop(self._share(group.request).waiting)
        self._leave(group)
        return group

    def take_up(self, group: SequenceGroup) -> None:
        if group.returns:
            heapq.heappush(self._returned, (group.rank, group))
        else:
            share = self._share(group.request)
            heapq.heappush(share.waiting, (group.order, group))
            if not share.listed:  # it keeps its account: it never stopped waiting
                share.listed = True
                heapq.heappush(self._line, (share.served, group.order, self._share_of(group.request)))
        self._enter(group)

    def peek(self) -> SequenceGroup | None:
        while self._returned and not self._returned[0][1].queued:
            heapq.heappop(self._returned)
        if self._returned:
            return self._returned[0][1]
        while self._line:
            served, _, name = self._line[0]
            share = self._shares[name]
            while share.waiting and not share.waiting[0][1].queued:
                heapq.heappop(share.waiting)
            if not share.waiting:
                share.listed = False
                heapq.heappop(self._line)
            elif served < share.served:  # it was served since it was put there
                heapq.heapreplace(self._line, (share.served, share.waiting[0][0], name))
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
            heapq.heappush(self._line, (share.served, group.order, self._share_of(group.request)))
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
        """Of the shares that wait; where none does, what the last to be admitted has."""
        self.peek()
        return self._line[0][0] if self._line else self._last.served

    def _share(self, request: Request) -> _Share:
        name = self._share_of(request)
        share = self._shares.get(name)
        if share is None:
            if len(self._shares) >= KEPT_SHARES:
                self._close_accounts()
            share = self._shares[name] = _Share()
        return share

    def _close_accounts(self) -> None:
        """Of those who do not wait, the half that was served least: they start with the least served in any case."""
        idle = sorted((one.served, name) for name, one in self._shares.items() if not one.listed)
        for _, name in idle[: max(1, len(idle) // 2)]:
            del self._shares[name]

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[SequenceGroup]:
        returned = (group for _, group in self._returned)
        others = (group for share in self._shares.values() for _, group in share.waiting)
        return (group for group in itertools.chain(returned, others) if group.queued)

"""SequenceGroup: a request and its sequences, scheduled together. WaitingQueue: groups in the schedule's order."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from quire.core.request import Phase, QueueBounds, Request, Sequence, ints
from quire.memory.paged import PagedMemory


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """`sequences` starts with one; the others are forked from it when its prompt is computed.

    After a preemption the same happens again: the first living sequence leads, and its followers share the
    prompt's full blocks once it has computed them. So a group never needs more blocks than it did before.
    """

    request: Request
    order: int  # arrival number
    # position in the schedule, set by the queue: lower ranks are served first
    rank: tuple[float, int] = (0.0, 0)
    sequences: list[Sequence] = field(default_factory=list)
    queued: bool = False  # whether the waiting queue holds it
    returns: bool = False  # it ran before and was preempted: it is served before groups that never ran

    def __post_init__(self) -> None:
        self.sequences.append(Sequence(self.request, index=0, token_ids=ints(self.request.prompt_token_ids)))

    @property
    def num_unforked(self) -> int:
        if self.is_beams:
            return 0  # beams branch when results are committed
        return self.request.sampling.num_sequences - len(self.sequences)

    @property
    def is_beams(self) -> bool:
        return self.request.sampling.use_beam_search

    @property
    def live(self) -> list[Sequence]:
        return [s for s in self.sequences if s.phase is not Phase.FINISHED]

    @property
    def running(self) -> list[Sequence]:
        return [s for s in self.sequences if s.phase is Phase.RUNNING]

    @property
    def finished(self) -> bool:
        return self.num_unforked == 0 and not self.live

    @property
    def is_swapped(self) -> bool:
        """Whether host memory holds its blocks."""
        return any(s.host_block_ids for s in self.live)

    @property
    def followers(self) -> list[Sequence]:
        """Living sequences that wait for their leader to compute the prompt again."""
        return [s for s in self.live[1:] if s.phase is Phase.WAITING]

    @property
    def num_rows(self) -> int:
        """Rows that the group needs to run."""
        if self.is_beams:
            return self.request.sampling.num_sequences
        return len(self.live) + self.num_unforked

    @property
    def num_rows_to_come(self) -> int:
        """Of these, rows that forks and followers will take once the prompt is computed, or branching beams later."""
        if self.is_beams:
            return self.num_rows - sum(1 for s in self.sequences if s.row >= 0)
        return self.num_unforked + len(self.followers)

    def unfork(self) -> None:
        """Drops sequences that were forked but have no token of their own: they will be forked again."""
        self.sequences[:] = [s for s in self.sequences if s.index == 0 or s.num_outputs or s.num_pending]


def blocks_to_resume(memory: PagedMemory, group: SequenceGroup) -> int:
    """Blocks to take for all known tokens of the group: followers share the prompt's full blocks with their leader."""
    leader, *others = group.live
    shared = memory.blocks_shared(group.request)
    own = sum(memory.blocks_for(len(s.token_ids)) - shared for s in others)
    return memory.blocks_for(len(leader.token_ids), len(leader.block_ids)) + own


def blocks_promised(
    memory: PagedMemory, running: Iterable[Sequence], forking: Iterable[SequenceGroup]
) -> int:
    """Blocks that will still be allocated: by running sequences for known tokens, by groups for their followers."""
    blocks_for = memory.blocks_for
    promised = sum(max(0, blocks_for(s.target, len(s.block_ids))) for s in running)
    for group in forking:
        shared = memory.blocks_shared(group.request)
        promised += sum(blocks_for(len(s.token_ids)) - shared for s in group.followers)
    return promised


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

"""SequenceGroup: a request and its sequences, which are admitted, preempted and finished together."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.core.request import Phase, Request, Sequence, ints
from quire.memory.interface import Memory


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


def blocks_to_resume(memory: Memory, group: SequenceGroup) -> int:
    """Blocks for all known tokens of the group: followers share the prompt's full blocks with their leader."""
    leader, *others = group.live
    shared = group.request.num_prompt_tokens // memory.block_size
    own = sum(memory.blocks_for(len(s.token_ids)) - shared for s in others)
    return memory.blocks_for(len(leader.token_ids)) + own


def blocks_promised(memory: Memory, running: Iterable[Sequence], forking: Iterable[SequenceGroup]) -> int:
    """Blocks that will still be allocated: by running sequences for known tokens, by groups for their followers."""
    blocks_for = memory.blocks_for
    promised = sum(max(0, blocks_for(s.target) - len(s.block_ids)) for s in running)
    for group in forking:
        shared = group.request.num_prompt_tokens // memory.block_size
        promised += sum(blocks_for(len(s.token_ids)) - shared for s in group.followers)
    return promised

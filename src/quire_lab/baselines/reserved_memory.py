"""ReservedMemory: the baseline of paging. A request takes contiguous memory for all it may need, up front."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.core.request import Request, Sequence
from quire.memory.paged import HeldBlocks, PagedMemory, TableDelta
from quire_lab.baselines.contiguous_pool import BlockRun, ContiguousPool

Length = Callable[[Request, int], int]  # (request, max_model_len) → positions of one sequence


def _max_length(request: Request, max_model_len: int) -> int:
    """Orca (Max): the longest that any request may become."""
    return max_model_len


def _pow2_length(request: Request, max_model_len: int) -> int:
    """Orca (Pow2): the output's true length, rounded up to a power of two."""
    output = request.max_len - request.num_prompt_tokens
    return request.num_prompt_tokens + (1 << (output - 1).bit_length()) - 1


def _oracle_length(request: Request, max_model_len: int) -> int:
    """Orca (Oracle): exactly what will be written; a sequence's last token is never computed."""
    return request.max_len - 1


LENGTHS: dict[str, Length] = {"max": _max_length, "pow2": _pow2_length, "oracle": _oracle_length}


@dataclass(slots=True, eq=False)
class _Reserved:
    """A run for each sequence of a request, some of them not forked yet."""

    runs: dict[Sequence, BlockRun] = field(default_factory=dict)
    spare: list[BlockRun] = field(default_factory=list)  # for forks
    # by child: its parent's run, until it has copied it
    lent: dict[Sequence, BlockRun] = field(default_factory=dict)
    # runs of released sequences, which a child may still read
    left: list[BlockRun] = field(default_factory=list)


class ReservedMemory(PagedMemory):
    """The same ids as paging, one position each, given out in contiguous runs, first fit. Nothing is shared.

    `max` reserves max_model_len; `pow2` and `oracle` need the true length of the output, which they take from the
    request: max_len. That is exact if answers are as long as max_tokens says (ignore_eos, as in benchmarks); if an
    answer may end earlier they reserve for the longest it could be.

    A request whose runs do not fit waits; an admitted one has all it will ever need, so no group is preempted. Each of
    `n` samples or beams has a run of its own, and copies the prompt into it.
    """

    def __init__(self, num_blocks: int, reservation: str, max_model_len: int) -> None:
        # no blocks to share, to swap or for adapters
        super().__init__(0, block_size=1, enable_prefix_caching=False)
        self.runs = ContiguousPool(num_blocks)
        self.reservation = reservation
        self._length = LENGTHS[reservation]
        self._longest = min(max_model_len, num_blocks)
        self._reserved: dict[int, _Reserved] = {}  # by the request's id()

    @property
    def num_blocks(self) -> int:
        return self.runs.num_blocks

    @property
    def num_free(self) -> int:
        return self.runs.num_free

    def length(self, request: Request) -> int:
        """Positions that are reserved for each sequence of the request."""
        return max(request.max_len - 1, min(self._longest, self._length(request, self._longest)))

    def blocks_at_most(self, request: Request) -> int:
        return self.length(request) * request.sampling.num_sequences

    def run_of(self, sequence: Sequence) -> BlockRun | None:
        """The run that is reserved for the sequence."""
        reserved = self._reserved.get(id(sequence.request))
        return None if reserved is None else reserved.runs.get(sequence)

    # ------------------------------------------------------------------ admission

    def admit(self, leader: Sequence, num_sequences: int, num_blocks: int = 0, headroom: int = 0) -> bool:
        """Takes a run for the leader and for each sequence that will fork from it, or none."""
        length = self.length(leader.request)
        runs: list[BlockRun] = []
        while len(runs) < num_sequences and (run := self.runs.take(length)) is not None:
            runs.append(run)
        if len(runs) < num_sequences:
            for run in runs:
                self.runs.release(run)
            return False
        self._reserved[id(leader.request)] = _Reserved({leader: runs[0]}, runs[:0:-1])
        leader.block_ids = runs[0].ids()
        return True

    def held_blocks(self, sequences: Iterable[Sequence]) -> HeldBlocks:
        return HeldBlocks(sum(len(s.block_ids) for s in sequences), 0, 0)

    # ------------------------------------------------------------------ running

    def has_room(self, sequence: Sequence) -> bool:
        return sequence not in self._reserved[id(sequence.request)].lent

    def allocate(self, sequence: Sequence, num_positions: int, delta: TableDelta) -> bool:
        """All memory is reserved; a fork's first positions are copied before it writes any."""
        reserved = self._reserved[id(sequence.request)]
        source = reserved.lent.pop(sequence, None)
        if source is not None:
            own, count = reserved.runs[sequence], sequence.num_computed
            delta.copy_sources += range(source.first, source.first + count)
            delta.copy_targets += range(own.first, own.first + count)
            delta.rows += [sequence.row] * own.length
            delta.indices += range(own.length)
            delta.blocks += own.ids()
            sequence.block_ids = own.ids()
            self.stats.copies += count
            self._free_unread(reserved, sequence.is_beam)
        return True

    def fork(self, parent: Sequence, child: Sequence, num_computed: int) -> int:
        """The child reads its parent's positions until its first `allocate`; its own run is reserved already."""
        reserved = self._reserved.get(id(parent.request))
        if reserved is None:  # its group waits, with nothing computed
            return num_computed
        reserved.runs[child] = reserved.spare.pop()
        # a parent that has not copied yet lends the run that it reads itself
        source = reserved.lent.get(parent) or reserved.runs[parent]
        reserved.lent[child] = source
        child.block_ids = source.ids()[:num_computed]
        return num_computed

    # ------------------------------------------------------------------ release

    def release(self, sequence: Sequence) -> None:
        """Frees the sequence's run; that of a beam stays reserved for the beams that replace it."""
        sequence.block_ids = []
        reserved = self._reserved.get(id(sequence.request))
        if reserved is None or sequence not in reserved.runs:
            return
        reserved.left.append(reserved.runs.pop(sequence))
        reserved.lent.pop(sequence, None)
        if reserved.runs:
            self._free_unread(reserved, sequence.is_beam)
            return
        for run in (*reserved.spare, *reserved.left):
            self.runs.release(run)
        del self._reserved[id(sequence.request)]

    def _free_unread(self, reserved: _Reserved, is_beam: bool) -> None:
        read = set(reserved.lent.values())
        for run in [run for run in reserved.left if run not in read]:
            reserved.left.remove(run)
            if is_beam:
                reserved.spare.append(run)
            else:
                self.runs.release(run)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        living = set(sequences)
        runs = [BlockRun(0, 1), *self.runs.gaps()]
        for reserved in self._reserved.values():
            runs += [*reserved.runs.values(), *reserved.spare, *reserved.left]
            for sequence, run in reserved.runs.items():
                if sequence not in living:
                    raise RuntimeError(f"blocks {run.first} to {run.end - 1} have no holder")
                shown = reserved.lent.get(sequence, run).ids()
                if sequence.block_ids != shown[: len(sequence.block_ids)]:
                    raise RuntimeError(f"a block table does not name the run that starts at {run.first}")
        runs.sort(key=lambda run: run.first)
        for before, after in itertools.pairwise(runs):
            if before.end != after.first:
                raise RuntimeError(f"blocks from {before.end} on are held twice or lost")
        if runs[-1].end != self.num_blocks + 1:
            raise RuntimeError(f"blocks from {runs[-1].end} on are lost")
        if sum(gap.length for gap in self.runs.gaps()) != self.num_free:
            raise RuntimeError("the number of free blocks disagrees with the gaps")
        if any(sequence.block_ids and self.run_of(sequence) is None for sequence in living):
            raise RuntimeError("a sequence without a run has a block table")

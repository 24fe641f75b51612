"""MemoryUsage: what the pool's memory is used for at a moment, and a sampler of it over time."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields

from quire.core.request import Phase, Request, Sequence
from quire.memory.paged import PagedMemory
from quire_lab.baselines.reserved_memory import ReservedMemory


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The pool's token positions, each counted once."""

    tokens: int  # hold K and V of sequences that live
    reserved: int  # held, and will be written later
    internal: int  # held, and never written: internal fragmentation
    external: int  # free, in gaps too small for the next waiting request, though their sum is not
    ended: int  # held by sequences that have ended, as in a static batch
    free: int  # the rest

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class MemoryUsageSample:
    moment: float  # seconds
    spending: MemoryUsage


@dataclass(frozen=True, slots=True)
class _Held:
    """A reserved run when it was looked at."""

    sequence: Sequence
    length: int
    written: int


@dataclass(frozen=True, slots=True)
class _Look:
    """Of reserved memory: what will never be written is known only when its sequences have ended."""

    moment: float
    held: tuple[_Held, ...]
    unforked: int
    external: int
    ended: int
    free: int


class MemoryUsageSampler:
    """`sample` after every step, or as often as one likes; `samples` when the requests have ended.

    A paged block's unfilled slots all count as internal fragmentation, whether or not they will be filled; there are
    fewer than block_size of them per sequence, and external fragmentation is 0 since any block serves any sequence.
    """

    def __init__(self, memory: PagedMemory) -> None:
        self._memory = memory
        self._looks: list[MemoryUsageSample | _Look] = []

    def sample(
        self,
        moment: float,
        running: Iterable[Sequence],
        ended: Iterable[Sequence] = (),
        waiting: Request | None = None,
    ) -> None:
        """`running`, `ended`: sequences as the scheduler has them; `waiting`: the first waiting request."""
        memory = self._memory
        if isinstance(memory, ReservedMemory):
            self._looks.append(_look(memory, moment, running, ended, waiting))
        else:
            self._looks.append(MemoryUsageSample(moment, paged_memory_usage(memory, running, ended)))

    def samples(self) -> list[MemoryUsageSample]:
        """What still runs is taken to become as long as it may."""
        return [look if isinstance(look, MemoryUsageSample) else _resolved(look) for look in self._looks]

    def mean_shares(self) -> dict[str, float]:
        """Of the pool, by MemoryUsage's names: weighted with the time to the next sample, where time passed."""
        samples = self.samples()
        if not samples:
            return {}
        moments = [sample.moment for sample in samples]
        weights = [after - before for before, after in itertools.pairwise(moments)] + [0.0]
        if sum(weights) <= 0.0:
            weights = [1.0] * len(samples)
        weighted = list(zip(weights, samples, strict=True))
        return {
            field.name: sum(w * getattr(s.spending, field.name) / s.spending.total for w, s in weighted)
            / sum(weights)
            for field in fields(MemoryUsage)
        }


def paged_memory_usage(
    memory: PagedMemory, running: Iterable[Sequence], ended: Iterable[Sequence] = ()
) -> MemoryUsage:
    size = memory.block_size
    filled: dict[int, int] = {}  # by block: the most that one of its holders has written
    for sequence in running:
        for index, block in enumerate(sequence.block_ids):
            count = min(size, max(0, sequence.num_computed - index * size))
            filled[block] = max(count, filled.get(block, 0))
    kept = {block for sequence in ended for block in sequence.block_ids} - filled.keys()
    tokens = sum(filled.values())
    return MemoryUsage(
        tokens=tokens,
        reserved=0,
        internal=len(filled) * size - tokens,
        external=0,
        ended=len(kept) * size,
        free=(memory.num_blocks - len(filled) - len(kept)) * size,
    )


def external_fragmentation(memory: ReservedMemory, waiting: Request | None) -> int:
    """What is free, where no gap can hold a sequence of the request and all gaps together could."""
    if waiting is None:
        return 0
    wanted = memory.length(waiting)
    in_pieces = all(gap.length < wanted for gap in memory.runs.gaps())
    return memory.num_free if in_pieces and memory.num_free >= wanted else 0


def _look(
    memory: ReservedMemory,
    moment: float,
    running: Iterable[Sequence],
    ended: Iterable[Sequence],
    waiting: Request | None,
) -> _Look:
    held = []
    for sequence in running:
        run = memory.run_of(sequence)
        if run is not None:
            copied = sequence.block_ids[:1] == [run.first]  # a fork has nothing of its own before it has
            held.append(_Held(sequence, run.length, sequence.num_computed if copied else 0))
    kept = sum(run.length for run in map(memory.run_of, ended) if run is not None)
    of_living = sum(run.length for run in held)
    external = external_fragmentation(memory, waiting)
    return _Look(
        moment=moment,
        held=tuple(held),
        unforked=memory.num_blocks - memory.num_free - of_living - kept,
        external=external,
        ended=kept,
        free=memory.num_free - external,
    )


def _resolved(look: _Look) -> MemoryUsageSample:
    tokens = sum(run.written for run in look.held)
    reserved = sum(max(0, _final(run.sequence) - run.written) for run in look.held)
    held = sum(run.length for run in look.held)
    spending = MemoryUsage(
        tokens=tokens,
        reserved=reserved + look.unforked,
        internal=held - tokens - reserved,
        external=look.external,
        ended=look.ended,
        free=look.free,
    )
    return MemoryUsageSample(look.moment, spending)


def _final(sequence: Sequence) -> int:
    """Positions that are written when all is over: a last token is never computed."""
    return len(sequence.token_ids) - 1 if sequence.phase is Phase.FINISHED else sequence.max_computed

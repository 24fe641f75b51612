"""Timeline: who occupied which row at which step, for drawings and tests."""

import time
from collections import Counter
from dataclasses import dataclass

from quire.core.clock import Clock
from quire.core.request import Phase, Sequence
from quire.scheduler.planned import ScheduledStep
from quire.scheduler.scheduler import Scheduler

PROMPT, DECODE, ENDED, HELD = "prompt", "decode", "ended", "held"


@dataclass(frozen=True, slots=True)
class Occupied:
    """A row in one step. `ended`: computes for a sequence that is over. `held`: taken, and does not advance."""

    row: int
    request_id: str
    index: int  # which of the request's samples
    kind: str  # prompt | decode | ended | held
    num_tokens: int  # computed in this step


@dataclass(frozen=True, slots=True)
class TimelineStep:
    step_id: int
    moment: float  # when it was planned, by the clock
    rows: tuple[Occupied, ...]  # by row


class Timeline:
    """Listens to a scheduler from now on, until closed. Steps are noted as they are planned."""

    def __init__(self, scheduler: Scheduler, clock: Clock = time.monotonic) -> None:
        self.steps: list[TimelineStep] = []
        self._scheduler = scheduler
        self._clock = clock
        scheduler.watchers.append(self._note)

    def close(self) -> None:
        self._scheduler.watchers.remove(self._note)

    def admissions(self) -> dict[tuple[str, int], tuple[int, int]]:
        """By (request id, index): the place in `steps` where it first had a row, and that row."""
        found: dict[tuple[str, int], tuple[int, int]] = {}
        for place, step in enumerate(self.steps):
            for one in step.rows:
                found.setdefault((one.request_id, one.index), (place, one.row))
        return found

    def num_tokens(self) -> Counter[str]:
        """Tokens computed, by kind: how much of the work was for somebody."""
        return Counter({kind: self._total(kind) for kind in (PROMPT, DECODE, ENDED)})

    def _total(self, kind: str) -> int:
        return sum(one.num_tokens for step in self.steps for one in step.rows if one.kind == kind)

    def _note(self, planned: ScheduledStep) -> None:
        step = planned.step
        rows: dict[int, Occupied] = {}
        for sequence in (*self._scheduler.running, *self._scheduler.ended.sequences):
            rows[sequence.row] = _occupied(sequence, HELD, 0)
        for sequence, start, count in zip(planned.sequences, step.num_computed, step.num_tokens, strict=True):
            kind = PROMPT if start < sequence.request.num_prompt_tokens else DECODE
            rows[sequence.row] = _occupied(
                sequence, ENDED if sequence.phase is Phase.FINISHED else kind, count
            )
        in_order = tuple(rows[row] for row in sorted(rows))
        self.steps.append(TimelineStep(step.step_id, self._clock(), in_order))


def _occupied(sequence: Sequence, kind: str, num_tokens: int) -> Occupied:
    return Occupied(sequence.row, sequence.request.request_id, sequence.index, kind, num_tokens)

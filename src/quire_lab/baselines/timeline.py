"""Timeline: which sequence occupied which row at which step, for plots and tests."""

from collections import Counter
from dataclasses import dataclass

from quire.core.request import Phase, Sequence
from quire.core.step import Step, StepResult
from quire.engine.engine import Engine, StepRunner
from quire.sampling.records import TokenMask

PROMPT, DECODE, ENDED, HELD = "prompt", "decode", "ended", "held"


@dataclass(frozen=True, slots=True)
class Occupied:
    """A row in one step. `ended`: computes for a finished sequence. `held`: taken, and does not advance."""

    row: int
    request_id: str
    index: int  # which of the request's samples
    kind: str  # prompt | decode | ended | held
    num_tokens: int  # computed in this step


@dataclass(frozen=True, slots=True)
class TimelineStep:
    step_id: int
    moment: float  # when it was launched, by the engine's clock
    rows: tuple[Occupied, ...]  # by row


class Timeline:
    """Stands between an engine and its runner, and records every step that is launched until it is stopped."""

    def __init__(self, engine: Engine, runner: StepRunner) -> None:
        self.steps: list[TimelineStep] = []
        self._engine = engine
        self._runner = runner
        self._is_stopped = False

    @classmethod
    def watch(cls, engine: Engine) -> "Timeline":
        return engine.watch(lambda runner: cls(engine, runner))

    def stop(self) -> None:
        """Records no more steps."""
        self._is_stopped = True

    def launch(self, step: Step) -> None:
        if not self._is_stopped:
            self._record(step)
        self._runner.launch(step)

    def mask(self, mask: TokenMask) -> None:
        self._runner.mask(mask)

    def collect(self) -> StepResult:
        return self._runner.collect()

    def close(self) -> None:
        self._runner.close()

    def admissions(self) -> dict[tuple[str, int], tuple[int, int]]:
        """By (request id, index): the index into `steps` where it first had a row, and that row."""
        first: dict[tuple[str, int], tuple[int, int]] = {}
        for number, step in enumerate(self.steps):
            for occupied in step.rows:
                first.setdefault((occupied.request_id, occupied.index), (number, occupied.row))
        return first

    def num_tokens(self) -> Counter[str]:
        """Tokens computed, by kind."""
        return Counter({kind: self._total(kind) for kind in (PROMPT, DECODE, ENDED)})

    def _total(self, kind: str) -> int:
        return sum(row.num_tokens for step in self.steps for row in step.rows if row.kind == kind)

    def _record(self, step: Step) -> None:
        sequences = {s.row: s for s in self._engine.scheduler.sequences() if s.row >= 0}
        rows = {row: _occupied(sequence, HELD, 0) for row, sequence in sequences.items()}
        for row, start, count in zip(step.rows, step.num_computed, step.num_tokens, strict=True):
            sequence = sequences[row]
            kind = PROMPT if start < sequence.request.num_prompt_tokens else DECODE
            rows[row] = _occupied(sequence, ENDED if sequence.phase is Phase.FINISHED else kind, count)
        in_order = tuple(rows[row] for row in sorted(rows))
        self.steps.append(TimelineStep(step.step_id, self._engine.clock(), in_order))


def _occupied(sequence: Sequence, kind: str, num_tokens: int) -> Occupied:
    return Occupied(sequence.row, sequence.request.request_id, sequence.index, kind, num_tokens)

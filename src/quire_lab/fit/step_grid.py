"""Measures single steps of a real engine over a grid of batches and contexts: what a cost model is fitted to."""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.drive import Bench
from quire.bench.workload import Lengths
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.core.step import Step, StepResult
from quire.engine.engine import StepRunner
from quire.sampling.records import TokenMask
from quire_lab.simulate.cost_model import StepCounts, count_step

Seen = list[tuple[StepCounts, float]]  # one run's steps
SETTLING = 3  # decode steps before the measured ones: the last prompts, the first pass of a size


@dataclass(frozen=True, slots=True)
class StepCell:
    """Sequences of equal context that decode a number of steps together."""

    num_sequences: int
    context: int
    num_decodes: int = 12


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """One decode, or all steps that compute a batch's prompts: with a step in flight only their sum can be believed,
    since a host that is held up by one step's launch sees two of them end at once.
    """

    what: str
    counts: Sequence[StepCounts]
    seconds: float  # of all of them

    def as_dict(self) -> dict[str, Any]:
        return {"what": self.what, "counts": [asdict(one) for one in self.counts], "seconds": self.seconds}


class WatchedRunner:
    """Stands between an engine and its runner and notes what each step was and how long it took."""

    def __init__(self, real: StepRunner) -> None:
        self._real = real
        self._launched: deque[StepCounts] = deque()
        self.seen: list[tuple[StepCounts, float]] = []

    def launch(self, step: Step) -> None:
        self._launched.append(count_step(step))
        self._real.launch(step)

    def mask(self, mask: TokenMask) -> None:
        self._real.mask(mask)

    def collect(self) -> StepResult:
        result = self._real.collect()
        self.seen.append((self._launched.popleft(), result.seconds))
        return result

    def close(self) -> None:
        self._real.close()


def measure_grid(
    bench: Bench,
    cells: Sequence[StepCell],
    repeats: int = 1,
    on_cell: Callable[[StepCell], None] = lambda cell: None,
) -> list[MeasuredSteps]:
    """Of each cell its prompts, and the median decode of the full batch; what does not fit is left out.

    The best of the repeats counts: others were disturbed.
    """
    watched = bench.engine.watch(WatchedRunner)
    bench.serve(bench.requests([Lengths(8, 4)] * 2))  # memory is touched once
    fitting = [cell for cell in cells if _fits(bench, cell)]
    runs: dict[StepCell, list[Seen]] = {cell: [] for cell in fitting}
    for _ in range(repeats):  # the whole grid each time: what disturbs one repeat of a cell spares the others
        for cell in fitting:
            runs[cell].append(_run(bench, watched, cell))
            on_cell(cell)
    return [step for cell in fitting for step in (*_prompts(cell, runs[cell]), *_decodes(cell, runs[cell]))]


def _fits(bench: Bench, cell: StepCell) -> bool:
    report = bench.built.report
    length = cell.context + SETTLING + cell.num_decodes
    return (
        cell.num_sequences <= report.limits.max_num_seqs
        and length <= report.limits.max_model_len
        and cell.num_sequences * length <= report.pool.num_tokens
    )


def _run(bench: Bench, watched: WatchedRunner, cell: StepCell) -> Seen:
    watched.seen.clear()
    requests = bench.requests([Lengths(cell.context, SETTLING + cell.num_decodes)] * cell.num_sequences)
    for index, one in enumerate(requests):
        sampling = SamplingParams(temperature=0.0, max_tokens=one.sampling.max_tokens, ignore_eos=True)
        bench.engine.add(Request(f"cell-{index}", one.prompt_token_ids, sampling))
    while bench.engine.has_work:
        bench.engine.step()
    return list(watched.seen)


def _prompts(cell: StepCell, runs: Sequence[Seen]) -> list[MeasuredSteps]:
    found = []
    for seen in runs:
        steps = [one for one in seen if one[0].num_tokens > one[0].num_rows]
        what = f"{cell.num_sequences} prompts of {cell.context}"
        counts = [counts for counts, _ in steps]
        found.append(MeasuredSteps(what, counts, sum(seconds for _, seconds in steps)))
    return sorted((one for one in found if one.counts), key=lambda one: one.seconds)[:1]


def _decodes(cell: StepCell, runs: Sequence[Seen]) -> list[MeasuredSteps]:
    steps = []
    for seen in runs:
        full = [
            (counts, seconds)
            for counts, seconds in seen
            if counts.num_tokens == counts.num_rows == cell.num_sequences and not counts.num_starts
        ][SETTLING:]
        if full:
            middle = full[len(full) // 2][0]
            what = f"{cell.num_sequences} decodes at {cell.context}"
            steps.append(MeasuredSteps(what, [middle], statistics.median(seconds for _, seconds in full)))
    return sorted(steps, key=lambda step: step.seconds)[:1]

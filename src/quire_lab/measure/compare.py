"""Comparisons that tell noise from effect: paired, interleaved repetitions until the interval of a ratio is tight."""

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire_lab.report.experiment import Setup
from quire_lab.report.interval import LOOK_CONFIDENCE, MIN_PAIRS, Interval, Ratio

LOOK_GROWTH = 1.25  # the next look at the interval comes when there are this many times as many pairs
PLANNED_PAIRS = 10  # the size of one round is chosen such that this many fit the time
MAX_PAIRS = 1000

Key = TypeVar("Key", bound=Hashable)
Run = TypeVar("Run")


@dataclass(frozen=True, slots=True)
class Interleaved(Generic[Key, Run]):
    """Every variant's runs, one of each round; runs of one round form the pairs."""

    runs: Mapping[Key, Sequence[Run]]
    seconds: float  # all rounds
    precision: float

    @property
    def num_rounds(self) -> int:
        return len(next(iter(self.runs.values())))

    def interval(self, key: Key, value: Callable[[Run], float]) -> Interval:
        return Interval.of([value(run) for run in self.runs[key]])

    def ratio(self, over: Key, under: Key, value: Callable[[Run], float], num_comparisons: int = 1) -> Ratio:
        """`num_comparisons`: how many were looked at to choose this one, which widens the interval (Bonferroni)."""
        pairs = zip(self.runs[over], self.runs[under], strict=True)
        ratios = [value(above) / value(below) for above, below in pairs]
        confidence = 1 - (1 - LOOK_CONFIDENCE) / num_comparisons
        return Ratio(Interval.of(ratios, confidence), self.seconds, self.precision)


def interleave(
    setup: Setup,
    variants: Mapping[Key, Callable[[], Run]],
    value: Callable[[Run], float],
    what: str,
    *,
    share: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Interleaved[Key, Run]:
    """Rounds of all variants until every ratio to the first is as tight as `setup.precision`, or the time is up.

    `share` of the experiment's time is for this. The order turns around from round to round (A B, B A), so that a drift
    hits both sides of a pair alike. A round is always whole, and one round is always run.
    """
    seconds, started, elapsed = share * setup.seconds, clock(), 0.0
    runs: dict[Key, list[Run]] = {key: [] for key in variants}
    keys, next_look = list(variants), MIN_PAIRS
    with setup.progress(math.ceil(seconds), "s") as bar:
        for index in range(MAX_PAIRS):
            for key in keys if index % 2 == 0 else reversed(keys):
                bar.note(f"{what}, round {index + 1}: {key}")
                runs[key].append(variants[key]())
                bar(int(clock() - started) - int(elapsed))
                elapsed = clock() - started
            measured = Interleaved(runs, elapsed, setup.precision)
            if elapsed >= seconds:
                break
            if measured.num_rounds >= next_look:
                next_look = math.ceil(LOOK_GROWTH * next_look)
                if _is_tight(measured, keys, value):
                    break
    return measured


def _is_tight(measured: Interleaved[Key, Run], keys: Sequence[Key], value: Callable[[Run], float]) -> bool:
    ratios = (measured.ratio(key, keys[0], value) for key in keys[1:])
    return all(ratio.interval.is_tight(measured.precision) for ratio in ratios)

"""Intervals of medians and of ratios, and what may be said of them.

The interval is the one of the sign test: between two of the sorted values, by rank. It assumes nothing about the noise,
so a disturbance of any size shifts it by one rank at most.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95  # of a whole comparison
CONFIDENCE_WORDS = f"{100 * CONFIDENCE:.0f} %"
MIN_PAIRS = 6  # fewer values have no interval at this confidence
# Looking several times and stopping at the first tight interval costs confidence: each look has more than the whole.
LOOK_CONFIDENCE = 1 - 2 / 2**MIN_PAIRS


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of some values, and where it lies with the confidence; 0 to infinity if there are too few values."""

    num_values: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = LOOK_CONFIDENCE) -> "Interval":
        ordered, cut = sorted(values), _num_cut(len(values), confidence)
        low, high = (ordered[cut], ordered[-1 - cut]) if cut is not None else (0.0, math.inf)
        return cls(len(ordered), statistics.median(ordered), low, high)

    def scaled(self, factor: float) -> "Interval":
        return Interval(self.num_values, factor * self.median, factor * self.low, factor * self.high)

    def ends_or_median(self) -> tuple[float, float]:
        """For drawing: both are the median where the ends are not known."""
        return (self.low, self.high) if self.high < math.inf else (self.median, self.median)

    def is_tight(self, precision: float) -> bool:
        return self.high - self.low <= 2 * precision * self.median

    def is_above(self, limit: float) -> bool | None:
        """None where the interval has the limit inside."""
        return True if self.low >= limit else False if self.high < limit else None

    def is_below(self, limit: float) -> bool | None:
        """None where the interval has the limit inside."""
        return True if self.high <= limit else False if self.low > limit else None

    def text(self, digits: int = 2) -> str:
        """For a cell of a table."""
        if self.high == math.inf:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}–{self.high:,.{digits}f})"

    def record(self) -> dict[str, Any]:
        """For programs; an end that is not known is None."""
        is_known = self.high < math.inf
        return {
            "n": self.num_values,
            "median": self.median,
            "low": self.low if is_known else None,
            "high": self.high if is_known else None,
        }


def all_held(outcomes: Iterable[bool | None]) -> bool | None:
    """False if any is, else None if any is not resolved."""
    known = list(outcomes)
    return False if False in known else None if None in known else True


def _num_cut(count: int, confidence: float) -> int | None:
    """How many of the sorted values to leave out at either end; None if all of them are too few."""
    tail, cut = 0.0, None
    for index in range(count // 2):
        tail += math.comb(count, index) / 2**count
        if 2 * tail > 1 - confidence:
            break
        cut = index
    return cut


@dataclass(frozen=True, slots=True)
class Ratio:
    """One variant over another, as the interval of the pairs' own ratios. Claims a direction only if `resolved`."""

    interval: Interval
    seconds: float  # that all repetitions took
    precision: float = 0.05  # the goal: relative half width of the interval

    @property
    def median(self) -> float:
        return self.interval.median

    @property
    def resolved(self) -> bool:
        """Whether the interval excludes 1."""
        return self.interval.low > 1 or self.interval.high < 1

    @property
    def is_above(self) -> bool:
        return self.interval.low > 1

    @property
    def is_equal(self) -> bool:
        """No effect larger than the precision: the interval has 1 and is this close to it."""
        low, high = self.interval.low, self.interval.high
        return not self.resolved and low * (1 + self.precision) >= 1 and high <= 1 + self.precision

    def claim(self, words: str, *, inverse: bool = False) -> str:
        """What may be said: `words` follow the number, such as "times as fast"."""
        median, low, high = self._ends(inverse)
        pairs = f"{self.interval.num_values} pairs"
        if self.is_equal:
            return f"equal within {100 * self.precision:g} % ({low:.2f} to {high:.2f}, {CONFIDENCE_WORDS}, {pairs})"
        if self.resolved:
            return (
                f"{_number(median)} {words} ({_number(low)} to {_number(high)}, {CONFIDENCE_WORDS}, {pairs})"
            )
        known = f"{_number(low)} to {_number(high)} {words} " if high < math.inf else ""
        return (
            f"not resolved on this machine: {known}after {self.seconds:.0f} s ({pairs}); "
            "run on an idle machine or with a longer --time-limit"
        )

    def short(self, words: str) -> str:
        """For the line above a picture."""
        known = f"{_number(self.interval.low)} to {_number(self.interval.high)}"
        if self.resolved or self.is_equal:
            return f"{_number(self.median)} {words} ({known})"
        why = f"{known} {words}" if self.interval.high < math.inf else "too few pairs"
        return f"not resolved on this machine ({why})"

    def text(self) -> str:
        """For a cell of a table; a question mark where it is not resolved."""
        return self.interval.text() + ("" if self.resolved or self.is_equal else " ?")

    def record(self) -> dict[str, Any]:
        return {
            **self.interval.record(),
            "confidence": CONFIDENCE,
            "resolved": self.resolved,
            "equal_within_precision": self.is_equal,
        }

    def _ends(self, inverse: bool) -> tuple[float, float, float]:
        interval = self.interval
        if not inverse:
            return interval.median, interval.low, interval.high
        low = 1 / interval.high
        return 1 / interval.median, low, 1 / interval.low if interval.low else math.inf


def _number(value: float) -> str:
    """Three digits that count, as people write them."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"

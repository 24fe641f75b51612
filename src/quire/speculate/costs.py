"""StepCosts: the seconds of a step by its number of tokens, measured while serving."""

from bisect import bisect_left
from dataclasses import dataclass

NEWEST = 0.25  # weight of the newest measurement
# Share of a change that is the machine's pace, which applies to sizes that are seldom measured as well.
SHARED = 0.75
OUTLIER = 2.0  # times the usual: slower steps were disturbed, and count as this
LEAST = 1e-6  # seconds, so that rates are numbers
STALE = 512  # steps after which a size without a new measurement is dropped
FIRST_SLOPE = 0.1  # of a step's fixed cost, per token, until two sizes are known


@dataclass(slots=True)
class _Known:
    work: float  # seconds at the pace of 1
    seen: int  # when, in steps
    is_first: bool  # a size's first step is recorded, and slower than later ones


class StepCosts:
    """Costs of steps whose tokens are all sampled: decodes and verified drafts.

    A busy machine slows all sizes, but only plain decodes are measured all the time: with seconds per size alone,
    drafts would look cheap whenever the machine slows down. So a common pace is tracked beside the work of each size.
    """

    def __init__(self) -> None:
        self._pace = 1.0
        self._known: dict[int, _Known] = {}
        self.num_steps = 0
        self._sizes: list[int] | None = None  # sizes with a settled measurement, sorted; None: to be computed

    def note(self, num_tokens: int, seconds: float) -> None:
        self.num_steps += 1
        seconds = max(seconds, LEAST)
        known = self._known.get(num_tokens)
        if known is None:
            self._known[num_tokens] = _Known(seconds / self._pace, self.num_steps, True)
            self._sizes = None
            return
        work = seconds / self._pace
        if known.is_first:
            known.work, known.is_first = min(work, known.work), False
            self._sizes = None
        else:
            change = 1.0 + NEWEST * (min(work / known.work, OUTLIER) - 1.0)
            self._pace *= change**SHARED
            known.work *= change ** (1.0 - SHARED)
        known.seen = self.num_steps

    def seconds(self, num_tokens: int) -> float:
        """Seconds of a step of `num_tokens`: measured, interpolated or extrapolated."""
        sizes = self._fresh_sizes()
        if not sizes:
            return 1.0 + FIRST_SLOPE * num_tokens
        return self._pace * self._work(sizes, num_tokens)

    def _work(self, sizes: list[int], num_tokens: int) -> float:
        """Called for many sizes between two steps: must be fast."""
        index = bisect_left(sizes, num_tokens)
        if index < len(sizes) and sizes[index] == num_tokens:
            return self._known[num_tokens].work
        if index == 0 or index == len(sizes):
            nearest, slope = sizes[min(index, len(sizes) - 1)], self._slope(sizes)
            return self._known[nearest].work * (1.0 + slope * num_tokens) / (1.0 + slope * nearest)
        below, above = sizes[index - 1], sizes[index]
        low, high = self._known[below].work, self._known[above].work
        return low + (high - low) * (num_tokens - below) / (above - below)

    def _fresh_sizes(self) -> list[int]:
        """Recently measured sizes. First measurements count only where there is nothing better."""
        if self._sizes is None or self.num_steps % 64 == 0:
            oldest = self.num_steps - STALE
            self._known = {size: known for size, known in self._known.items() if known.seen >= oldest}
            settled = [size for size, known in self._known.items() if not known.is_first]
            self._sizes = sorted(settled or self._known)
        return self._sizes

    def _slope(self, sizes: list[int]) -> float:
        """Seconds per token over a step's fixed seconds, from the smallest and the largest size."""
        first, last = sizes[0], sizes[-1]
        if first == last:
            return FIRST_SLOPE
        low, high = self._known[first].work, self._known[last].work
        each = max(0.0, high - low) / (last - first)
        fixed = low - each * first
        return each / fixed if fixed > 0.01 * low else 100.0

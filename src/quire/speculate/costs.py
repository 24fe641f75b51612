"""StepCosts: what a step of so many tokens costs, measured while it serves."""

from bisect import bisect_left
from dataclasses import dataclass

NEWEST = 0.25  # how much the newest measurement counts
SHARED = (
    0.75  # of a change: how much of it is the machine's pace, which sizes that are seldom seen have as well
)
OUTLIER = 2.0  # a step that took longer than so many times the usual was disturbed, and counts as that
LEAST = 1e-6  # seconds, so that rates are numbers
STALE = 512  # steps after which a size that was not seen again is forgotten
FIRST_SLOPE = 0.1  # of a step's fixed cost, per token, until two sizes are known


@dataclass(slots=True)
class _Known:
    work: float  # seconds at the pace of 1
    seen: int  # when, in steps
    is_first: bool  # a size's first step is recorded, and slower than those that follow


class StepCosts:
    """Steps whose tokens are all sampled: decodes and verified drafts. Their cost follows the number of tokens.

    A busy machine slows all sizes, but only plain steps are seen all the time: were each size to remember its own
    seconds, drafts would look cheap whenever the machine slows down.
    """

    def __init__(self) -> None:
        self._pace = 1.0
        self._known: dict[int, _Known] = {}
        self.num_steps = 0
        self._sizes: list[int] | None = None  # with a trustworthy measurement, sorted, once asked for

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
        """Of a step of so many tokens: known, between two that are, or drawn on from the nearest."""
        sizes = self._fresh_sizes()
        if not sizes:
            return 1.0 + FIRST_SLOPE * num_tokens
        return self._pace * self._work(sizes, num_tokens)

    def _work(self, sizes: list[int], num_tokens: int) -> float:
        """Asked for many sizes between two steps, while a sequence waits."""
        place = bisect_left(sizes, num_tokens)
        if place < len(sizes) and sizes[place] == num_tokens:
            return self._known[num_tokens].work
        if place == 0 or place == len(sizes):
            nearest, slope = sizes[min(place, len(sizes) - 1)], self._slope(sizes)
            return self._known[nearest].work * (1.0 + slope * num_tokens) / (1.0 + slope * nearest)
        below, above = sizes[place - 1], sizes[place]
        low, high = self._known[below].work, self._known[above].work
        return low + (high - low) * (num_tokens - below) / (above - below)

    def _fresh_sizes(self) -> list[int]:
        """Those that were seen lately. A size's first measurement counts only where there is nothing better."""
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

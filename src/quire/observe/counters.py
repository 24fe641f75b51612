"""Counters, gauges and histograms that lower rooms keep and upper rooms draw.

No globals and no metrics library: whoever builds the engine makes a Registry and hands it down, each room
asks it once for what it counts, and `snapshot()` gives the upper rooms plain dicts. Every method may be called
from any thread; a snapshot never shows one metric half-updated.
"""

from bisect import bisect_left
from collections.abc import Sequence
from threading import Lock
from typing import Any, TypeVar

# Upper bounds in seconds: from one decode step to a long queue.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# Upper bounds of token counts.
TOKENS = tuple(float(2**power) for power in range(18))


class Counter:
    """A number that only grows."""

    kind = "counter"

    def __init__(self) -> None:
        self._lock = Lock()
        self._value: int | float = 0

    def add(self, amount: int | float = 1) -> None:
        if amount < 0:
            raise ValueError(f"a counter cannot go down by {-amount}: use a gauge")
        with self._lock:
            self._value += amount

    @property
    def value(self) -> int | float:
        return self._value

    def snapshot(self) -> dict[str, Any]:
        return {"value": self._value}


class Gauge:
    """A number that goes up and down."""

    kind = "gauge"

    def __init__(self) -> None:
        self._lock = Lock()
        self._value: int | float = 0

    def set(self, value: int | float) -> None:
        self._value = value

    def add(self, amount: int | float = 1) -> None:
        with self._lock:
            self._value += amount

    @property
    def value(self) -> int | float:
        return self._value

    def snapshot(self) -> dict[str, Any]:
        return {"value": self._value}


class Histogram:
    """How often values fell into fixed buckets: (-inf, bound 0], (bound 0, bound 1], …, (last bound, inf)."""

    kind = "histogram"

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        if not self.bounds or list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"bounds {bounds} must be at least one number, each larger than the one before")
        self._lock = Lock()
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        index = bisect_left(self.bounds, value)
        with self._lock:
            self._counts[index] += count
            self._sum += value * count

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def sum(self) -> float:
        return self._sum

    def snapshot(self) -> dict[str, Any]:
        """`counts[i]` belongs to `bounds[i]` alone (not cumulated); the last one lies above every bound."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        return {"bounds": list(self.bounds), "counts": counts, "sum": total, "count": sum(counts)}


Metric = Counter | Gauge | Histogram
_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


class Registry:
    """All metrics of one engine. Asking twice for the same name and labels gives the same object."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._help: dict[str, str] = {}
        self._metrics: dict[str, dict[tuple[tuple[str, str], ...], Metric]] = {}

    def counter(self, name: str, help: str = "", **labels: str) -> Counter:
        return self._find(name, help, labels, Counter())

    def gauge(self, name: str, help: str = "", **labels: str) -> Gauge:
        return self._find(name, help, labels, Gauge())

    def histogram(
        self, name: str, help: str = "", bounds: Sequence[float] = SECONDS, **labels: str
    ) -> Histogram:
        return self._find(name, help, labels, Histogram(bounds))

    def _find(self, name: str, help: str, labels: dict[str, str], fresh: _Metric) -> _Metric:
        """The metric of this name and these labels, `fresh` if there is none yet."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            series = self._metrics.setdefault(name, {})
            known = next(iter(series.values()), fresh)
            if type(known) is not type(fresh):
                raise ValueError(f"{name} is a {known.kind} already, it cannot be a {fresh.kind}: rename one")
            if isinstance(known, Histogram) and isinstance(fresh, Histogram) and known.bounds != fresh.bounds:
                raise ValueError(f"{name} has the bounds {known.bounds} already: use the same everywhere")
            self._help[name] = self._help.get(name) or help
            metric = series.setdefault(key, fresh)
        assert isinstance(metric, type(fresh))
        return metric

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Plain data: name -> {"kind", "help", "series": [{"labels": {…}, and the metric's own snapshot}]}."""
        with self._lock:
            names = {name: dict(series) for name, series in self._metrics.items()}
        return {
            name: {
                "kind": next(iter(series.values())).kind,
                "help": self._help[name],
                "series": [
                    {"labels": dict(labels), **metric.snapshot()} for labels, metric in series.items()
                ],
            }
            for name, series in names.items()
        }

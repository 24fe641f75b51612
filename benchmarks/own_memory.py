"""OwnMemory: how much of a process is its own, noted along a run, and whether that grows."""

import gc
import statistics
from typing import Any

from quire.bench.machine import resident_bytes
from quire.kernels import huge_pages

POINTS = 20  # of a run
NOISE = 1 << 20  # bytes from one quarter to the next, however few requests there are
GROWTH = 1024  # bytes a request that may be chance; a request that is left behind takes several times as much


class OwnMemory:
    """What was freed goes back to the system before each point: memory that waits to be used again is no leak."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, int]] = []  # requests so far, bytes

    @property
    def num_points(self) -> int:
        return len(self._noted)

    @property
    def last_mb(self) -> float:
        return self._noted[-1][1] / 1e6

    def note(self, num_requests: int) -> None:
        gc.collect()
        huge_pages.release_freed()
        self._noted.append((num_requests, resident_bytes().get("anonymous", 0)))

    def grown_per_request(self) -> float:
        """Bytes, from the run's third quarter to its last, by the medians of each: all was met before by then."""
        quarter = len(self._noted) // 4
        early, late = self._noted[-2 * quarter : -quarter], self._noted[-quarter:]
        (first, before), (last, after) = (
            map(statistics.median, zip(*part, strict=True)) for part in (early, late)
        )
        return (after - before) / (last - first)

    @property
    def has_grown(self) -> bool:
        grown = self.grown_per_request()
        return grown > GROWTH and grown * self._noted[-1][0] / 4 > NOISE

    def record(self) -> dict[str, Any]:
        return {
            "own_mb": [[requests, round(size / 1e6, 1)] for requests, size in self._noted],
            "grown_bytes_per_request": self.grown_per_request(),
            "has_grown": self.has_grown,
        }

"""GPU timing: seconds of queued launches, which of several candidates is faster beyond doubt, and a cache of that."""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from quire.kernels.cache_files import write_whole
from quire.kernels.sm_share import capture_stream
from quire.observe.host import cache_folder
from quire.observe.logs import get_logger

logger = get_logger(__name__)

Key = TypeVar("Key", bound=Any)  # a dataclass
Choice = TypeVar("Choice")

MIN_GAIN = 0.02  # of the default's time, on the mean of all cases: less may be luck
MAX_LOSS = 0.01  # on any one of them
REPLAY_SECONDS = 0.04  # of one measurement, about
HEAD_START_CYCLES = 60_000  # of the device for each launch, 30 µs on an H200

Times = Sequence[Sequence[float]]  # [round][case] seconds


def choose(times: Mapping[int, Times]) -> int:
    """Which candidate serves: 0, the default, unless another is faster beyond doubt.

    In every round it must be faster by MIN_GAIN on the geometric mean of the cases, and slower by MAX_LOSS at most
    on each. Of several such, the fastest.
    """
    good = [candidate for candidate in times if candidate and _surely_faster(times[candidate], times[0])]
    return min(good, key=lambda candidate: (overall(times[candidate]), candidate), default=0)


def overall(times: Times) -> float:
    """Geometric mean over rounds and cases."""
    return statistics.geometric_mean([seconds for one in times for seconds in one])


def _surely_faster(times: Times, default: Times) -> bool:
    for seconds, before in zip(times, default, strict=True):
        ratios = [new / old for new, old in zip(seconds, before, strict=True)]
        if max(ratios) > 1 + MAX_LOSS or statistics.geometric_mean(ratios) > 1 - MIN_GAIN:
            return False
    return True


def graph_seconds(run: Callable[[], object], seconds: float = REPLAY_SECONDS) -> float:
    """Median seconds of what `run` launches, replayed as a graph: what a captured decode takes."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capture_stream()):
        run()
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    torch.cuda.synchronize()
    begin = time.perf_counter()
    while len(times) < 7 or (time.perf_counter() - begin < seconds and len(times) < 200):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return statistics.median(times)


def queued_seconds(run: Callable[[], None], num_launches: int) -> float:
    """Seconds of what `run` launches, once. Cheaper than a graph: the device is kept busy until all is queued."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(HEAD_START_CYCLES * num_launches)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


class TunedCache(Generic[Key, Choice]):
    """Measured choices: one small JSON file per key, in `tuned` under the cache folder.

    A file that is not exactly what this version wrote for its key is ignored: a start does not depend on a cache.
    """

    def __init__(
        self, kind: str, version: int, parse: Callable[[Mapping[str, Any]], tuple[Key, Choice]], fallback: str
    ) -> None:
        """`parse` takes a file's record, with what `store` got, and raises if it is damaged.

        `fallback`: what serves without a file, for the log.
        """
        self._kind = kind
        self._version = version
        self._parse = parse
        self._fallback = fallback

    def load(self, key: Key) -> Choice | None:
        """The choice measured for exactly this key, or None. Never raises."""
        path = self.path(key)
        entry = self._read(path)
        if entry is None:
            return None
        if entry[0] != key:
            logger.debug("%s is ignored, %s: it was measured for something else", path, self._fallback)
            return None
        return entry[1]

    def store(self, key: Key, **fields: Any) -> Path:
        """Writes the key's file, atomically, and returns its path."""
        record = {"format": self._version, "key": asdict(key), **fields}
        path = self.path(key)
        write_whole(path, json.dumps(record, indent=1))
        return path

    def entries(self) -> list[tuple[Key, Choice]]:
        """All readable files, of any GPU and version."""
        entries = map(self._read, self._files())
        return [entry for entry in entries if entry is not None]

    def forget(self) -> int:
        """Removes all files; returns their number."""
        files = self._files()
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def path(self, key: Key) -> Path:
        """The file of a key."""
        digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:20]
        return tuned_folder() / f"{self._kind}-{digest}.json"

    def _files(self) -> list[Path]:
        return sorted(tuned_folder().glob(f"{self._kind}-*.json"))

    def _read(self, path: Path) -> tuple[Key, Choice] | None:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != self._version:
                raise ValueError(f"format {record['format']!r}, not {self._version}")
            return self._parse(record)
        except FileNotFoundError:
            return None
        except Exception as fault:  # a file may be damaged in any way
            logger.debug("%s is ignored, %s: %s", path, self._fallback, fault)
            return None


def tuned_folder() -> Path:
    """The folder of measured choices. It may not exist yet."""
    return cache_folder() / "tuned"

"""GPU timing: seconds of queued launches, and which of several candidates is faster beyond doubt."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

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
    with torch.cuda.graph(graph):
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

"""Throughput and latency under each batching policy: offline on this machine, over arrival rates on a simulated GPU."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from quire.bench.arrivals import arrival_times
from quire.bench.drive import Bench
from quire.bench.figure import line_style, plain_log
from quire.bench.lengths import Lengths
from quire_lab.experiments.batching_timeline import POLICIES
from quire_lab.experiments.engines import opened, warm_up
from quire_lab.experiments.experiment import Setup
from quire_lab.experiments.load import serve_at

WORKLOADS = {"uniform": "all answers equally long", "varied": "answers of all lengths"}
MODEL, DEVICE = "llama-8b", "simulated:h200"
SLOTS_HERE = 8
WINDOW_MS = 50.0
MEAN_ANSWER = 128  # tokens on the simulated device


@dataclass(frozen=True, slots=True)
class Point:
    workload: str
    policy: str
    rate: float  # requests a second that arrive; inf: all at once
    tokens_per_second: float
    normalised_latency: float  # seconds per token
    mean_latency: float


def lengths_of(workload: str, count: int, prompt: int, answer: int, seed: int) -> list[Lengths]:
    """Varied answers are log-uniform from an eighth to over twice the mean, and have the same mean."""
    if workload == "uniform":
        return [Lengths(prompt, answer)] * count
    source = random.Random(seed)
    drawn = [answer * 2 ** source.uniform(-3, 1.7) for _ in range(count)]
    scale = answer * count / sum(drawn)
    return [Lengths(prompt, max(1, round(one * scale))) for one in drawn]


def simulated_points(
    setup: Setup, rates: Sequence[float], count: int, slots: int, bar: Callable[[], None]
) -> list[Point]:
    """The real scheduler and memory over a cost model of the GPU; the clock is virtual."""
    plain = {name: value for name, value in setup.engine.items() if name not in _OWN}
    found = []
    for workload in WORKLOADS:
        lengths = lengths_of(workload, count, MEAN_ANSWER, MEAN_ANSWER, setup.seed)
        for policy in POLICIES:
            for rate in rates:
                settings = {"model": MODEL, "device": DEVICE, "max_num_seqs": slots}
                changes = {**_of(policy, slots), **settings, "enable_prefix_caching": False}
                with opened(_with(setup, plain), **changes) as bench:
                    found.append(_point(bench, workload, policy, rate, lengths, setup.seed, bar))
    return found


def points_here(setup: Setup, count: int, answer: int, rounds: int, bar: Callable[[], None]) -> list[Point]:
    """All requests at once on this machine's model; the best of the rounds, in which the policies take turns."""
    best: dict[tuple[str, str], Point] = {}
    with ExitStack() as stack:
        benches = {policy: stack.enter_context(_here(setup, policy)) for policy in POLICIES}
        for bench in benches.values():
            warm_up(bench)
        for _ in range(rounds):
            for workload in WORKLOADS:
                lengths = lengths_of(workload, count, 16, answer, setup.seed)
                for policy, bench in benches.items():
                    found = _point(bench, workload, policy, float("inf"), lengths, setup.seed, bar)
                    known = best.get((workload, policy))
                    if known is None or found.tokens_per_second > known.tokens_per_second:
                        best[workload, policy] = found
    return list(best.values())


def _here(setup: Setup, policy: str) -> AbstractContextManager[Bench]:
    changes = {**_of(policy, SLOTS_HERE), "max_num_seqs": SLOTS_HERE, "enable_prefix_caching": False}
    return opened(setup, **changes)


_OWN = (
    "model",
    "device",
    "load_format",
    "num_blocks",
    "quantization",
    "dtype",
    "max_num_seqs",
    "max_model_len",
)


def _with(setup: Setup, engine: dict[str, Any]) -> Setup:
    return Setup(
        setup.size, setup.seed, engine, setup.data, setup.progress, setup.price_per_hour, setup.currency
    )


def _of(policy: str, slots: int) -> dict[str, Any]:
    return {"batching": policy, "batch_size": slots, "batch_window_ms": WINDOW_MS}


def _point(
    bench: Bench,
    workload: str,
    policy: str,
    rate: float,
    lengths: list[Lengths],
    seed: int,
    bar: Callable[[], None],
) -> Point:
    times = arrival_times(len(lengths), rate, 1.0, random.Random(seed))
    loaded = serve_at(bench.engine, bench.requests(lengths), times, bar)
    return Point(
        workload, policy, rate, loaded.tokens_per_second, loaded.normalised_latency, loaded.mean_latency
    )


def draw_load(figure: Any, points: list[Point]) -> None:
    axes = figure.subplots(2, 2, sharex=True)
    finite = [one for one in points if one.rate != float("inf")]
    for column, (workload, words) in enumerate(WORKLOADS.items()):
        top, bottom = axes[0][column], axes[1][column]
        for policy in POLICIES:
            found = [one for one in finite if (one.workload, one.policy) == (workload, policy)]
            rates = [one.rate for one in found]
            top.plot(rates, [one.tokens_per_second for one in found], label=policy, **line_style(policy))
            bottom.plot(
                rates, [1e3 * one.normalised_latency for one in found], label=policy, **line_style(policy)
            )
        top.set_title(f"{workload}: {words}")
        plain_log(bottom, "x")
        plain_log(bottom, "y")
        bottom.set_xlabel("requests arriving per second")
        bottom.set_xticks(
            sorted({one.rate for one in finite}),
            [f"{rate:g}" for rate in sorted({one.rate for one in finite})],
        )
        bottom.minorticks_off()
    axes[0][0].set_ylabel("output tokens per second")
    axes[1][0].set_ylabel("ms per token, arrival to end")
    for row in axes:
        top_limit = max(axis.get_ylim()[1] for axis in row)
        low = min(axis.get_ylim()[0] for axis in row)
        for axis in row:
            axis.set_ylim(0 if row is axes[0] else low, top_limit)
    axes[0][0].legend(loc="upper left")

"""`trace`: an hour of real conversations replayed faster and faster, and the service level that is held."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from quire.bench.workload import Lengths, LogNormal, arrival_times, read_trace, replayed
from quire_lab.measure.replay import Arrival, Replay, ReplayedRequest
from quire_lab.measure.simulated_runs import basis, build_simulated, side_by_side, simulated_settings
from quire_lab.report.data import DataFolder
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import GREY, Picture, line_style, plain_log

BASE: dict[str, Any] = {
    "model": "llama-8b",
    "device": "simulated:h200",
    "enable_prefix_caching": False,  # the trace names no text that could be found again
}
SPEEDS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
FIRST_TOKEN, PER_TOKEN = 1.0, 0.05  # seconds: the targets
WANTED = 0.95  # of all requests, within both
# what the Azure 2023 conversation trace has on the average, where the trace itself is missing
STAND_IN = (LogNormal(1155, 1.2, 2, 6000), LogNormal(211, 0.9, 2, 1000))
STAND_IN_RATE = 5.5  # requests per second


@dataclass(frozen=True, slots=True)
class Trace:
    arrivals: Sequence[Arrival]
    source: str  # in words
    is_real: bool


@dataclass(frozen=True, slots=True)
class TraceJob:
    settings: Mapping[str, Any]
    arrivals: Sequence[Arrival]
    speed: float


@dataclass(frozen=True, slots=True)
class Level:
    """What was held at one speed; times in seconds."""

    speed: float
    rate: float  # requests per second that came
    first_median: float
    first_p99: float
    per_token_median: float
    per_token_p99: float
    first_held: float  # shares of all requests
    per_token_held: float
    held: float  # within both targets
    output_rate: float
    num_preemptions: int
    num_refused: int


def run(setup: Setup) -> Finding:
    settings = simulated_settings(setup, BASE)
    trace = load_trace(setup.data, setup.pick(200, 2000, 20000), setup.seed)
    speeds = setup.pick(SPEEDS[1::3], SPEEDS, SPEEDS)
    jobs = [TraceJob(settings, trace.arrivals, speed) for speed in speeds]
    with setup.progress(len(jobs), "speeds") as bar:
        levels = side_by_side(setup, hold, jobs, bar)
    return _finding(setup, settings, trace, levels)


def load_trace(data: DataFolder, count: int, seed: int) -> Trace:
    path = data.path("azure")
    if path is None:
        chance = random.Random(f"trace {seed}")
        times = arrival_times(count, STAND_IN_RATE, 1.0, chance)
        prompt, output = STAND_IN
        arrivals = [Arrival(at, Lengths(prompt.draw(chance), output.draw(chance))) for at in times]
        words = (
            f"a stand-in, since there is no trace here: Poisson arrivals, {STAND_IN_RATE:g} requests/s, log-normal "
            f"lengths with means {prompt.mean:g} and {output.mean:g} tokens, those of the Azure conversation trace"
        )
        return Trace(arrivals, words, False)
    rows = read_trace(path)[:count]
    times = replayed([row.at or 0.0 for row in rows], 1.0)
    arrivals = [Arrival(at, row.lengths) for at, row in zip(times, rows, strict=True)]
    words = (
        f"the first {len(rows):,} requests ({times[-1] / 60:.0f} minutes) of Azure's conversation trace of 2023, "
        "CC-BY-4.0, Microsoft Azure"
    )
    return Trace(arrivals, words, True)


def hold(job: TraceJob) -> Level:
    arrivals = [Arrival(arrival.at / job.speed, arrival.lengths) for arrival in job.arrivals]
    replay = Replay(build_simulated(job.settings), arrivals).run()
    total = max(1, len(replay.served) + replay.num_refused)

    def share(good: Sequence[ReplayedRequest]) -> float:
        return len(good) / total

    in_time = [request for request in replay.served if request.time_to_first <= FIRST_TOKEN]
    fluent = [request for request in replay.served if request.per_token <= PER_TOKEN]
    return Level(
        speed=job.speed,
        rate=len(arrivals) / max(arrivals[-1].at, 1e-9),
        first_median=replay.percentile(lambda request: request.time_to_first, 50),
        first_p99=replay.percentile(lambda request: request.time_to_first, 99),
        per_token_median=replay.percentile(lambda request: request.per_token, 50),
        per_token_p99=replay.percentile(lambda request: request.per_token, 99),
        first_held=share(in_time),
        per_token_held=share(fluent),
        held=share([request for request in in_time if request.per_token <= PER_TOKEN]),
        output_rate=replay.output_rate,
        num_preemptions=replay.num_preemptions,
        num_refused=replay.num_refused,
    )


def _finding(setup: Setup, settings: Mapping[str, Any], trace: Trace, levels: list[Level]) -> Finding:
    good = [level for level in levels if level.held >= WANTED]
    best = max(good, key=lambda level: level.speed, default=None)
    name = str(settings["model"])
    what = f"a first token within {FIRST_TOKEN:g} s and {1e3 * PER_TOKEN:g} ms per token"
    if best is None:
        take_away = f"{name} holds {what} for {WANTED:.0%} of requests at none of the speeds that were tried."
        short = "The service level is held at no speed that was tried."
    else:
        take_away = (
            f"Up to {best.speed:g} × the trace's speed, {best.rate:.1f} requests per second, {name} holds {what} for "
            f"{best.held:.1%} of all requests."
        )
        short = f"{WANTED:.0%} are served within both targets up to {best.speed:g} × the trace's speed."
    falling = all(after.held <= before.held + 0.02 for before, after in pairwise(levels))
    source = "Azure trace" if trace.is_real else "stand-in for the Azure trace"
    return Finding(
        take_away,
        [_table(levels)],
        [
            Picture(
                "trace",
                f"Service level of {name} under the {source}",
                short,
                lambda figure: _draw(figure, levels),
            )
        ],
        {
            "levels": [asdict(level) for level in levels],
            "targets": {"first_token": FIRST_TOKEN, "per_token": PER_TOKEN, "share": WANTED},
            "is_real_trace": trace.is_real,
        },
        {"seed": setup.seed, "engine": dict(settings), "num_requests": len(trace.arrivals)},
        [
            Check(
                "the faster the trace, the fewer are served in time",
                " ≥ ".join(f"{level.held:.0%}" for level in levels),
                falling,
            )
        ],
        [
            *basis(settings),
            f"requests: {trace.source}",
            f"targets: first token within {FIRST_TOKEN:g} s of arrival, then {1e3 * PER_TOKEN:g} ms per token on the "
            "average; requests longer than the context are refused, and count as not held",
        ],
    )


def _table(levels: list[Level]) -> Table:
    rows = [
        [
            f"{level.speed:g} ×",
            f"{level.rate:.1f}",
            f"{level.first_median:.2f}",
            f"{level.first_p99:.2f}",
            f"{1e3 * level.per_token_median:.1f}",
            f"{1e3 * level.per_token_p99:.1f}",
            f"{level.held:.1%}",
            f"{level.output_rate:,.0f}",
            f"{level.num_preemptions:,}",
            f"{level.num_refused:,}",
        ]
        for level in levels
    ]
    head = [
        *("speed", "requests/s", "first token, s", "p99", "per token, ms", "p99", "held", "tokens/s"),
        *("preempted", "refused"),
    ]
    return Table("The trace at several speeds", head, rows, left=0)


def _draw(figure: Any, levels: list[Level]) -> None:
    left, right = figure.subplots(1, 2)
    speeds = [level.speed for level in levels]
    for index, (words, values) in enumerate(
        (
            ("both targets", [level.held for level in levels]),
            ("first token", [level.first_held for level in levels]),
            ("per token", [level.per_token_held for level in levels]),
        )
    ):
        left.plot(speeds, [100 * value for value in values], label=words, **line_style(index))
    left.axhline(100 * WANTED, color=GREY, linewidth=0.8, linestyle=":")
    left.set(title="served in time", xlabel="speed of the trace, ×", ylabel="% of requests", ylim=(0, 103))
    left.legend(loc="best")
    right.plot(speeds, [level.first_p99 for level in levels], label="first token, p99", **line_style(1))
    right.plot(speeds, [level.first_median for level in levels], label="first token, median", **line_style(0))
    right.axhline(FIRST_TOKEN, color=GREY, linewidth=0.8, linestyle=":")
    right.set(title="time to the first token", xlabel="speed of the trace, ×", ylabel="seconds")
    plain_log(right, "y")
    right.legend(loc="best")


EXPERIMENT = Experiment(
    "trace",
    "A real hour, faster and faster",
    "How much of a real service's traffic can one device take before its users notice?",
    run,
)

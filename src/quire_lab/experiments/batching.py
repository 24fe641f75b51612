"""`batching`: static, dynamic and continuous batches: who occupies which slot when, and what that costs under load."""

import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.bench.drive import Bench
from quire.bench.workload import Lengths, arrival_times
from quire_lab.baselines.timeline import DECODE, ENDED, PROMPT, Occupied, Timeline
from quire_lab.measure.compare import Interleaved, interleave
from quire_lab.measure.engines import in_words, opened, step_seconds, warm_up
from quire_lab.measure.load import serve_at
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import GREY, LOOKS, Picture, line_style, plain_log
from quire_lab.report.interval import CONFIDENCE_WORDS, Ratio

# Who occupies which slot when: one small workload under each batching policy, on the real engine.

POLICIES = ("static", "dynamic", "continuous")
SLOTS = 4
PROMPT_TOKENS = 6
# answers' lengths and arrivals, in steps: three are there at once, the others come one by one
ANSWERS = (8, 15, 5, 10, 12, 6, 9, 7)
ARRIVALS = (0, 0, 0, 2, 5, 7, 9, 11)
WINDOW = 5  # of dynamic batching, in steps
COLORS = tuple("#808080" if one.color == "#000000" else one.color for one in LOOKS)  # an outline must show
_MERGED = 0.3  # gaps below this share of a step are the host's, not idleness


@dataclass(frozen=True, slots=True)
class Moment:
    """One step as it ran: seconds from the first request's arrival, and who was in it."""

    begins: float
    ends: float
    rows: Sequence[Occupied]


@dataclass(frozen=True, slots=True)
class TimelineRun:
    policy: str
    moments: list[Moment]
    seconds: float  # until the last answer was complete
    mean_latency: float
    busy_share: float  # of slots × time: spent on tokens of a request
    ended_share: float  # spent on rows whose answer was over


Timelines = Interleaved[str, TimelineRun]  # by policy


def measure_timelines(setup: Setup, share: float = 1.0) -> Timelines:
    """The same requests under each policy; one step's time is measured first and sets the pace of arrivals."""
    with opened(setup, max_num_seqs=SLOTS, steps_in_flight=0) as pace:
        warm_up(pace)
        step = statistics.median(step_seconds(pace, SLOTS, 16, 12))
    settings = {"batch_size": SLOTS, "max_num_seqs": SLOTS, "batch_window_ms": 1e3 * WINDOW * step}
    with ExitStack() as stack:
        variants = {}
        for policy in POLICIES:
            bench = stack.enter_context(opened(setup, batching=policy, steps_in_flight=0, **settings))
            for _ in range(2):
                bench.serve(bench.requests([Lengths(PROMPT_TOKENS, 4)] * SLOTS))
            variants[policy] = partial(_run, bench, Timeline.watch(bench.engine), policy, step)
        return interleave(setup, variants, _seconds, "time lines", share=share)


def _seconds(run: TimelineRun) -> float:
    return run.seconds


def _busy_share(run: TimelineRun) -> float:
    return 100 * run.busy_share


def _typical(timelines: Timelines) -> list[TimelineRun]:
    """Of each policy the run whose duration is the median one."""
    return [sorted(runs, key=_seconds)[len(runs) // 2] for runs in timelines.runs.values()]


def _run(bench: Bench, timeline: Timeline, policy: str, step: float) -> TimelineRun:
    engine = bench.engine
    requests = bench.requests([Lengths(PROMPT_TOKENS, count) for count in ANSWERS])
    timeline.steps.clear()
    ends: list[float] = []
    started = engine.clock()

    def note() -> None:
        if len(timeline.steps) > len(ends):
            ends.append(engine.clock() - started)

    names = [f"S{index}" for index in range(1, len(ANSWERS) + 1)]
    loaded = serve_at(engine, requests, [step * at for at in ARRIVALS], on_step=note, names=names)
    moments = [
        Moment(moment.moment - started, end, moment.rows)
        for moment, end in zip(timeline.steps, ends, strict=True)
    ]
    total = SLOTS * loaded.seconds
    return TimelineRun(
        policy,
        moments,
        loaded.seconds,
        loaded.mean_latency,
        _held(moments, (PROMPT, DECODE)) / total,
        _held(moments, (ENDED,)) / total,
    )


def _held(moments: list[Moment], kinds: Sequence[str]) -> float:
    return sum((one.ends - one.begins) * sum(row.kind in kinds for row in one.rows) for one in moments)


def draw_figure(figure: Any, drawn: list[TimelineRun]) -> None:
    """A lane per slot, a colour and a name per request; hatched where a slot computes for no request."""
    from matplotlib.patches import Patch

    axes = figure.subplots(len(drawn), 1, sharex=True)
    for axis, run in zip(axes, drawn, strict=True):
        for row in range(SLOTS):
            for name, kind, begins, ends in _spans(run.moments, row):
                number = int(name[1:]) - 1
                color = COLORS[number % len(COLORS)]
                style: dict[str, Any] = {"facecolor": color, "edgecolor": "white"}
                if kind == PROMPT:
                    style = {"facecolor": color, "edgecolor": "black", "linewidth": 1.2}
                if kind == ENDED:
                    style = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0.5}
                axis.broken_barh([(1e3 * begins, 1e3 * (ends - begins))], (row - 0.4, 0.8), **style)
                if kind == DECODE:
                    dark = number % len(COLORS) in (0, 1, 2, 6)
                    axis.text(
                        1e3 * (begins + ends) / 2, row, name, ha="center", va="center", fontsize=8,
                        color="white" if dark else "black",
                    )  # fmt: skip
        axis.axvline(1e3 * run.seconds, color="black", linewidth=1, linestyle=":")
        axis.set_yticks(range(SLOTS), [str(i + 1) for i in range(SLOTS)])
        axis.set_ylim(SLOTS - 0.5, -0.5)
        axis.set_xlim(left=0)
        axis.grid(visible=False)
        axis.set_ylabel("slot")
        axis.set_title(
            f"{run.policy}: done after {1e3 * run.seconds:.0f} ms, {100 * run.busy_share:.0f} % of slot time used, "
            f"mean latency {1e3 * run.mean_latency:.0f} ms",
            loc="left",
            fontsize=9,
        )
    axes[-1].set_xlabel("milliseconds since the first request")
    figure.legend(
        handles=[
            Patch(facecolor="white", edgecolor="black", linewidth=1.2, label="outlined: computes the prompt"),
            Patch(facecolor=LOOKS[0].color, label="filled: generates"),
            Patch(
                facecolor="white",
                edgecolor=GREY,
                hatch="////",
                label="hatched: answer is over, slot still taken",
            ),
        ],
        loc="outside lower center",
        ncols=3,
    )


def _spans(moments: list[Moment], row: int) -> list[tuple[str, str, float, float]]:
    """A slot's steps joined where the same request goes on with the same."""
    spans: list[tuple[str, str, float, float]] = []
    for moment in moments:
        occupied = next((held for held in moment.rows if held.row == row), None)
        if occupied is None:
            continue
        begins = moment.begins
        if spans:
            name, kind, first, last = spans[-1]
            if begins - last < _MERGED * (moment.ends - moment.begins):
                begins = last
                if (name, kind) == (occupied.request_id, occupied.kind):
                    spans[-1] = (name, kind, first, moment.ends)
                    continue
        spans.append((occupied.request_id, occupied.kind, begins, moment.ends))
    return spans


# Throughput and latency under each batching policy: offline on this machine, over arrival rates on a simulated GPU.

WORKLOADS = {"uniform": "all answers equally long", "varied": "answers of all lengths"}
MODEL, DEVICE = "llama-8b", "simulated:h200"
SLOTS_HERE = 8
WINDOW_MS = 50.0
OFFLINE = float("inf")  # the rate of requests that are all there at once
MEAN_ANSWER = 128  # tokens on the simulated device


@dataclass(frozen=True, slots=True)
class LoadPoint:
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
) -> list[LoadPoint]:
    """The real scheduler and memory over a cost model of the GPU; the clock is virtual."""
    plain = {name: value for name, value in setup.engine.items() if name not in _OWN}
    points = []
    for workload in WORKLOADS:
        lengths = lengths_of(workload, count, MEAN_ANSWER, MEAN_ANSWER, setup.seed)
        for policy in POLICIES:
            for rate in rates:
                settings = {"model": MODEL, "device": DEVICE, "max_num_seqs": slots}
                changes = {**_of(policy, slots), **settings, "enable_prefix_caching": False}
                with opened(_with(setup, plain), **changes) as bench:
                    points.append(_point(bench, workload, policy, rate, lengths, setup.seed, bar))
    return points


LoadHere = Interleaved[tuple[str, str], LoadPoint]  # by workload and policy


def load_here(setup: Setup, count: int, answer: int, share: float) -> LoadHere:
    """All requests at once on this machine's model."""
    with ExitStack() as stack:
        benches = {policy: stack.enter_context(_here(setup, policy)) for policy in POLICIES}
        for bench in benches.values():
            warm_up(bench)
        variants = {}
        for workload in WORKLOADS:
            lengths = lengths_of(workload, count, 16, answer, setup.seed)
            for policy, bench in benches.items():
                variants[workload, policy] = partial(
                    _point, bench, workload, policy, OFFLINE, lengths, setup.seed, lambda: None
                )
        return interleave(setup, variants, _tokens_per_second, "all at once, here", share=share)


def _tokens_per_second(point: LoadPoint) -> float:
    return point.tokens_per_second


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
    return replace(setup, engine=engine)


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
) -> LoadPoint:
    times = arrival_times(len(lengths), rate, 1.0, random.Random(seed))
    loaded = serve_at(bench.engine, bench.requests(lengths), times, bar)
    return LoadPoint(
        workload, policy, rate, loaded.tokens_per_second, loaded.normalised_latency, loaded.mean_latency
    )


def draw_load(figure: Any, points: list[LoadPoint]) -> None:
    axes = figure.subplots(2, 2, sharex=True)
    finite = [point for point in points if point.rate != float("inf")]
    for column, (workload, words) in enumerate(WORKLOADS.items()):
        top, bottom = axes[0][column], axes[1][column]
        for policy in POLICIES:
            curve = [point for point in finite if (point.workload, point.policy) == (workload, policy)]
            rates = [point.rate for point in curve]
            top.plot(rates, [point.tokens_per_second for point in curve], label=policy, **line_style(policy))
            bottom.plot(
                rates, [1e3 * point.normalised_latency for point in curve], label=policy, **line_style(policy)
            )
        top.set_title(f"{workload}: {words}")
        plain_log(bottom, "x")
        plain_log(bottom, "y")
        bottom.set_xlabel("requests arriving per second")
        bottom.set_xticks(
            sorted({point.rate for point in finite}),
            [f"{rate:g}" for rate in sorted({point.rate for point in finite})],
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


def run(setup: Setup) -> Finding:
    rates = setup.pick(
        (16.0, OFFLINE),
        (2.0, 5.0, 10.0, 20.0, 40.0, 80.0, OFFLINE),
        (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 80.0, OFFLINE),
    )
    count, here, answer = setup.pick((16, 10, 6), (300, 20, 16), (1000, 96, 64))
    slots = setup.pick(4, 64, 64)  # of the simulated device
    timelines = measure_timelines(setup, share=0.3)
    offline = load_here(setup, here, answer, share=0.7)
    with setup.progress(len(WORKLOADS) * len(POLICIES) * len(rates) * count, "req") as bar:
        bar.note(f"{MODEL} on {DEVICE}")
        points = simulated_points(setup, rates, count, slots, bar)
    with opened(setup, max_num_seqs=SLOTS) as bench:
        words = in_words(bench)
    return _finding(setup, timelines, offline, points, words, (here, answer, count, slots))


def _finding(
    setup: Setup,
    timelines: Timelines,
    offline: LoadHere,
    points: list[LoadPoint],
    words: str,
    sizes: tuple[int, int, int, int],
) -> Finding:
    here, answer, count, slots = sizes
    gain = {name: _gain(points, name) for name in WORKLOADS}
    gain_here = {
        name: offline.ratio((name, "continuous"), (name, "static"), _tokens_per_second) for name in WORKLOADS
    }
    drawn = _typical(timelines)
    used = timelines.ratio("continuous", "static", _busy_share)
    take_away = (
        f"Where all answers have the same length, static batches lose little (continuous is {gain['uniform']:.2f} "
        f"times as fast offline, simulated); with varied lengths continuous batching gives {gain['varied']:.2f} times "
        f"the tokens, because a slot is free as soon as its answer ends. On this machine, continuous against static, "
        f"same length: {gain_here['uniform'].claim('times as fast')}; varied: "
        f"{gain_here['varied'].claim('times as fast')}."
    )
    return Finding(
        take_away,
        [
            _drawn_table(timelines),
            _here_table(offline, gain_here),
            _load_table(f"{MODEL} on {DEVICE}", points),
        ],
        _pictures(drawn, points, gain, used),
        {
            "timelines": [_timeline(run) for run in drawn],
            "slot_time_used_continuous_over_static": used.record(),
            "here": [
                {
                    "workload": workload,
                    "policy": policy,
                    "tokens_per_second": offline.interval((workload, policy), _tokens_per_second).record(),
                }
                for workload, policy in offline.runs
            ],
            "here_continuous_over_static": {name: ratio.record() for name, ratio in gain_here.items()},
            "simulated": list(map(_record, points)),
        },
        {
            "seed": setup.seed,
            "model": words,
            "slots": SLOTS,
            "answers": ANSWERS,
            "window_steps": WINDOW,
            "simulated": {
                "model": MODEL,
                "device": DEVICE,
                "slots": slots,
                "num_requests": count,
                "window_ms": WINDOW_MS,
            },
        },
        _checks(timelines, gain, gain_here),
        (
            f"time lines: {words}, prompts of {PROMPT_TOKENS} tokens, answers of {', '.join(map(str, ANSWERS))}; three "
            f"requests are there at once, others follow one by one; dynamic batches wait {WINDOW} steps to be full; "
            f"policies in turns, {timelines.num_rounds} rounds, the median one is drawn",
            f"on this machine: {here} requests, 16 tokens in, {answer} out on average, {SLOTS_HERE} slots; policies in "
            f"turns, {offline.num_rounds} rounds; medians with {CONFIDENCE_WORDS} intervals",
            f"simulated: scheduler and memory are real, a step's time comes from a cost model of the H200; {count} "
            f"requests, {MEAN_ANSWER} tokens in and on average out, {slots} slots, Poisson arrivals, window "
            f"{WINDOW_MS:.0f} ms",
            "static: a batch starts with the requests that wait and ends with its longest answer; rows that ended "
            "keep their slot and their computation until then",
        ),
    )


def _pictures(
    drawn: list[TimelineRun], points: list[LoadPoint], gain: dict[str, float], used: Ratio
) -> list[Picture]:
    return [
        Picture(
            "batching",
            f"Who occupies which slot when: {len(ANSWERS)} requests, {SLOTS} slots",
            "In a static batch a slot waits for the longest answer. Share of the slots' time that is used, continuous "
            f"over static: {used.short('×')}.",
            lambda figure: draw_figure(figure, drawn),
            height=5.8,
        ),
        Picture(
            "batching-load",
            f"Load on three batching policies: {MODEL} on a simulated H200",
            f"With varied answers continuous batching carries {gain['varied']:.1f} times the load of static, "
            f"with uniform ones {gain['uniform']:.1f} times, and latency stays low up to it.",
            lambda figure: draw_load(figure, points),
            height=5.6,
        ),
    ]


def _checks(timelines: Timelines, gain: dict[str, float], gain_here: dict[str, Ratio]) -> list[Check]:
    ended = {policy: [run.ended_share for run in runs] for policy, runs in timelines.runs.items()}
    return [
        Check(
            "offline, static batches do well on uniform lengths: within 25 % of continuous",
            f"continuous is {gain['uniform']:.2f} times as fast (here: {gain_here['uniform'].text()})",
            gain["uniform"] < 1.25,
        ),
        Check(
            "varied lengths need continuous batching: at least 1.5 times the throughput of static",
            f"{gain['varied']:.2f} times (here: {gain_here['varied'].text()})",
            gain["varied"] >= 1.5,
        ),
        Check(
            "continuous batching never computes for an answer that is over",
            f"{100 * max(ended['continuous']):.1f} % of slot time at most, static "
            f"{100 * statistics.median(ended['static']):.1f} %",
            max(ended["continuous"]) == 0.0,
        ),
    ]


def _gain(points: list[LoadPoint], workload: str) -> float:
    """Continuous over static in tokens a second, all requests at once."""
    rate = {
        one.policy: one.tokens_per_second
        for one in points
        if one.workload == workload and one.rate == OFFLINE
    }
    return rate["continuous"] / rate["static"]


def _drawn_table(timelines: Timelines) -> Table:
    rows = [
        [
            run.policy,
            timelines.interval(run.policy, lambda each: 1e3 * each.seconds).text(0),
            timelines.interval(run.policy, lambda each: 1e3 * each.mean_latency).text(0),
            timelines.interval(run.policy, _busy_share).text(0),
            timelines.interval(run.policy, lambda each: 100 * each.ended_share).text(0),
            str(len(run.moments)),
        ]
        for run in _typical(timelines)
    ]
    head = [
        "policy",
        "all done, ms",
        "mean latency, ms",
        "slot time used, %",
        "for ended answers, %",
        "steps",
    ]
    return Table("The small workload", head, rows)


def _here_table(offline: LoadHere, gain: dict[str, Ratio]) -> Table:
    rows = [
        [
            workload,
            policy,
            offline.interval((workload, policy), _tokens_per_second).text(0),
            offline.interval((workload, policy), lambda point: 1e3 * point.normalised_latency).text(1),
            gain[workload].text() if policy == "continuous" else "",
        ]
        for workload, policy in offline.runs
    ]
    head = ["lengths", "policy", "tokens/s", "ms per token", "over static"]
    return Table("All requests at once, on this machine", head, rows, left=2)


def _load_table(title: str, points: list[LoadPoint]) -> Table:
    rows = [
        [
            point.workload,
            point.policy,
            "all at once" if point.rate == OFFLINE else f"{point.rate:g}",
            f"{point.tokens_per_second:,.0f}",
            f"{1e3 * point.normalised_latency:.1f}",
            f"{point.mean_latency:.2f}",
        ]
        for point in points
    ]
    head = ["lengths", "policy", "requests/s", "tokens/s", "ms per token", "mean latency, s"]
    return Table(title, head, rows, left=2)


def _timeline(run: TimelineRun) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "seconds": run.seconds,
        "mean_latency_seconds": run.mean_latency,
        "busy_share": run.busy_share,
        "ended_share": run.ended_share,
        "steps": [
            {
                "begins": moment.begins,
                "ends": moment.ends,
                "rows": [(row.row, row.request_id, row.kind) for row in moment.rows],
            }
            for moment in run.moments
        ],
    }


def _record(one: LoadPoint) -> dict[str, Any]:
    return {
        "workload": one.workload,
        "policy": one.policy,
        "requests_per_second": None if one.rate == OFFLINE else one.rate,
        "tokens_per_second": one.tokens_per_second,
        "normalised_latency_seconds": one.normalised_latency,
        "mean_latency_seconds": one.mean_latency,
    }


EXPERIMENT = Experiment(
    "batching",
    "Static, dynamic and continuous batches",
    "Requests arrive when they like and end when they like. Who shares a batch with whom, and for how long?",
    run,
)

"""`placement`: AlpaServe's motivating example and attainment curves: replicas against groups that share models."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from quire_lab.measure.simulated_runs import side_by_side
from quire_lab.placement.profile import serve, size_model, usable_bytes
from quire_lab.placement.search import Case, replicated, search, shapes_of
from quire_lab.placement.simulate import Group, ModelOnShape, ParallelShape, gamma_trace, simulate
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, bar_style, line_style
from quire_lab.simulate.devices import find_device

PAPER = "AlpaServe (Li et al., OSDI 2023)"
# two BERT-6.7B on two GPUs, three requests a second together: the repository's illustrative_example.py
LATENCY, RATE = 0.396, 3.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    name: str
    shares: tuple[float, float]  # of the requests, by model
    cv: float
    published: float  # mean latency of the simple placement over the pipelined one
    tolerance: float


EXAMPLES = (
    Arrivals("Poisson, equal rates", (0.5, 0.5), 1.0, 1.3, 0.05),
    Arrivals("gamma, CV 3", (0.5, 0.5), 3.0, 1.9, 0.10),
    Arrivals("Poisson, 20 % and 80 %", (0.2, 0.8), 1.0, 6.6, 0.20),
)
OVERHEADS = (0.0, 0.05, 0.10)  # of a pipeline's stages

GPU, NUM_GPUS, PROMPT = "v100", 8, 1024
MODELS = ("llama-1b",) * 4 + ("llama-7b",) * 6 + ("llama-13b",) * 2
LOAD = 0.4  # of all GPUs, at a rate of 1
USUAL = {"rate": 1.0, "cv": 4.0, "slo_scale": 5.0}
ONE, SELECTIVE, WINDOWS, GROUPS = (
    "one model per GPU",
    "selective replication",
    "placed per window",
    "groups",
)
SCHEMES = (ONE, SELECTIVE, WINDOWS, GROUPS)
NUM_WINDOWS = 10
# Shares of requests in time, published for 72 models on 48 GPUs (functions of Azure's first trace), from the artifact's
# own data: selective replication, Clockwork++ and AlpaServe
PUBLISHED: dict[str, dict[float, tuple[float, float, float]]] = {
    "slo_scale": {1.0: (0.0, 0.0, 0.729), 2.0: (0.629, 0.706, 0.878), 5.0: (0.877, 0.949, 0.977)},
    "cv": {1.0: (0.987, 0.988, 1.0), 4.0: (0.877, 0.949, 0.977), 8.0: (0.528, 0.638, 0.766)},
}
LABELS = {"rate": "rate, of the usual", "cv": "CV of arrivals", "slo_scale": "deadline, in latencies"}


def mean_latencies(
    arrivals: Arrivals, num_requests: int, seed: int, overhead: float = 0.0
) -> tuple[float, float]:
    """Of the simple placement, one model on each GPU, and of both models on a pipeline of the two."""
    alone, both = ParallelShape(1, 1), ParallelShape(1, 2)
    table = {
        ("gpu", alone): [ModelOnShape(0, LATENCY)] * 2,
        ("gpu", both): [ModelOnShape(0, LATENCY / 2 * (1 + overhead))] * 2,
    }
    rates = [RATE * share for share in arrivals.shares]
    trace = gamma_trace(rates, [arrivals.cv] * 2, num_requests, seed)
    simple = [Group("gpu", alone, (0,)), Group("gpu", alone, (1,))]
    placements = (simple, [Group("gpu", both, (0, 1))])
    first, second = (simulate(trace, groups, table, [math.inf] * 2).mean_latency for groups in placements)
    return first, second


@dataclass(frozen=True, slots=True)
class PlacementJob:
    varied: str  # of USUAL
    value: float
    num_requests: int
    seed: int

    @property
    def setting(self) -> Mapping[str, float]:
        return {**USUAL, self.varied: self.value}


@dataclass(frozen=True, slots=True)
class PlacementPoint:
    varied: str
    value: float
    attainment: Mapping[str, float]  # by scheme
    shapes: str  # of the groups found


def measure(job: PlacementJob) -> PlacementPoint:
    """Placed by one trace and tested on another; `WINDOWS` is placed on the very windows that it is tested on."""
    device, shapes = find_device(f"simulated:{GPU}"), shapes_of(NUM_GPUS, 4, 8)
    sizes = {name: size_model({"model": name}, PROMPT, 1) for name in set(MODELS)}
    table = {(GPU, shape): [serve(sizes[name], device, shape) for name in MODELS] for shape in shapes}
    alone = [served.lone for served in table[GPU, ParallelShape(1, 1)] if served is not None]
    weights = [(index % 4 + 1) ** -1.0 for index in range(len(MODELS))]
    total = sum(weight * seconds for weight, seconds in zip(weights, alone, strict=True))
    rates = [job.setting["rate"] * LOAD * NUM_GPUS * weight / total for weight in weights]
    placed, tested = (
        gamma_trace(rates, [job.setting["cv"]] * len(rates), job.num_requests, job.seed + more)
        for more in (0, 1)
    )
    deadlines = [job.setting["slo_scale"] * seconds for seconds in alone]
    case = Case({GPU: NUM_GPUS}, {GPU: usable_bytes(device)}, {GPU: shapes}, table, deadlines, placed)
    filled = {ONE: replicated(case, 1), SELECTIVE: replicated(case, None), GROUPS: search(case)}
    attainment = {
        name: simulate(tested, groups.groups, table, deadlines).attainment for name, groups in filled.items()
    }
    attainment[WINDOWS] = _per_window(replace(case, trace=tested))
    groups = sorted({str(group.shape) for group in filled[GROUPS].groups if group.models})
    return PlacementPoint(job.varied, job.value, attainment, ", ".join(groups))


def _per_window(case: Case) -> float:
    """Clockwork++: replicas chosen for each window from its own requests, and moved in no time."""
    end = case.trace[-1][0]
    served = 0
    for number in range(NUM_WINDOWS):
        window = [request for request in case.trace if number <= request[0] / end * NUM_WINDOWS < number + 1]
        if window:
            served += sum(replicated(replace(case, trace=window), None).outcome.num_served)
    return served / len(case.trace)


def run(setup: Setup) -> Finding:
    num_examples = setup.pick(20_000, 300_000, 1_000_000)
    grid: dict[str, tuple[float, ...]] = setup.pick(
        {"slo_scale": (5.0,)},
        {"rate": (0.25, 0.5, 1.0, 1.5, 2.0), "cv": (1.0, 2.0, 4.0, 6.0, 8.0), "slo_scale": (1.0, 1.5, 2.0, 5.0, 10.0)},
        {"rate": (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0), "cv": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
         "slo_scale": (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)},
    )  # fmt: skip
    num_requests = setup.pick(300, 2000, 5000)
    jobs = [
        PlacementJob(name, value, num_requests, setup.seed)
        for name, values in grid.items()
        for value in values
    ]
    with setup.progress(len(jobs) + len(EXAMPLES) * len(OVERHEADS), "placements") as bar:
        latencies = {}
        for arrivals in EXAMPLES:
            for overhead in OVERHEADS:
                latencies[arrivals.name, overhead] = mean_latencies(
                    arrivals, num_examples, setup.seed, overhead
                )
                bar()
        points = side_by_side(setup, measure, jobs, bar)
    return _finding(setup, latencies, points, num_examples, num_requests)


def _finding(
    setup: Setup, latencies: Mapping[tuple[str, float], tuple[float, float]], points: Sequence[PlacementPoint],
    num_examples: int, num_requests: int,
) -> Finding:  # fmt: skip
    ratios = {key: simple / pipelined for key, (simple, pipelined) in latencies.items()}
    words = ", ".join(f"{ratios[arrivals.name, 0.0]:.2f} ({arrivals.published})" for arrivals in EXAMPLES)
    gain = max(points, key=lambda point: point.attainment[GROUPS] - point.attainment[SELECTIVE])
    take_away = (
        f"Mean latency of one model per GPU over both on a pipeline: {words} with even, bursty and skewed arrivals "
        f"(published in brackets). Groups keep {gain.attainment[GROUPS]:.0%} of deadlines where replicas keep "
        f"{gain.attainment[SELECTIVE]:.0%} ({LABELS[gain.varied]} {gain.value:g})."
    )
    checks = [
        Check(
            f"{arrivals.name}: the published ratio of {arrivals.published} within {arrivals.tolerance:.0%}",
            f"{ratios[arrivals.name, 0.0]:.2f}",
            abs(ratios[arrivals.name, 0.0] / arrivals.published - 1) <= arrivals.tolerance,
        )
        for arrivals in EXAMPLES
    ]
    worst = min(point.attainment[GROUPS] - point.attainment[SELECTIVE] for point in points)
    checks.append(
        Check(
            "groups keep as many deadlines as replicas everywhere, within a point",
            f"{worst:+.1%}",
            worst >= -0.01,
        )
    )
    return Finding(
        take_away,
        [_example_table(latencies, ratios), _curve_table(points)],
        [
            Picture("placement", "Two models on two GPUs", "Mean latency, simple placement over a pipeline.",
                    partial(_draw_examples, ratios=ratios), height=3.4),
            Picture("placement_curves", "Requests in time", f"{len(MODELS)} models on {NUM_GPUS} {GPU}, simulated.",
                    partial(_draw_curves, points=points), height=3.8),
        ],
        {
            "examples": [
                {"arrivals": arrivals.name, "overhead": overhead, "simple_s": latencies[arrivals.name, overhead][0],
                 "pipelined_s": latencies[arrivals.name, overhead][1], "ratio": ratios[arrivals.name, overhead],
                 "published": arrivals.published if not overhead else None}
                for arrivals in EXAMPLES for overhead in OVERHEADS
            ],
            "curves": [asdict(point) for point in points],
            "published_curves": [
                {"varied": name, "value": value, SELECTIVE: row[0], WINDOWS: row[1], GROUPS: row[2]}
                for name, rows in PUBLISHED.items() for value, row in rows.items()
            ],
        },
        {"seed": setup.seed, "num_examples": num_examples, "num_requests": num_requests, "models": MODELS, "gpu": GPU,
         "num_gpus": NUM_GPUS, "prompt_tokens": PROMPT, "usual": USUAL, "load": LOAD},
        checks,
        [
            f"published: {PAPER}, its motivating example and its artifact's data (72 models, 48 V100, real traffic)",
            f"the example: two models of {LATENCY} s, {RATE:g} requests/s, {num_examples:,} of them, no deadline; the "
            "skewed one loads a GPU to 95 %, so its ratio moves with the sample",
            f"the curves: other models and arrivals than the paper's ({', '.join(sorted(set(MODELS)))}; one pass over "
            f"{PROMPT} tokens, gamma arrivals), so orders compare, not levels; placed by one trace, tested on another",
            f"'{WINDOWS}' is the paper's Clockwork++: it knows each window's requests and moves models in no time",
            f"times of {GPU} are derived, not measured: see the simulator's page; an all-reduce is charged 10 µs and "
            "half of NVLink's bandwidth",
        ],
    )  # fmt: skip


def _example_table(
    latencies: Mapping[tuple[str, float], tuple[float, float]], ratios: Mapping[tuple[str, float], float]
) -> Table:
    rows = [
        [arrivals.name, f"{overhead:.0%}", *(f"{seconds:.3f}" for seconds in latencies[arrivals.name, overhead]),
         f"{ratios[arrivals.name, overhead]:.2f}", f"{arrivals.published:.1f}" if not overhead else ""]
        for arrivals in EXAMPLES for overhead in OVERHEADS
    ]  # fmt: skip
    head = ["arrivals", "overhead of stages", "simple, s", "pipelined, s", "ratio", "published"]
    return Table("Mean latency of two models on two GPUs", head, rows)


def _curve_table(points: Sequence[PlacementPoint]) -> Table:
    rows = []
    for point in points:
        published = PUBLISHED.get(point.varied, {}).get(point.value)
        shown = " / ".join(f"{share:.3f}" for share in published) if published else ""
        shares = [f"{point.attainment[name]:.3f}" for name in SCHEMES]
        rows.append([LABELS[point.varied], f"{point.value:g}", *shares, shown, point.shapes])
    head = ["varied", "value", *SCHEMES, "published: selective / windows / groups", "shapes of the groups"]
    return Table("Share of requests in time", head, rows)


def _draw_examples(figure: Any, ratios: Mapping[tuple[str, float], float]) -> None:
    axis = figure.subplots()
    series = [("published", [arrivals.published for arrivals in EXAMPLES])]
    series += [
        (f"here, stages cost {overhead:.0%} more", [ratios[arrivals.name, overhead] for arrivals in EXAMPLES])
        for overhead in OVERHEADS
    ]
    for index, (label, values) in enumerate(series):
        places = [number + 0.2 * (index - 1.5) for number in range(len(EXAMPLES))]
        bars = axis.bar(places, values, 0.18, label=label, **bar_style(index))
        axis.bar_label(bars, fmt="%.2f", fontsize=7)
    axis.set_xticks(range(len(EXAMPLES)), [arrivals.name for arrivals in EXAMPLES])
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_ylabel("simple ÷ pipelined")
    axis.legend(loc="upper left")


def _draw_curves(figure: Any, points: Sequence[PlacementPoint]) -> None:
    varied = list(dict.fromkeys(point.varied for point in points))
    for axis, name in zip(figure.subplots(1, len(varied), squeeze=False)[0], varied, strict=True):
        drawn = [point for point in points if point.varied == name]
        for index, scheme in enumerate(SCHEMES):
            shares = [100 * point.attainment[scheme] for point in drawn]
            axis.plot([point.value for point in drawn], shares, label=scheme, **line_style(index))
        axis.set(xlabel=LABELS[name], ylabel="requests in time, %", ylim=(0, 103))
        axis.legend(loc="lower left" if name != "slo_scale" else "lower right")


EXPERIMENT = Experiment(
    "placement",
    "Placement of many models",
    "Many models on several GPUs: replicas, or groups of GPUs that share them? Bursts decide.",
    run,
)

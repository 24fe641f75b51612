"""`rate`: normalised latency against request rate, for every way to give memory and to form batches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from quire_lab.measure.simulated_runs import (
    BATCH_SIZE,
    PAPER,
    POLICIES,
    Point,
    Run,
    Workload,
    basis,
    side_by_side,
    simulate,
    simulated_settings,
    workload,
)
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import GREY, Picture, bar_style, line_style, plain_log

# Curves of latency against request rate, around the rate that each policy sustains while requests wait.

FRACTIONS = (0.6, 0.9, 1.15)  # of the sustained rate


@dataclass(frozen=True, slots=True)
class CurveJob:
    """One line of a figure: a policy over rates, which are set here. No fractions: the sustained rate alone."""

    workload: str
    policy: str
    run: Run
    fractions: Sequence[float] = FRACTIONS


@dataclass(frozen=True, slots=True)
class Curve:
    workload: str
    policy: str
    method: str
    width: int
    at_once: Point  # every request at the start
    points: Sequence[Point]  # by rate

    @property
    def sustained(self) -> float:
        """Requests per second: what is served while the queue is never empty. Beyond it latency grows without end."""
        return self.at_once.capacity

    def as_dict(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "policy": self.policy,
            "method": self.method,
            "width": self.width,
            "sustained_rate": self.sustained,
            "running_when_full": self.at_once.mean_full,
            "points": [
                {
                    "rate": point.rate,
                    "normalised_latency": point.normalised,
                    "mean_running": point.mean_running,
                }
                for point in self.points
            ],
        }


def trace_curve(job: CurveJob) -> Curve:
    """All at once first, which says where to look."""
    run = job.run
    at_once = simulate(replace(run, rate=math.inf))
    points = [simulate(replace(run, rate=fraction * at_once.capacity)) for fraction in job.fractions]
    return Curve(job.workload, job.policy, run.method, run.width, at_once, points)


def ratio(curves: Mapping[str, Curve], over: str, of: str = "paged") -> float:
    """Of sustained rates."""
    return curves[of].sustained / curves[over].sustained


# Tables and pictures of `rate`.

LABELS = {
    "paged": "continuous, paged",
    "oracle": "continuous, Oracle",
    "pow2": "continuous, Pow2",
    "max": "continuous, Max",
    "ft": "request-level, Max (ft)",
    "static": f"static batches of {BATCH_SIZE}, paged",
    "dynamic": f"dynamic batches of {BATCH_SIZE}, paged",
}
LOOKS = {"static": 5, "dynamic": 6}  # beside the reservations', whose looks they would share
# sustained rate of paging over another policy, published for OPT-13B: low, high, where
PUBLISHED = {
    ("sharegpt", "oracle"): (1.7, 2.7),
    ("sharegpt", "max"): (2.7, 8.0),
    ("sharegpt", "ft"): (1.0, 22.0),
    ("chatbot", "oracle"): (2.0, 2.0),
}
PUBLISHED_BEAMS = {1: 1.8, 2: 2.4, 4: 3.2, 6: 3.5}  # over Pow2, Alpaca; a width of 1 is plain decoding
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # requests per second
Curves = dict[str, Curve]  # by policy
Wide = dict[tuple[str, int], Curves]  # by method and width


def pictures(plain: dict[str, Curves], wide: Wide) -> list[Picture]:
    best = max(ratio(plain["sharegpt"], other) for other in plain["sharegpt"])
    return [
        Picture(
            "rate",
            "Normalised latency against request rate",
            f"A policy that holds more requests at once serves a higher rate: up to {best:.1f} × on ShareGPT lengths.",
            lambda figure: _draw_panels(figure, plain),
            width=11.0,
            height=4.6,
        ),
        Picture(
            "rate-beams",
            "What several sequences per request gain from paging",
            "Sustained rate of paging over Pow2 on Alpaca lengths: samples and beams share blocks.",
            lambda figure: _draw_wide(figure, plain, wide),
            width=7.0,
            height=3.8,
        ),
        Picture(
            "rate-beams-latency",
            "Normalised latency against request rate, by beam width",
            "Alpaca lengths: beams share most of their blocks, so paging keeps up with a higher rate at every width.",
            lambda figure: _draw_beams(figure, plain, wide),
            width=11.0,
            height=4.0,
        ),
    ]


def sustained_table(plain: dict[str, Curves]) -> Table:
    rows = []
    for name, curves in plain.items():
        for policy, curve in curves.items():
            rows.append(
                [
                    name,
                    LABELS[policy],
                    f"{curve.sustained:.2f}",
                    f"{curve.at_once.mean_full:.1f}",
                    f"{1e3 * curve.points[0].normalised:.0f}",
                    f"{curves['paged'].sustained / curve.sustained:.2f}",
                ]
            )
    head = [
        "requests",
        "policy",
        "sustained, req/s",
        "running when full",
        f"latency at {FRACTIONS[0]:g} × that, ms/token",
        "paged sustains ×",
    ]
    return Table("Sustained request rates", head, rows, left=2)


def compared_table(plain: dict[str, Curves], wide: Wide) -> Table:
    rows = []
    for (name, over), (low, high) in PUBLISHED.items():
        published = f"{low:g}" if low == high else f"{low:g}–{high:g}" if low > 1 else f"up to {high:g}"
        rows.append([f"{name}: paged over {over}", f"{ratio(plain[name], over):.2f}", published])
    rows.append(
        ["alpaca: paged over pow2", f"{ratio(plain['alpaca'], 'pow2'):.2f}", f"{PUBLISHED_BEAMS[1]:g}"]
    )
    for (method, width), curves in wide.items():
        words = "beams" if method == "beam" else "samples"
        published = f"{PUBLISHED_BEAMS[width]:g}" if method == "beam" else "–"
        rows.append([f"alpaca, {width} {words}: paged over pow2", f"{ratio(curves, 'pow2'):.2f}", published])
    return Table("Sustained rate, simulated and published", ["ratio", "here", "published"], rows)


def _draw_beams(figure: Any, plain: dict[str, Curves], wide: Wide) -> None:
    beams = {width: curves for (method, width), curves in wide.items() if method == "beam"}
    policies = next(iter(beams.values()))
    alone = {policy: plain["alpaca"][policy] for policy in policies}
    panels = {"one sequence": alone} | {f"{width} beams": beams[width] for width in sorted(beams)}
    _draw_panels(figure, panels)


def _draw_panels(figure: Any, panels: dict[str, Curves]) -> None:
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        for policy, curve in curves.items():
            rates = [point.rate for point in curve.points]
            style = line_style(LOOKS.get(policy, policy))
            if policy == "static":  # under heavy load dynamic batches are the same ones, and lie on it
                style = {**style, "linewidth": 5.0, "markersize": 11.0, "alpha": 0.6}
            axis.plot(rates, [point.normalised for point in curve.points], label=LABELS[policy], **style)
            axis.axvline(curve.sustained, color=style["color"], linewidth=0.7, alpha=0.6)
        axis.set(title=name, xlabel="requests per second", xscale="log")
        plain_log(axis, "y")
        shown = [tick for tick in TICKS if axis.get_xlim()[0] <= tick <= axis.get_xlim()[1]]
        axis.set_xticks(shown, [f"{tick:g}" for tick in shown])
        axis.set_xticks([], minor=True)
    axes[0].set_ylabel("normalised latency, s per token")
    axes[0].plot([], [], color=GREY, linewidth=0.7, label="sustained at most")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _draw_wide(figure: Any, plain: dict[str, Curves], wide: Wide) -> None:
    axis = figure.subplots()
    widths = sorted({width for _, width in wide})
    axis.bar(0, ratio(plain["alpaca"], "pow2"), 0.36, **bar_style(0))
    for index, (method, words) in enumerate((("parallel", "samples"), ("beam", "beams"))):
        values = [ratio(wide[method, width], "pow2") for width in widths]
        middle = [x + 1 + 0.38 * (index - 0.5) for x in range(len(widths))]
        axis.bar(middle, values, 0.36, label=words, **bar_style(index + 1))
    published = [PUBLISHED_BEAMS[1], *(PUBLISHED_BEAMS[width] for width in widths)]
    axis.hlines(
        published,
        [x - 0.42 for x in range(len(published))],
        [x + 0.42 for x in range(len(published))],
        color=GREY,
        linestyle="--",
        label="published, beams",
    )
    axis.set_xticks(range(len(widths) + 1), ["one sequence", *(f"{width} each" for width in widths)])
    axis.set(ylabel="paged over Pow2, ×")
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper left")


ORCA = ("paged", "oracle", "pow2", "max")
NAMES = ("sharegpt", "alpaca", "chatbot")
ALPACA = 770  # requests of its trace: all of them, since a few long answers decide what a reservation holds
WIDTHS = (2, 4, 6)
METHODS = ("parallel", "beam")
WIDE = ("paged", "pow2")  # policies that several sequences per request are compared over


def run(setup: Setup) -> Finding:
    settings = simulated_settings(setup, PAPER)
    counts = {
        "sharegpt": setup.pick(120, 400, 2400),
        "alpaca": setup.pick(400, ALPACA, 4 * ALPACA),
        "chatbot": setup.pick(50, 300, 1800),
    }
    workloads = [workload(name, setup.data, count, setup.seed) for name, count in counts.items()]
    jobs = [
        CurveJob(
            each.name,
            policy,
            Run({**settings, **POLICIES[policy]}, each.lengths, 1.0, setup.seed),
            _fractions(setup),
        )
        for each in workloads
        for policy in LABELS
    ]
    jobs += _wide_jobs(setup, settings, workloads[1])
    with setup.progress(len(jobs), "curves") as bar:
        curves = side_by_side(setup, trace_curve, jobs, bar)
    plain = {
        name: {curve.policy: curve for curve in curves if curve.workload == name and curve.width == 1}
        for name in NAMES
    }
    wide: Wide = {}
    for curve in curves:
        if curve.width > 1:
            wide.setdefault((curve.method, curve.width), {})[curve.policy] = curve
    return _finding(setup, settings, workloads, plain, wide)


def _wide_jobs(setup: Setup, settings: Mapping[str, Any], alpaca: Workload) -> list[CurveJob]:
    """The same requests at every width, so that nothing but the width differs; for a look, fewer of them.

    Of samples the sustained rate alone.
    """
    lengths = alpaca.lengths[: setup.pick(160, None, None)]
    return [
        CurveJob(
            alpaca.name,
            policy,
            Run({**settings, **POLICIES[policy]}, lengths, 1.0, setup.seed, method, width),
            _fractions(setup) if method == "beam" else (),
        )
        for method in METHODS
        for width in setup.pick(WIDTHS[2:], WIDTHS, WIDTHS)
        for policy in WIDE
    ]


def _fractions(setup: Setup) -> Sequence[float]:
    return setup.pick(FRACTIONS[:1], FRACTIONS, FRACTIONS)


def _finding(
    setup: Setup,
    settings: Mapping[str, Any],
    workloads: Sequence[Workload],
    plain: dict[str, Curves],
    wide: Wide,
) -> Finding:
    sharegpt = plain["sharegpt"]
    take_away = (
        f"On ShareGPT lengths paging sustains {ratio(sharegpt, 'oracle'):.1f} × the rate of Orca (Oracle), "
        f"{ratio(sharegpt, 'max'):.1f} × that of Orca (Max) and {ratio(sharegpt, 'ft'):.1f} × that of "
        f"FasterTransformer's batches (published: 1.7–2.7, 2.7–8, up to 22)."
    )
    return Finding(
        take_away,
        [sustained_table(plain), compared_table(plain, wide)],
        pictures(plain, wide),
        {
            "curves": [curve.as_dict() for curves in plain.values() for curve in curves.values()],
            "several_sequences": [curve.as_dict() for curves in wide.values() for curve in curves.values()],
            "published": {f"{name}: paged over {over}": both for (name, over), both in PUBLISHED.items()},
            "published_beams_over_pow2": PUBLISHED_BEAMS,
        },
        {
            "seed": setup.seed,
            "engine": dict(settings),
            "num_requests": {workload.name: len(workload.lengths) for workload in workloads},
            "batch_size": BATCH_SIZE,
        },
        _checks(plain, wide),
        [
            *basis(settings),
            *(workload.in_words for workload in workloads),
            "sustained: requests that are served per second while the queue is never empty; at a higher rate it grows "
            "without end, so this is where each curve's wall stands",
            "Poisson arrivals; beyond the wall latency depends on how long the run is: --size thorough is steeper",
            "published: fig. 12, 14 and 17 of the PagedAttention paper, whose ShareGPT requests have 161 tokens in "
            "and 338 out",
        ],
    )


def _checks(plain: dict[str, Curves], wide: Wide) -> list[Check]:
    checks = []
    for name, curves in plain.items():
        rates = [curves[policy].sustained for policy in reversed(ORCA)]
        ordered = all(low <= high * 1.02 for low, high in pairwise(rates))
        shown = " ≤ ".join(f"{rate:.2f}" for rate in rates)
        checks.append(Check(f"{name}: Max ≤ Pow2 ≤ Oracle ≤ paged in sustained rate", shown, ordered))
    beams = [ratio(plain["alpaca"], "pow2")]
    beams += [ratio(curves, "pow2") for (method, _), curves in wide.items() if method == "beam"]
    widths = [1, *(width for method, width in wide if method == "beam")]
    checks.append(
        Check(
            "alpaca: the more beams, the more paging gains over Pow2 in sustained rate",
            " < ".join(f"{beam:.2f} × ({width})" for width, beam in zip(widths, beams, strict=True)),
            all(low < high for low, high in pairwise(beams)),
        )
    )
    return checks


EXPERIMENT = Experiment(
    "rate",
    "Latency against request rate",
    "Requests come at random, at a higher and higher rate. Up to where does each way to give memory and to form "
    "batches keep up?",
    run,
)

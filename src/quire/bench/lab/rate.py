"""`rate`: normalised latency against request rate, for every way to give memory and to form batches."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from quire.bench.lab.experiment import Check, Experiment, Finding, Picture, Setup, Table
from quire.bench.lab.figure import line_style
from quire.bench.lab.rate_curves import FRACTIONS, Curve, CurveJob, ratio, trace_curve
from quire.bench.lab.simulated import (
    BATCH_SIZE,
    PAPER,
    POLICIES,
    Run,
    Workload,
    basis,
    side_by_side,
    simulated_settings,
    workload,
)

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
ORCA = ("paged", "oracle", "pow2", "max")
LINES = {"sharegpt": tuple(LABELS), "alpaca": tuple(LABELS), "chatbot": ORCA}
WIDTHS = (2, 4, 6)
METHODS = ("parallel", "beam")
WIDE = ("paged", "pow2")  # policies that several sequences per request are compared over
# sustained rate of paging over another policy, published for OPT-13B: low, high, where
PUBLISHED = {
    ("sharegpt", "oracle"): (1.7, 2.7),
    ("sharegpt", "max"): (2.7, 8.0),
    ("sharegpt", "ft"): (1.0, 22.0),
    ("chatbot", "oracle"): (2.0, 2.0),
}
PUBLISHED_BEAMS = {1: 1.8, 2: 2.4, 4: 3.2, 6: 3.5}  # over Pow2, Alpaca; a width of 1 is plain decoding
Curves = dict[str, Curve]  # by policy
Wide = dict[tuple[str, int], Curves]  # by method and width


def run(setup: Setup) -> Finding:
    settings = simulated_settings(setup, PAPER)
    counts = {
        "sharegpt": setup.pick(160, 300, 3600),
        "alpaca": setup.pick(500, 700, 7200),
        "chatbot": setup.pick(60, 150, 1800),
    }
    workloads = [workload(name, setup.data, count, setup.seed) for name, count in counts.items()]
    jobs = [
        CurveJob(
            one.name,
            policy,
            Run({**settings, **POLICIES[policy]}, one.lengths, 1.0, setup.seed),
            setup.pick(FRACTIONS[:2], FRACTIONS, FRACTIONS),
        )
        for one in workloads
        for policy in LINES[one.name]
    ]
    jobs += _wide_jobs(setup, settings, workloads[1])
    with setup.progress(len(jobs), "curves") as bar:
        curves = side_by_side(setup, trace_curve, jobs, bar)
    plain = {
        name: {one.policy: one for one in curves if one.workload == name and one.width == 1} for name in LINES
    }
    wide: Wide = {}
    for one in curves:
        if one.width > 1:
            wide.setdefault((one.method, one.width), {})[one.policy] = one
    return _finding(setup, settings, workloads, plain, wide)


def _wide_jobs(setup: Setup, settings: Mapping[str, Any], alpaca: Workload) -> list[CurveJob]:
    lengths = alpaca.lengths[: setup.pick(150, 300, 1500)]
    return [
        CurveJob(
            alpaca.name,
            policy,
            Run({**settings, **POLICIES[policy]}, lengths, 1.0, setup.seed, method, width),
            (),
        )
        for method in METHODS
        for width in setup.pick(WIDTHS[1:2], WIDTHS, WIDTHS)
        for policy in WIDE
    ]


def _finding(
    setup: Setup,
    settings: Mapping[str, Any],
    workloads: Sequence[Workload],
    plain: dict[str, Curves],
    wide: Wide,
) -> Finding:
    sharegpt = plain["sharegpt"]
    best = max(ratio(sharegpt, other) for other in sharegpt)
    take_away = (
        f"On ShareGPT lengths paging sustains {ratio(sharegpt, 'oracle'):.1f} × the rate of Orca (Oracle), "
        f"{ratio(sharegpt, 'max'):.1f} × that of Orca (Max) and {ratio(sharegpt, 'ft'):.1f} × that of "
        f"FasterTransformer's batches (published: 1.7–2.7, 2.7–8, up to 22)."
    )
    return Finding(
        take_away,
        [_table(plain), _compared(plain, wide)],
        [
            Picture(
                "rate",
                "Normalised latency against request rate",
                f"Whoever holds more requests at once serves a higher rate: up to {best:.1f} × between policies.",
                lambda figure: _draw(figure, plain),
                width=11.0,
            )
        ],
        {
            "curves": [one.as_dict() for curves in plain.values() for one in curves.values()],
            "several_sequences": [one.as_dict() for curves in wide.values() for one in curves.values()],
            "published": {f"{name}: paged over {over}": both for (name, over), both in PUBLISHED.items()},
            "published_beams_over_pow2": PUBLISHED_BEAMS,
        },
        {
            "seed": setup.seed,
            "engine": dict(settings),
            "num_requests": {one.name: len(one.lengths) for one in workloads},
            "batch_size": BATCH_SIZE,
        },
        _checks(plain, wide),
        [
            *basis(settings),
            *(one.in_words for one in workloads),
            "sustained: requests that are served per second while the queue is never empty; at a higher rate it grows "
            "without end, so this is where each curve's wall stands",
            "Poisson arrivals; beyond the wall latency depends on how long the run is: --size thorough is steeper",
            "published: figures 12, 14 and 17 of the PagedAttention paper, whose ShareGPT requests have 161 tokens in "
            "and 338 out",
        ],
    )


def _table(plain: dict[str, Curves]) -> Table:
    rows = []
    for name, curves in plain.items():
        for policy, one in curves.items():
            rows.append(
                [
                    name,
                    LABELS[policy],
                    f"{one.sustained:.2f}",
                    f"{one.at_once.mean_full:.1f}",
                    f"{1e3 * one.points[0].normalised:.0f}",
                    f"{curves['paged'].sustained / one.sustained:.2f}",
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


def _compared(plain: dict[str, Curves], wide: Wide) -> Table:
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


def _checks(plain: dict[str, Curves], wide: Wide) -> list[Check]:
    checks = []
    for name, curves in plain.items():
        rates = [curves[policy].sustained for policy in reversed(ORCA)]
        ordered = all(low <= high * 1.02 for low, high in pairwise(rates))
        shown = " ≤ ".join(f"{rate:.2f}" for rate in rates)
        checks.append(Check(f"{name}: Max ≤ Pow2 ≤ Oracle ≤ paged in sustained rate", shown, ordered))
    beams = [ratio(plain["alpaca"], "pow2")]
    beams += [ratio(curves, "pow2") for (method, _), curves in wide.items() if method == "beam"]
    checks.append(
        Check(
            "beams gain more from paging than plain decoding does",
            " → ".join(f"{one:.2f} ×" for one in beams),
            beams[-1] > beams[0],
        )
    )
    return checks


def _draw(figure: Any, plain: dict[str, Curves]) -> None:
    axes = figure.subplots(1, len(plain), sharey=True)
    for axis, (name, curves) in zip(axes, plain.items(), strict=True):
        for policy, one in curves.items():
            rates = [point.rate for point in one.points]
            latencies = [point.normalised for point in one.points]
            axis.plot(rates, latencies, label=LABELS[policy], **line_style(LOOKS.get(policy, policy)))
            axis.axvline(
                one.sustained, color=line_style(LOOKS.get(policy, policy))["color"], linewidth=0.6, alpha=0.6
            )
        axis.set(title=name, xlabel="requests per second", xscale="log", yscale="log")
    axes[0].set_ylabel("normalised latency, s per token")
    axes[0].legend(loc="upper left", fontsize=7)


EXPERIMENT = Experiment(
    "rate",
    "Latency against request rate",
    "Requests come at random, at a higher and higher rate. Up to where does each way to give memory and to form "
    "batches keep up?",
    run,
)

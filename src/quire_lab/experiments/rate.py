"""`rate`: normalised latency against request rate, for every way to give memory and to form batches."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from quire_lab.experiments.experiment import Check, Experiment, Finding, Setup
from quire_lab.experiments.rate_curves import FRACTIONS, CurveJob, ratio, trace_curve
from quire_lab.experiments.rate_figure import (
    LABELS,
    PUBLISHED,
    PUBLISHED_BEAMS,
    Curves,
    Wide,
    compared_table,
    pictures,
    sustained_table,
)
from quire_lab.experiments.simulated import (
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
            one.name,
            policy,
            Run({**settings, **POLICIES[policy]}, one.lengths, 1.0, setup.seed),
            _fractions(setup),
        )
        for one in workloads
        for policy in LABELS
    ]
    jobs += _wide_jobs(setup, settings, workloads[1])
    with setup.progress(len(jobs), "curves") as bar:
        curves = side_by_side(setup, trace_curve, jobs, bar)
    plain = {
        name: {one.policy: one for one in curves if one.workload == name and one.width == 1} for name in NAMES
    }
    wide: Wide = {}
    for one in curves:
        if one.width > 1:
            wide.setdefault((one.method, one.width), {})[one.policy] = one
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
            " < ".join(f"{one:.2f} × ({width})" for width, one in zip(widths, beams, strict=True)),
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

"""`batched`: how many requests run together where memory is reserved, and where it is paged."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from quire_lab.measure.simulated_runs import (
    PAPER,
    POLICIES,
    RESERVATIONS,
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
from quire_lab.report.figure import GREY, Picture, bar_style

# Figure 13 of the PagedAttention paper: OPT-13B, requests in the batch at (requests per second)
PUBLISHED_RATE = {"sharegpt": 2.0, "alpaca": 30.0}
PUBLISHED = {
    "sharegpt": {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42},
    "alpaca": {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44},
}
LABELS = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "paged"}
Found = dict[str, dict[str, Point]]  # by workload and policy


def run(setup: Setup) -> Finding:
    settings = simulated_settings(setup, PAPER)
    counts = {"sharegpt": setup.pick(120, 500, 4000), "alpaca": setup.pick(500, 2000, 20000)}
    workloads = [workload(name, setup.data, count, setup.seed) for name, count in counts.items()]
    cells = [(each, policy, full) for full in (False, True) for each in workloads for policy in RESERVATIONS]
    jobs = [
        Run(
            {**settings, **POLICIES[policy]},
            cell_workload.lengths,
            math.inf if full else PUBLISHED_RATE[cell_workload.name],
            setup.seed,
        )
        for cell_workload, policy, full in cells
    ]
    with setup.progress(len(jobs), "runs") as bar:
        points = side_by_side(setup, simulate, jobs, bar)
    at_rate: Found = {each.name: {} for each in workloads}
    overloaded: Found = {each.name: {} for each in workloads}
    for (cell_workload, policy, full), point in zip(cells, points, strict=True):
        (overloaded if full else at_rate)[cell_workload.name][policy] = point
    return _finding(setup, settings, workloads, at_rate, overloaded)


def _finding(
    setup: Setup, settings: Mapping[str, Any], workloads: list[Workload], at_rate: Found, overloaded: Found
) -> Finding:
    full = overloaded["sharegpt"]
    more = full["paged"].mean_full / full["max"].mean_full
    published = PUBLISHED["sharegpt"]["paged"] / PUBLISHED["sharegpt"]["max"]
    take_away = (
        f"Under load the same memory holds {full['paged'].mean_full:.1f} ShareGPT requests when it is paged and "
        f"{full['max'].mean_full:.1f} when each reserves the maximum: {more:.1f} times as many (published: "
        f"{published:.1f} times)."
    )
    checks = [
        Check(
            f"{name}, overloaded: Max < Pow2 < Oracle < paged",
            " < ".join(f"{by_policy[policy].mean_full:.1f}" for policy in RESERVATIONS),
            _in_order([by_policy[policy].mean_full for policy in RESERVATIONS]),
        )
        for name, by_policy in overloaded.items()
    ]
    return Finding(
        take_away,
        [_table(workload.name, at_rate[workload.name], overloaded[workload.name]) for workload in workloads],
        [
            Picture(
                "batched",
                "Requests in the batch",
                f"Paging holds {more:.1f} times as many ShareGPT requests as reserving the maximum.",
                lambda figure: _draw(figure, overloaded),
            )
        ],
        {
            "at_published_rate": _record(at_rate),
            "overloaded": _record(overloaded),
            "published": PUBLISHED,
        },
        {
            "seed": setup.seed,
            "engine": dict(settings),
            "rates": PUBLISHED_RATE,
            "num_requests": {workload.name: len(workload.lengths) for workload in workloads},
        },
        checks,
        [
            *basis(settings),
            *(workload.in_words for workload in workloads),
            "at a rate: mean over the time in which requests come; overloaded: all come at once, mean while some wait",
            "published: figure 13 of the PagedAttention paper. Its rate was at its system's limit, which the simulated "
            "engine's shorter steps do not reach: compare it with ours overloaded",
        ],
    )


def _in_order(values: list[float]) -> bool:
    return all(low < high for low, high in pairwise(values))


def _record(found: Found) -> dict[str, Any]:
    return {name: {policy: asdict(point) for policy, point in one.items()} for name, one in found.items()}


def _table(name: str, at_rate: dict[str, Point], overloaded: dict[str, Point]) -> Table:
    rate, published = PUBLISHED_RATE[name], PUBLISHED[name]
    rows = [
        [
            LABELS[policy],
            f"{at_rate[policy].mean_running:.2f}",
            f"{overloaded[policy].mean_full:.2f}",
            f"{overloaded[policy].mean_full / overloaded['max'].mean_full:.2f}",
            f"{published[policy]:.2f}",
            f"{published[policy] / published['max']:.2f}",
        ]
        for policy in RESERVATIONS
    ]
    head = [
        "memory",
        f"at {rate:g} requests/s",
        "overloaded",
        "over Max",
        f"published, {rate:g}/s",
        "over Max, published",
    ]
    return Table(f"{name}: mean number of running requests", head, rows)


def _draw(figure: Any, overloaded: Found) -> None:
    axes = figure.subplots(1, len(overloaded))
    for axis, (name, by_policy) in zip(axes, overloaded.items(), strict=True):
        for index, policy in enumerate(RESERVATIONS):
            value, published = by_policy[policy].mean_full, PUBLISHED[name][policy]
            axis.bar(index, value, 0.7, **bar_style(policy))
            axis.text(index, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
            axis.hlines(published, index - 0.42, index + 0.42, color=GREY, linestyle="--")
        axis.plot([], [], color=GREY, linestyle="--", label="published")
        axis.set_xticks(range(len(RESERVATIONS)), [LABELS[policy] for policy in RESERVATIONS])
        axis.set(title=f"{name}, overloaded", ylabel="running requests, mean")
        axis.grid(axis="x", visible=False)
        axis.legend(loc="upper left")


EXPERIMENT = Experiment(
    "batched",
    "How many requests fit at once",
    "A GPU reads all weights for every step, however many requests share it. How many can, under each way to "
    "give them memory?",
    run,
)

"""`sharing`: how many blocks parallel samples and beams share, beside the PagedAttention paper's ranges."""

from typing import Any

from quire_lab.measure.sharing import (
    BLOCK_SIZE,
    CONTEXT,
    METHODS,
    PAPER,
    SHARES,
    WIDTHS,
    Saving,
    SharingWorkload,
    measure_saving,
)
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, bar_style, look

NAMES = ("alpaca", "sharegpt")


def run(setup: Setup) -> Finding:
    count = setup.pick(4, 60, 400)
    drawn = {name: setup.data.lengths(name, count, setup.seed) for name in NAMES}
    workloads = [SharingWorkload(name, sampled.source, sampled.lengths) for name, sampled in drawn.items()]
    savings = []
    with setup.progress(len(NAMES) * count * len(METHODS) * len(WIDTHS), "req") as bar:
        for workload in workloads:
            for method, words in METHODS.items():
                for width in WIDTHS:
                    bar.note(f"{workload.name}, {words}, {width}")
                    savings.append(measure_saving(workload, method, width, setup.seed, bar))
    best = max(savings, key=lambda saving: saving.percent)
    take_away = (
        f"Sharing saves up to {best.percent:.0f} % of the KV blocks ({METHODS[best.method]} with {best.width} "
        f"sequences on {best.workload} lengths): the more of a request its sequences have in common, the more."
    )
    return Finding(
        take_away,
        [_table(savings)],
        [
            Picture(
                "sharing",
                "Blocks saved by sharing",
                _one_line(savings),
                lambda figure: _draw(figure, savings),
            )
        ],
        {"savings": [_record(saving) for saving in savings]},
        {
            "seed": setup.seed,
            "num_requests": count,
            "block_size": BLOCK_SIZE,
            "context": CONTEXT,
            "shares": SHARES,
            "lengths": {name: sampled.source for name, sampled in drawn.items()},
        },
        _checks(savings),
        (
            *(sampled.source for sampled in drawn.values()),
            "saved: blocks saved by sharing over blocks without it, summed over all steps; scheduler and memory are "
            "the engine's own, tokens are random, beams branch as often as the built-in model's do on prose",
            "the paper's ranges: Figure 15 of “Efficient Memory Management for Large Language Model Serving with "
            "PagedAttention”",
            "`quire bench sharing` also measures what it does to beam search on a model",
        ),
    )


def _one_line(savings: list[Saving]) -> str:
    ends = {
        method: [one.percent for one in savings if one.method == method and one.width == WIDTHS[-1]]
        for method in METHODS
    }
    shown = "; ".join(
        f"{METHODS[method]} with {WIDTHS[-1]}: {min(found):.0f} to {max(found):.0f} %"
        for method, found in ends.items()
    )
    return f"{shown} of all blocks saved."


def _table(savings: list[Saving]) -> Table:
    rows = []
    for saving in savings:
        low, high = PAPER[saving.workload, saving.method]
        rows.append(
            [
                saving.workload,
                METHODS[saving.method],
                str(saving.width),
                f"{saving.percent:.1f}",
                f"{low:.0f}–{high:.0f}",
                str(saving.copies),
            ]
        )
    head = [
        "lengths",
        "decoding",
        "sequences",
        "blocks saved, %",
        "the paper's range, %",
        "blocks copied on write",
    ]
    return Table("Blocks saved by sharing", head, rows, left=2)


def _checks(savings: list[Saving]) -> list[Check]:
    checks = []
    for (workload, method), (low, high) in PAPER.items():
        percents = [
            saving.percent for saving in savings if (saving.workload, saving.method) == (workload, method)
        ]
        checks.append(
            Check(
                f"{METHODS[method]} on {workload}-like lengths is within 10 points of {low:.0f}–{high:.0f} %",
                f"{min(percents):.1f}–{max(percents):.1f} %",
                low - 10 <= min(percents) and max(percents) <= high + 10,
            )
        )
    return checks


def _draw(figure: Any, savings: list[Saving]) -> None:
    axes = figure.subplots(1, len(METHODS), sharey=True)
    names = list(dict.fromkeys(saving.workload for saving in savings))
    for axis, (method, words) in zip(axes, METHODS.items(), strict=True):
        for index, name in enumerate(names):
            of_method = [saving for saving in savings if (saving.workload, saving.method) == (name, method)]
            low, high = PAPER[name, method]
            axis.axhspan(
                low, high, color=look(index).color, alpha=0.13, zorder=0, label=f"{name}, the paper's range"
            )
            places = [WIDTHS.index(saving.width) + 0.38 * index for saving in of_method]
            bars = axis.bar(
                places,
                [saving.percent for saving in of_method],
                0.36,
                label=f"{name}, measured",
                **bar_style(index),
            )
            axis.bar_label(bars, fmt="%.0f", fontsize=8)
        axis.set_xticks([i + 0.19 * (len(names) - 1) for i in range(len(WIDTHS))], [str(w) for w in WIDTHS])
        axis.set(title=words, xlabel="sequences per request" if method == "parallel" else "beam width")
        axis.grid(axis="x", visible=False)
    axes[0].set(ylabel="blocks saved by sharing, %", ylim=(0, 100))
    axes[0].legend(loc="upper left")


def _record(one: Saving) -> dict[str, Any]:
    return {
        "workload": one.workload,
        "method": one.method,
        "width": one.width,
        "saved_percent": one.percent,
        "paper_percent": list(PAPER[one.workload, one.method]),
        "num_steps": one.num_steps,
        "copies": one.copies,
    }


EXPERIMENT = Experiment(
    "sharing",
    "What sharing saves",
    "Several answers to one prompt have the prompt in common, and beams more than that. How much memory is that?",
    run,
)

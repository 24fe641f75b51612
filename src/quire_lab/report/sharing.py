"""The results of `bench sharing`: a table beside the paper's numbers, JSON and a picture."""

from collections.abc import Sequence
from typing import Any

from quire.bench.report import BenchReport
from quire.core.errors import ConfigError
from quire_lab.measure.sharing import (
    BLOCK_SIZE,
    CONTEXT,
    METHODS,
    OUTPUT_LEN,
    PAPER,
    SHARES,
    WIDTHS,
    BeamRate,
    Saving,
    SharingWorkload,
)


def sharing_report(
    workloads: Sequence[SharingWorkload],
    savings: Sequence[Saving],
    rates: Sequence[BeamRate],
    settings: dict[str, Any],
) -> BenchReport:
    rows: list[tuple[str, str]] = []
    for workload in workloads:
        mean_in, mean_out = _means(workload)
        rows.append((workload.name, f"{workload.source}: {mean_in:.0f} in, {mean_out:.0f} out on average"))
        for method, words in METHODS.items():
            of_method = [
                saving for saving in savings if (saving.workload, saving.method) == (workload.name, method)
            ]
            low, high = PAPER[workload.name, method]
            shown = ", ".join(f"{saving.width}: {saving.percent:.1f} %" for saving in of_method)
            rows.append((f"  {words}", f"{shown}  (paper: {low:.0f}–{high:.0f} %)"))
    for rate in rates:
        rows.append((
            f"model, beams of {rate.width}",
            f"{rate.shared:,.0f} tokens/s shared, {rate.unshared:,.0f} with --no-share "
            f"({rate.ratio.short('times as fast')}); {rate.saved_percent:.1f} % saved, "
            f"{rate.copies_shared} blocks copied instead of {rate.copies_unshared}, "
            f"{rate.preemptions_shared} preemptions instead of {rate.preemptions_unshared}",
        ))  # fmt: skip
    results = {
        "savings": [_saving(saving) for saving in savings],
        "rates": [_rate(each) for each in rates],
    }
    settings = {
        **settings,
        "workloads": {each.name: each.source for each in workloads},
        "block_size": BLOCK_SIZE,
        "context": CONTEXT,
        "shares": SHARES,
        "model_output_len": OUTPUT_LEN,
    }
    notes = (
        "saved: blocks saved by sharing over blocks without it, summed over all steps",
        "no model: beams branch at random, at Beta(2, 1) shares; every answer runs to its full length",
    )
    return BenchReport("sharing", settings, results, rows, notes)


def plot_sharing(savings: Sequence[Saving], path: str) -> None:
    """Bars for what was found, a band behind each panel for the paper's range."""
    from matplotlib import pyplot

    names = list(dict.fromkeys(saving.workload for saving in savings))
    figure, axes = pyplot.subplots(1, len(METHODS), figsize=(9, 4), sharey=True, layout="constrained")
    for axis, (method, words) in zip(axes, METHODS.items(), strict=True):
        for index, name in enumerate(names):
            of_method = [saving for saving in savings if (saving.workload, saving.method) == (name, method)]
            low, high = PAPER[name, method]
            colour = f"C{index}"
            axis.axhspan(low, high, color=colour, alpha=0.15, zorder=0, label=f"{name}, the paper's range")
            places = [WIDTHS.index(saving.width) + 0.36 * index for saving in of_method]
            bars = axis.bar(
                places, [saving.percent for saving in of_method], 0.34, color=colour, label=f"{name}, here"
            )
            axis.bar_label(bars, fmt="%.0f", fontsize=8)
        axis.set_xticks([i + 0.18 * (len(names) - 1) for i in range(len(WIDTHS))], [str(w) for w in WIDTHS])
        axis.set(title=words, xlabel="sequences" if method == "parallel" else "beam width")
        axis.legend(fontsize=8, loc="upper left")
    axes[0].set(ylabel="blocks saved by sharing, %", ylim=(0, 100))
    figure.suptitle(
        f"KV blocks that sharing saves, blocks of {BLOCK_SIZE} tokens\n{take_away(savings)}", fontsize=10
    )
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: cannot be written ({error})") from error
    finally:
        pyplot.close(figure)


def take_away(savings: Sequence[Saving]) -> str:
    """What the picture says, in one line."""
    parts = []
    for method, words in METHODS.items():
        found = [one.percent for one in savings if one.method == method]
        parts.append(f"{words} saves {min(found):.0f}–{max(found):.0f} %")
    return ", ".join(parts) + ": the more sequences share a prompt, the less each one costs"


def _means(workload: SharingWorkload) -> tuple[float, float]:
    count = len(workload.lengths)
    return (
        sum(one.num_prompt_tokens for one in workload.lengths) / count,
        sum(one.num_output_tokens for one in workload.lengths) / count,
    )


def _saving(saving: Saving) -> dict[str, Any]:
    low, high = PAPER[saving.workload, saving.method]
    return {
        "workload": saving.workload,
        "method": saving.method,
        "width": saving.width,
        "saved_percent": saving.percent,
        "paper_percent": [low, high],
        "num_requests": saving.num_requests,
        "num_too_long": saving.num_too_long,
        "num_steps": saving.num_steps,
        "blocks_shared": saving.blocks_shared,
        "blocks_unshared": saving.blocks_unshared,
        "copies": saving.copies,
    }


def _rate(rate: BeamRate) -> dict[str, Any]:
    return {
        "width": rate.width,
        "tokens_per_second": rate.shared,
        "tokens_per_second_without_sharing": rate.unshared,
        "ratio": rate.ratio.record(),
        "rounds": [list(pair) for pair in rate.rounds],
        "saved_percent": rate.saved_percent,
        "copies": rate.copies_shared,
        "copies_without_sharing": rate.copies_unshared,
        "preemptions": rate.preemptions_shared,
        "preemptions_without_sharing": rate.preemptions_unshared,
    }

"""Tables and pictures of `characterize`."""

import math
from collections.abc import Sequence
from typing import Any

from quire.bench.figure import Picture, bar_style, line_style, plain_log
from quire_lab.experiments.characterize_grid import INPUT, POSITIONS, Measured, gains
from quire_lab.experiments.experiment import Table
from quire_lab.experiments.simulated import in_rate

WORDS = {"paged": "continuous, paged", "unpaged": "continuous, unpaged", "dynamic": "dynamic", "none": "none"}
MOST = 6  # gains that the table lists
LOOKS: dict[str, int | str] = {"paged": "paged", "unpaged": "max", "dynamic": "dynamic", "none": "none"}


def tables(found: Sequence[Measured], devices: Sequence[str]) -> list[Table]:
    return [_gains(found), _grid(found), _devices(found, devices), _blocks(found)]


def pictures(found: Sequence[Measured], model: str) -> list[Picture]:
    return [
        Picture(
            "characterize",
            f"Throughput by batching, {model}",
            "The longer the answers and the higher the load, the more it matters who may join a batch, and when.",
            lambda figure: _draw_grid(figure, found),
            width=11.0,
        ),
        Picture(
            "characterize-blocks",
            f"Throughput and latency against the number of blocks, {model}",
            "More memory means larger batches, until the device's arithmetic is what is left.",
            lambda figure: _draw_blocks(figure, found),
        ),
    ]


def _gains(found: Sequence[Measured]) -> Table:
    """Where paging pays most, and what bounds it: how many more requests the same memory holds."""
    rows = [
        [
            gain.in_words,
            f"{gain.paged.output_rate:,.0f}",
            f"{gain.other.output_rate:,.0f}",
            f"{gain.ratio:.2f}",
            f"{gain.paged.mean_running:.1f}",
            f"{gain.other.mean_running:.1f}",
            f"{POSITIONS / (INPUT + gain.paged.cell.num_outputs):.1f}",
        ]
        for gain in gains(found, "unpaged")[:MOST]
    ]
    head = [
        "where",
        "tokens/s, paged",
        "unpaged",
        "ratio",
        "running, paged",
        "unpaged",
        "memory allows, about",
    ]
    return Table("Where paging pays most (published: up to 4 ×)", head, rows)


def _part(found: Sequence[Measured], part: str) -> list[Measured]:
    return [one for one in found if one.cell.part == part]


def _grid(found: Sequence[Measured]) -> Table:
    rows = [
        [
            f"{one.cell.num_outputs}",
            in_rate(one.cell.rate),
            WORDS[one.cell.batching],
            f"{one.output_rate:,.0f}",
            f"{1e3 * one.normalised:,.1f}",
            f"{1e3 * one.per_token:.1f}",
            f"{one.mean_running:.1f}",
        ]
        for one in _part(found, "grid")
    ]
    head = [
        "outputs",
        "requests/s",
        "batching",
        "tokens/s",
        "latency, ms per token",
        "between tokens, ms",
        "running",
    ]
    return Table("Batching, output lengths and rates", head, rows, left=3)


def _devices(found: Sequence[Measured], devices: Sequence[str]) -> Table:
    cells = {
        (one.cell.model, one.cell.device, one.cell.batching): one
        for one in _part(found, "devices")
        if one.cell.num_outputs == 128 and math.isinf(one.cell.rate)
    }
    models = list(dict.fromkeys(model for model, _, _ in cells))
    rows = []
    for model in models:
        ones = {
            batching: [cells[model, device, batching] for device in devices]
            for batching in ("paged", "unpaged")
        }
        for batching, line in ones.items():
            shown = ["does not fit" if one.fault else f"{one.output_rate:,.0f}" for one in line]
            rows.append([model, WORDS[batching], *shown])
        ratios = [
            "" if paged.fault or other.fault else f"{paged.output_rate / other.output_rate:.2f}"
            for paged, other in zip(ones["paged"], ones["unpaged"], strict=True)
        ]
        rows.append([model, "ratio", *ratios])
    names = [device.removeprefix("simulated:") for device in devices]
    return Table(
        "Models and devices, 128 out, all at once: tokens per second",
        ["model", "batching", *names],
        rows,
        left=2,
    )


def _blocks(found: Sequence[Measured]) -> Table:
    rows = [
        [
            f"{one.cell.num_blocks:,}",
            WORDS[one.cell.batching],
            *(
                ("no request fits", "", "", "", "")
                if one.fault
                else (
                    f"{one.output_rate:,.0f}",
                    f"{1e3 * one.normalised:,.1f}",
                    f"{1e3 * one.per_token:.1f}",
                    f"{one.mean_running:.1f}",
                    f"{one.num_preemptions:,}",
                )
            ),
        ]
        for one in _part(found, "blocks")
    ]
    head = ["blocks of 16", "batching", "tokens/s", "latency, ms per token", "between tokens, ms", "running"]
    return Table(
        "The number of blocks, 128 out, all at once: the same memory", [*head, "preempted"], rows, left=2
    )


def _draw_grid(figure: Any, found: Sequence[Measured]) -> None:
    ones = _part(found, "grid")
    rates = list(dict.fromkeys(one.cell.rate for one in ones))
    outputs = list(dict.fromkeys(one.cell.num_outputs for one in ones))
    for axis, rate in zip(figure.subplots(1, len(rates), sharey=True), rates, strict=True):
        for place, batching in enumerate(WORDS):
            values = [
                one.output_rate for one in ones if one.cell.rate == rate and one.cell.batching == batching
            ]
            axis.bar(
                [x + 0.2 * (place - 1.5) for x in range(len(outputs))],
                values,
                0.19,
                label=WORDS[batching],
                **bar_style(LOOKS[batching]),
            )
        axis.set_xticks(range(len(outputs)), [str(one) for one in outputs])
        title = "all at once" if math.isinf(rate) else f"{rate:g} requests per second"
        axis.set(title=title, xlabel="output tokens")
        plain_log(axis, "y")
        axis.grid(axis="x", visible=False)
        if rate == rates[0]:
            axis.set_ylabel("tokens per second")
            handles, labels = axis.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=4)


def _draw_blocks(figure: Any, found: Sequence[Measured]) -> None:
    left, right = figure.subplots(1, 2)
    series = {
        batching: [one for one in _part(found, "blocks") if one.cell.batching == batching and not one.fault]
        for batching in ("paged", "unpaged")
    }
    for batching, ones in series.items():
        blocks = [one.cell.num_blocks for one in ones]
        look = line_style(LOOKS[batching])
        left.plot(blocks, [one.output_rate for one in ones], label=WORDS[batching], **look)
        arrived = [1e3 * one.normalised for one in ones]
        right.plot(blocks, arrived, label=f"from arrival, {batching}", **look)
        between = [1e3 * one.per_token for one in ones]
        right.plot(blocks, between, label=f"between tokens, {batching}", **look, alpha=0.45)
    left.set(title="throughput", xlabel="blocks of 16 tokens", ylabel="tokens per second")
    right.set(title="latency", xlabel="blocks of 16 tokens", ylabel="ms per token")
    plain_log(right, "y")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(
            [one.cell.num_blocks for one in series["paged"]],
            [f"{one.cell.num_blocks:,}" for one in series["paged"]],
        )
    left.legend(loc="upper left")
    right.legend(loc="upper right")

"""Latency over users for each slice of a GPU, with the SLO as a line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.fleet.mig import Card
from quire_lab.measure.slices import SliceLatency, Slo
from quire_lab.report.figure import GREY, Picture, line_style, write_picture


def draw(points: Sequence[SliceLatency], card: Card, slo: Slo, path: Path) -> Path:
    return write_picture(picture_of(points, card, slo, path.stem), path.parent, path.suffix)


def picture_of(points: Sequence[SliceLatency], card: Card, slo: Slo, name: str) -> Picture:
    def fill(figure: Any) -> None:
        panels = figure.subplots(1, 2)
        sides = (("ms per token", 1e3, slo.per_token), ("seconds per request", 1.0, slo.per_request))
        for panel, (label, unit, limit) in zip(panels, sides, strict=True):
            for index, profile in enumerate(card.profiles):
                of_slice = [p for p in points if p.profile == profile.name and not p.why]
                values = [unit * (p.per_token if unit > 1 else p.per_request) for p in of_slice]
                panel.plot([p.users for p in of_slice], values, label=profile.name, **line_style(index))
            panel.axhline(unit * limit, color=GREY, linewidth=1)
            panel.set(xscale="log", yscale="log", xlabel="users at once", ylabel=label)
            panel.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
        panels[0].legend(fontsize=7)

    return Picture(
        name,
        f"Latency over users on the slices of {card.name}",
        f"grey: {1e3 * slo.per_token:g} ms per token and {slo.per_request:g} s per request; simulated",
        fill,
    )

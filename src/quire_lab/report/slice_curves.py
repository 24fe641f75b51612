"""Latency over users for each slice of a GPU: as a table, and as a picture with the SLO as a line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench.table import aligned, counted
from quire.fleet.mig import Card
from quire_lab.measure.slices import SliceLatency, Slo, most_users
from quire_lab.report.figure import GREY, Picture, line_style, write_picture


def table(points: Sequence[SliceLatency], card: Card, slo: Slo) -> str:
    """One row per slice; below, why slices are too small."""
    users = sorted({point.users for point in points})
    rows = [["slice", *(counted(count, "user") for count in users), "meets the SLO up to"]]
    notes = []
    for profile in card.profiles:
        of_slice = {point.users: point for point in points if point.profile == profile.name}
        refused = next((point.why for point in of_slice.values() if point.why), "")
        if refused:
            notes.append(f"{profile.name}: {refused}")
        cells = [_cell(of_slice.get(count), slo) for count in users]
        most = most_users(points, profile.name, slo)
        rows.append([profile.name, *cells, counted(most, "user") if most else "—"])
    title = (
        f"ms per token / seconds per request (95th percentiles, simulated), {slo.prompt_tokens} tokens in and "
        f"{slo.output_tokens} out; * misses {1e3 * slo.per_token:g} ms or {slo.per_request:g} s"
    )
    return "\n".join([title, aligned(rows, right=tuple(range(1, len(users) + 2))), *notes])


def _cell(point: SliceLatency | None, slo: Slo) -> str:
    if point is None or point.why:
        return "—"
    return f"{1e3 * point.per_token:.1f} / {point.per_request:.2f}{' ' if point.meets(slo) else '*'}"


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

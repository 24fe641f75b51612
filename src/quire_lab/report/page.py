"""One HTML page over all experiments: nothing is loaded from elsewhere, and it prints well."""

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from quire.bench.figure import Picture
from quire.bench.table import in_bytes, in_seconds
from quire_lab.report.experiment import Check, Table
from quire_lab.report.files import Done, Failed

STYLE_FILE = Path(__file__).with_name("page.css")


def as_page(
    done: Sequence[Done], failed: Sequence[Failed], still_to_come: Sequence[str], command: str
) -> str:
    """The whole page as text."""
    body = [
        "<header><h1>Quire's laboratory</h1>",
        "<p>Experiments that compare the engine with itself. Every number on this page comes from the runs "
        "that are named with it.</p>",
        _machine(done, command),
        _contents(done),
        "</header>",
        *map(_section, done),
        *map(_failure, failed),
    ]
    if still_to_come:
        body.append(f"<p class=note>Not run yet: {escape(', '.join(still_to_come))}.</p>")
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>Quire's laboratory</title>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE_FILE.read_text(encoding='utf-8')}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _machine(done: Sequence[Done], command: str) -> str:
    rows = [("date", datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")), ("command", command)]
    if done:
        record = done[0].record
        machine, versions = record["machine"], record["versions"]
        gpus = ", ".join(f"{one['name']} ({in_bytes(one['memory_bytes'])})" for one in machine["gpus"])
        rows += [
            ("processor", f"{machine['cpu']}, {machine['usable_cores']} cores used"),
            ("memory", in_bytes(machine["memory_bytes"])),
            ("GPU", gpus or "none"),
            ("system", machine["system"]),
            ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
            ("time taken", in_seconds(sum(one.seconds for one in done))),
        ]
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table class=machine>{cells}</table>"


def _contents(done: Sequence[Done]) -> str:
    items = "".join(
        f"<li><a href='#{one.experiment.name}'>{escape(one.experiment.title)}</a>: "
        f"{escape(one.finding.take_away)}</li>"
        for one in done
    )
    return f"<nav><h2>What was found</h2><ol>{items}</ol></nav>"


def _section(done: Done) -> str:
    experiment, finding = done.experiment, done.finding
    parts = [
        f"<section id='{experiment.name}'><h2>{escape(experiment.title)}</h2>",
        f"<p class=question>{escape(experiment.question)}</p>",
        f"<p class=take-away>{escape(finding.take_away)}</p>",
        *(_picture(one, path) for one, path in zip(finding.pictures, done.pictures, strict=True)),
        *map(_table, finding.tables),
        _checks(finding.checks),
        _notes([*finding.notes, *_about(done)]),
        "</section>",
    ]
    return "\n".join(parts)


def _about(done: Done) -> list[str]:
    took = f"quire bench lab {done.experiment.name} took {in_seconds(done.seconds)}"
    return [done.disturbed, took] if done.disturbed else [took]


def _picture(picture: Picture, path: Path) -> str:
    content = base64.b64encode(path.read_bytes()).decode("ascii")
    words = escape(f"{picture.title}. {picture.take_away}", quote=True)
    return f'<figure><img alt="{words}" src="data:image/png;base64,{content}"></figure>'


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{'' if place < table.left else ' class=number'}>{escape(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )

    rows = "".join(f"<tr>{row(one, 'td')}</tr>" for one in table.rows)
    return (
        f"<table><caption>{escape(table.title)}</caption><thead><tr>{row(table.head, 'th')}</tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _checks(checks: Sequence[Check]) -> str:
    if not checks:
        return ""
    rows = "".join(
        f"<tr><td class={'held' if one.held else 'missed'}>{'yes' if one.held else 'no'}</td>"
        f"<td>{escape(one.claim)}</td><td>{escape(one.measured)}</td></tr>"
        for one in checks
    )
    return f"<table class=checks><caption>Expected, and found</caption><tbody>{rows}</tbody></table>"


def _notes(notes: Sequence[Any]) -> str:
    return "<ul class=note>" + "".join(f"<li>{escape(str(one))}</li>" for one in notes) + "</ul>"


def _failure(failed: Failed) -> str:
    return (
        f"<section id='{failed.name}'><h2>{escape(failed.name)}</h2>"
        f"<p class=missed>Did not run: {escape(failed.reason)}</p></section>"
    )

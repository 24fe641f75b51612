"""One HTML page over all experiments, from `page.html.jinja`: nothing is loaded from elsewhere, and it prints well."""

import base64
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from quire.bench.table import in_bytes, in_seconds
from quire_lab.report.figure import Picture
from quire_lab.report.files import Done, Failed

FOLDER = Path(__file__).parent
TEMPLATE_FILE, STYLE_FILE = "page.html.jinja", "page.css"


def as_page(
    done: Sequence[Done], failed: Sequence[Failed], still_to_come: Sequence[str], command: str
) -> str:
    """The whole page as text. Values are escaped by the template engine."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["as_base64"] = _as_base64
    return environment.get_template(TEMPLATE_FILE).render(
        style=Markup((FOLDER / STYLE_FILE).read_text(encoding="utf-8")),
        machine=_machine(done, command),
        all_done=done,
        failed=failed,
        not_run=still_to_come,
        pictures=_pictures,
        notes=_notes,
    )


def _machine(done: Sequence[Done], command: str) -> list[tuple[str, str]]:
    """Names and values of the table at the head."""
    rows = [("date", datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC")), ("command", command)]
    if done:
        record = done[0].record
        machine, versions = record["machine"], record["versions"]
        gpus = ", ".join(f"{gpu['name']} ({in_bytes(gpu['memory_bytes'])})" for gpu in machine["gpus"])
        rows += [
            ("processor", f"{machine['cpu']}, {machine['usable_cores']} cores used"),
            ("memory", in_bytes(machine["memory_bytes"])),
            ("GPU", gpus or "none"),
            ("system", machine["system"]),
            ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
            ("time taken", in_seconds(sum(each.seconds for each in done))),
        ]
    return rows


def _pictures(done: Done) -> Iterable[tuple[Picture, Path]]:
    return zip(done.finding.pictures, done.pictures, strict=True)


def _notes(done: Done) -> list[str]:
    duration = f"quire bench lab {done.experiment.name} took {in_seconds(done.seconds)}"
    return [*map(str, done.finding.notes), *([done.disturbed] if done.disturbed else []), duration]


def _as_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode("ascii")

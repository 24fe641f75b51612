"""What an experiment found, written down: the table as text, the pictures, the record, and a page over all."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.report import BenchReport
from quire.bench.table import aligned
from quire.core.errors import ConfigError
from quire_lab.report.experiment import Experiment, Finding, Table
from quire_lab.report.figure import write_picture


@dataclass(frozen=True, slots=True)
class Done:
    """One experiment that ran, and where its files are. `record` is what its JSON holds."""

    experiment: Experiment
    finding: Finding
    pictures: Sequence[Path]
    record: dict[str, Any]
    seconds: float
    disturbed: str  # what others did to the machine meanwhile, in words; empty where it was quiet


@dataclass(frozen=True, slots=True)
class Failed:
    name: str
    reason: str


def write_finding(
    experiment: Experiment, finding: Finding, seconds: float, folder: Path, load: float = 0.0
) -> Done:
    """`NAME.json`, `NAME.txt` and a PNG for each picture. `load`: the machine's when it began."""
    pictures = [write_picture(picture, folder) for picture in finding.pictures]
    record = json.loads(_report(experiment, finding, seconds).as_json())
    record["results"]["load_average_before"] = round(load, 2)
    record["results"]["pictures"] = [path.name for path in pictures]
    write_text(folder / f"{experiment.name}.json", json.dumps(record, indent=2) + "\n")
    done = Done(experiment, finding, pictures, record, seconds, _disturbed(load))
    write_text(folder / f"{experiment.name}.txt", as_text(done) + "\n")
    return done


def make_folder(path: str) -> Path:
    """The output folder, there and writable before anything is measured."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".quire-lab"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--output-dir {path}: cannot be written ({error})") from error
    return folder


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-dir {path.parent}: {path.name} cannot be written ({error})") from error


def as_text(done: Done) -> str:
    finding = done.finding
    parts = [
        f"{done.experiment.name}: {done.experiment.title}",
        finding.take_away,
        *map(_table, finding.tables),
    ]
    checks = [
        f"{'NO ' if check.held is False else check.outcome}  {check.claim}: {check.measured}"
        for check in finding.checks
    ]
    if checks:
        parts.append("\n".join(checks))
    notes = [*finding.notes, done.disturbed] if done.disturbed else finding.notes
    if notes:
        parts.append("\n".join(f"· {note}" for note in notes))
    return "\n\n".join(parts)


def load_average() -> float:
    """Of the last minute; 0 where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return 0.0


def _disturbed(load: float) -> str:
    """An experiment before this one may have filled every processor: what is twice that is others'."""
    processors = os.cpu_count() or 1
    if load <= 2 * processors:
        return ""
    return (
        f"the machine was busy when this began (load {load:.1f} on {processors} processors): "
        "times are disturbed, counts and shares are not"
    )


def _table(table: Table) -> str:
    right = range(table.left, len(table.head))
    return f"{table.title}\n{aligned([table.head, *table.rows], right=right)}"


def _report(experiment: Experiment, finding: Finding, seconds: float) -> BenchReport:
    results = {
        "take_away": finding.take_away,
        "checks": [
            {"claim": check.claim, "measured": check.measured, "held": check.held} for check in finding.checks
        ],
        **finding.results,
        "tables": [
            {"title": table.title, "head": list(table.head), "rows": [list(row) for row in table.rows]}
            for table in finding.tables
        ],
        "notes": list(finding.notes),
        "seconds_taken": round(seconds, 2),
    }
    return BenchReport(f"lab {experiment.name}", finding.settings, results, ())

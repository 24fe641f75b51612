"""Traces: when requests came and how long they were, from CSV or JSON lines."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.bench.lengths import OUTPUT_COLUMNS, PROMPT_COLUMNS, Lengths
from quire.core.errors import ConfigError

TIME_COLUMNS = ("timestamp", "arrival", "arrival_time", "time", "at")
PREFIX_COLUMNS = ("hash_ids",)
_MILLISECONDS = (".jsonl", ".ndjson")  # Mooncake's traces count in them; CSV traces have seconds or dates


@dataclass(frozen=True, slots=True)
class TraceRow:
    lengths: Lengths
    at: float | None = None  # seconds on any clock; None: the trace has no times
    prefix_ids: tuple[int, ...] = ()  # names of the prompt's pieces: equal ones are equal text


def read_trace(path: str) -> list[TraceRow]:
    """The rows that have a prompt and an answer, in the order of their times."""
    try:
        with Path(path).expanduser().open(newline="", encoding="utf-8-sig") as file:
            rows = list(_rows(path, file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--dataset-path {path}: cannot be read ({error})") from error
    rows = [row for row in rows if row.lengths.num_prompt_tokens > 0 and row.lengths.num_output_tokens > 0]
    if not rows:
        raise ConfigError(f"--dataset-path {path}: holds no request with a prompt and an answer")
    return sorted(rows, key=lambda row: row.at or 0.0)


def _rows(path: str, file: Any) -> Iterator[TraceRow]:
    is_json = path.endswith(_MILLISECONDS)
    scale = 1e-3 if is_json else 1.0
    records = _objects(path, file) if is_json else enumerate(csv.DictReader(file), 2)
    for number, record in records:
        place = f"--dataset-path {path} line {number}"
        yield _row(place, {str(key).strip().lower(): value for key, value in record.items()}, scale)


def _objects(path: str, file: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--dataset-path {path} line {number}: is no valid JSON ({error})") from error
        if not isinstance(found, dict):
            raise ConfigError(f"--dataset-path {path} line {number}: is no JSON object")
        yield number, found


def _row(place: str, record: Mapping[str, Any], scale: float) -> TraceRow:
    prompt, output = _found(record, PROMPT_COLUMNS), _found(record, OUTPUT_COLUMNS)
    if prompt is None or output is None:
        wanted = PROMPT_COLUMNS if prompt is None else OUTPUT_COLUMNS
        raise ConfigError(f"{place}: has {', '.join(record)}, but none of {', '.join(wanted)}")
    at, prefix_ids = _found(record, TIME_COLUMNS), _found(record, PREFIX_COLUMNS)
    try:
        lengths = Lengths(int(float(prompt)), int(float(output)))
        seconds = None if at in (None, "") else _seconds(at, scale)
        return TraceRow(lengths, seconds, tuple(int(one) for one in prefix_ids or ()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: cannot be read ({error})") from error


def _found(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if name in record), None)


def _seconds(value: Any, scale: float) -> float:
    """A number of seconds (in JSON lines: milliseconds), or a date with a time, as Azure's traces have it."""
    try:
        return float(value) * scale
    except ValueError:
        return datetime.fromisoformat(str(value)).timestamp()

"""Arrival times: all at once, a random process of a given rate, or a trace from CSV or JSON lines."""

import csv
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.bench.lengths import OUTPUT_COLUMNS, PROMPT_COLUMNS, Lengths
from quire.core.errors import ConfigError


def arrival_times(count: int, rate: float, burstiness: float, source: random.Random) -> list[float]:
    """Seconds from the start. Gaps are gamma distributed with mean 1 / rate; at an infinite rate there are none.

    `burstiness` is the shape: 1 makes it a Poisson process, less makes bursts and pauses, more evens it out.
    """
    if not rate > 0:
        raise ConfigError(
            f"--request-rate {rate:g} is no rate: give requests per second, or inf for all at once"
        )
    if not burstiness > 0:
        raise ConfigError(f"--burstiness {burstiness:g} must be more than 0 (1: Poisson)")
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += source.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def replayed(timestamps: Sequence[float], speed: float) -> list[float]:
    """A trace's own times, from 0, `speed` times as fast."""
    if not speed > 0:
        raise ConfigError(f"--trace-speed {speed:g} must be more than 0 (2: twice as fast)")
    first = min(timestamps, default=0.0)
    return [(timestamp - first) / speed for timestamp in timestamps]


TIME_COLUMNS = ("timestamp", "arrival", "arrival_time", "time", "at")
PREFIX_COLUMNS = ("hash_ids",)
_MILLISECONDS = (".jsonl", ".ndjson")  # Mooncake's traces count in them; CSV traces have seconds or dates


@dataclass(frozen=True, slots=True)
class TraceRow:
    lengths: Lengths
    at: float | None = None  # seconds on any clock; None: the trace has no times
    prefix_ids: tuple[int, ...] = ()  # hashes of the prompt's blocks: equal hashes are equal text


def read_trace(path: str) -> list[TraceRow]:
    """The rows that have a prompt and an answer, in order of time."""
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
        where = f"--dataset-path {path} line {number}"
        yield _row(where, {str(key).strip().lower(): value for key, value in record.items()}, scale)


def _objects(path: str, file: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--dataset-path {path} line {number}: is no valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise ConfigError(f"--dataset-path {path} line {number}: is no JSON object")
        yield number, record


def _row(where: str, record: Mapping[str, Any], scale: float) -> TraceRow:
    prompt, output = _first_of(record, PROMPT_COLUMNS), _first_of(record, OUTPUT_COLUMNS)
    if prompt is None or output is None:
        wanted = PROMPT_COLUMNS if prompt is None else OUTPUT_COLUMNS
        raise ConfigError(f"{where}: has {', '.join(record)}, but none of {', '.join(wanted)}")
    at, prefix_ids = _first_of(record, TIME_COLUMNS), _first_of(record, PREFIX_COLUMNS)
    try:
        lengths = Lengths(int(float(prompt)), int(float(output)))
        seconds = None if at in (None, "") else _seconds(at, scale)
        return TraceRow(lengths, seconds, tuple(int(name) for name in prefix_ids or ()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: cannot be read ({error})") from error


def _first_of(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((record[name] for name in names if name in record), None)


def _seconds(value: Any, scale: float) -> float:
    """A number of seconds (in JSON lines: milliseconds), or a date with a time, as Azure's traces have it."""
    try:
        return float(value) * scale
    except ValueError:
        return datetime.fromisoformat(str(value)).timestamp()

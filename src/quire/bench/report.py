"""A benchmark's report: JSON with all that is needed to judge and repeat it, and a table to read."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.machine import describe_environment, describe_kernels, describe_origin
from quire.bench.table import aligned
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build import Built


@dataclass(frozen=True, slots=True)
class BenchReport:
    """`results` is for programs, `rows` says the same for people."""

    benchmark: str
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    rows: Sequence[tuple[str, str]]
    notes: Sequence[str] = field(default_factory=tuple)

    def as_json(self) -> str:
        kernels = describe_kernels(compiled_only=True)
        kernels.pop("path", None)  # a record may be published: no paths of this machine
        record = {
            "benchmark": self.benchmark,
            **describe_origin(),
            "kernels": kernels,
            "environment": describe_environment(),
            "settings": self.settings,
            "results": self.results,
        }
        return json.dumps(_plain(record), indent=2, allow_nan=False)

    def as_text(self) -> str:
        table = aligned([[name, value] for name, value in self.rows])
        return "\n".join([f"{self.benchmark}", table, *self.notes])


def _plain(value: Any) -> Any:
    """`value` with the floats that JSON lacks replaced: infinity by "inf", as users write a rate, NaN by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def write_json(report: BenchReport, path: str) -> None:
    try:
        Path(path).expanduser().write_text(report.as_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json {path}: cannot be written ({error})") from error


def check_positive(plan: Any, *names: str) -> None:
    """ConfigError, naming the flag, for a field of `plan` that is less than 1."""
    for name in names:
        if getattr(plan, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(plan, name)}: give at least 1")


def model_row(built: Built) -> tuple[str, str]:
    """The first row of a report on an engine of this process."""
    report = built.report
    return "model", f"{report.model}, {report.precision.format_name}, {report.start.num_threads} threads"


def engine_record(config: EngineConfig, built: Built) -> dict[str, Any]:
    """The requested settings, and what the engine decided."""
    decided = built.report
    return {
        "asked": asdict(config),
        "decided": {
            "model": decided.model,
            "format": decided.precision.format_name,
            "device": str(decided.precision.device),
            "kv_dtype": decided.precision.kv_dtype,
            "weights_bytes": decided.start.weights_bytes,
            "pool_bytes": decided.pool.num_bytes,
            "pool_tokens": decided.pool.num_tokens,
            "max_model_len": decided.limits.max_model_len,
            "max_num_seqs": decided.limits.max_num_seqs,
            "max_num_batched_tokens": decided.limits.max_num_batched_tokens,
            "num_threads": decided.start.num_threads,
        },
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles; of no values, nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "median": percentile(ordered, 50),
        "p90": percentile(ordered, 90),
        "p99": percentile(ordered, 99),
        "min": ordered[0],
        "max": ordered[-1],
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, linear between neighbours, as numpy has it."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

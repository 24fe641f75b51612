"""Workloads: lengths of prompts and answers, arrival times, traces from CSV or JSON lines, and prompts of words."""

import csv
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lengths:
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def total(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Clipped to [low, high]; `mean` is that of the distribution before clipping."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        location = math.log(self.mean) - self.sigma**2 / 2
        return max(self.low, min(self.high, round(source.lognormvariate(location, self.sigma))))


# prompt and output; the means are those of the PagedAttention paper's two workloads
DISTRIBUTIONS = {
    "sharegpt": (LogNormal(161, 1.0, 4, 1024), LogNormal(338, 0.9, 4, 1024)),
    "alpaca": (LogNormal(19, 0.5, 4, 256), LogNormal(58, 1.0, 4, 512)),
}


def fixed(num_prompt_tokens: int, num_output_tokens: int, count: int) -> list[Lengths]:
    if num_prompt_tokens < 1 or num_output_tokens < 1:
        raise ConfigError(
            f"--input-len and --output-len are {num_prompt_tokens} and {num_output_tokens}: give at least 1"
        )
    return [Lengths(num_prompt_tokens, num_output_tokens)] * count


def named(name: str, count: int, seed: int) -> list[Lengths]:
    if name not in DISTRIBUTIONS:
        raise ConfigError(f"--lengths {name} is not known: choose one of {', '.join(DISTRIBUTIONS)}")
    source = random.Random(seed)
    prompt, output = DISTRIBUTIONS[name]
    return [Lengths(prompt.draw(source), output.draw(source)) for _ in range(count)]


def from_csv(path: str, count: int, seed: int) -> list[Lengths]:
    """`count` rows in random order, again from the start where the file has fewer."""
    rows = [row.lengths for row in _read_rows(path, path)]
    order = random.Random(seed)
    chosen: list[Lengths] = []
    while len(chosen) < count:
        chosen += order.sample(rows, min(len(rows), count - len(chosen)))
    return chosen


def within(lengths: Sequence[Lengths], max_model_len: int) -> tuple[list[Lengths], int]:
    """The requests that fit the context, and the number left out."""
    held = [request for request in lengths if request.total <= max_model_len]
    if not held:
        shortest = min(request.total for request in lengths)
        raise ConfigError(
            f"no request fits the context of {max_model_len} tokens, the shortest has {shortest}: "
            "raise --max-model-len or ask for shorter ones"
        )
    return held, len(lengths) - len(held)


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


# ---------------------------------------------------------------------- traces

# columns of common traces: Quire's, vLLM's, Azure's, Mooncake's
PROMPT_COLUMNS = (
    *("prompt_tokens", "num_prompt_tokens", "prompt_len", "input_len", "input_length", "contexttokens"),
    *("prompt", "input"),
)
OUTPUT_COLUMNS = (
    *("output_tokens", "num_output_tokens", "output_len", "output_length", "generatedtokens", "output"),
    "completion_tokens",
)
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
    return sorted(_read_rows(path, f"--dataset-path {path}"), key=lambda row: row.at or 0.0)


def _read_rows(path: str, what: str) -> list[TraceRow]:
    """The rows that have a prompt and an answer; errors begin with `what`."""
    is_json = path.endswith(_MILLISECONDS)
    try:
        with Path(path).expanduser().open(newline="", encoding="utf-8-sig") as file:
            records = _objects(what, file) if is_json else enumerate(csv.DictReader(file), 2)
            rows = [
                _row(f"{what} line {number}", record, 1e-3 if is_json else 1.0) for number, record in records
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{what}: cannot be read ({error})") from error
    rows = [row for row in rows if row.lengths.num_prompt_tokens > 0 and row.lengths.num_output_tokens > 0]
    if not rows:
        raise ConfigError(f"{what}: holds no request with a prompt and an answer")
    return rows


def _objects(what: str, file: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{what} line {number}: is no valid JSON ({error})") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{what} line {number}: is no JSON object")
        yield number, record


def _row(where: str, record: Mapping[str, Any], scale: float) -> TraceRow:
    record = {str(key).strip().lower(): value for key, value in record.items()}
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


# ---------------------------------------------------------------------- prompts

DATASETS = ("random", "sharegpt", "alpaca", "trace")
PREFIX_TOKENS = 512  # of a prompt block that a trace names by a hash
# Each is one token in the vocabularies of most models, alone and after a space: a prompt of n words has n tokens on
# any server. The count that is reported is the server's own (`usage`).
_WORDS = """
the of and to in is that for it was with as on be at by this have from or had not are but what all were when
we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made
over did down only way find use may water long little very after words called just where most know get
through back much before go good new write our used me man too any day same right look think also around
another came come work three word must because does part even place well such here take why things help put
years different away again off went old number great tell men say small every found still between name
should home big give air line set own under read last
"""
WORDS = _WORDS.split()


@dataclass(frozen=True, slots=True)
class Query:
    """One request: its prompt, and the number of tokens to generate."""

    prompt: str
    lengths: Lengths
    at: float | None = None  # seconds on the trace's clock; None: the plan decides


@dataclass(frozen=True, slots=True)
class Workload:
    queries: Sequence[Query]
    source: str  # a description, for the report
    num_too_long: int = 0  # left out: longer than the server's context

    @property
    def has_times(self) -> bool:
        return all(query.at is not None for query in self.queries)

    def times(self, rate: float | None, burstiness: float, speed: float, seed: int) -> list[float]:
        """When each query is sent, in seconds from the start. Without a rate the trace's own times count."""
        if rate is not None:
            return arrival_times(len(self.queries), rate, burstiness, random.Random(f"arrivals {seed}"))
        if not self.has_times:
            raise ConfigError("the dataset has no times: give --request-rate")
        return replayed([query.at or 0.0 for query in self.queries], speed)


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """`max_total_tokens` is the server's context, where it says one: longer requests are left out."""

    dataset: str = "random"
    path: str | None = None
    num_prompts: int = 100
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0  # lengths are uniform within ± this fraction
    seed: int = 0
    max_total_tokens: int | None = None
    part: int = 0  # of a sweep: each part has different prompts


def make_workload(plan: WorkloadPlan) -> Workload:
    """The same plan makes the same prompts."""
    if plan.num_prompts < 1:
        raise ConfigError(f"--num-prompts is {plan.num_prompts}: give at least 1")
    rows, source = _trace_rows(plan)
    limit = plan.max_total_tokens
    kept = rows
    if limit is not None:
        within([row.lengths for row in rows], limit)  # says so if nothing fits
        kept = [row for row in rows if row.lengths.total <= limit]
    words = random.Random(f"words {plan.seed} {plan.part}")
    queries = [Query(_prompt(row, words, f"{plan.seed} {plan.part}"), row.lengths, row.at) for row in kept]
    return Workload(queries, source, len(rows) - len(kept))


def _trace_rows(plan: WorkloadPlan) -> tuple[list[TraceRow], str]:
    count, seed = plan.num_prompts, plan.seed
    if plan.path is not None and plan.dataset == "trace":
        rows = read_trace(plan.path)
        return [rows[i % len(rows)] for i in range(count)] if rows[0].at is None else rows[:count], plan.path
    if plan.path is not None:  # lengths from a file, in random order
        rows = read_trace(plan.path)
        chance = random.Random(seed)
        return [TraceRow(chance.choice(rows).lengths) for _ in range(count)], plan.path
    if plan.dataset == "trace":
        raise ConfigError("--dataset trace needs the trace: give --dataset-path FILE")
    if plan.dataset != "random":
        return [
            TraceRow(lengths) for lengths in named(plan.dataset, count, seed)
        ], f"{plan.dataset}-like lengths"
    return [TraceRow(lengths) for lengths in _random_lengths(plan)], _description(plan)


def _random_lengths(plan: WorkloadPlan) -> list[Lengths]:
    if plan.input_len < 1 or plan.output_len < 1:
        raise ConfigError(
            f"--random-input-len and --random-output-len are {plan.input_len} and {plan.output_len}: give at least 1"
        )
    if not 0 <= plan.range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {plan.range_ratio:g} is outside 0 to 1")
    chance = random.Random(f"lengths {plan.seed}")

    def near(middle: int) -> int:
        spread = int(middle * plan.range_ratio)
        return max(1, chance.randint(middle - spread, middle + spread))

    return [Lengths(near(plan.input_len), near(plan.output_len)) for _ in range(plan.num_prompts)]


def _description(plan: WorkloadPlan) -> str:
    spread = f", ± {plan.range_ratio:.0%}" if plan.range_ratio else ""
    return f"{plan.input_len} in, {plan.output_len} out{spread}"


def _prompt(row: TraceRow, words: random.Random, seed: str) -> str:
    """Random words; prompt blocks with the same hash in a trace are the same words."""
    count = row.lengths.num_prompt_tokens
    if not row.prefix_ids:
        return " ".join(words.choices(WORDS, k=count))
    prompt: list[str] = []
    for name in row.prefix_ids:
        prompt += random.Random(f"piece {seed} {name}").choices(WORDS, k=PREFIX_TOKENS)
    prompt += words.choices(WORDS, k=max(0, count - len(prompt)))
    return " ".join(prompt[:count])

"""Lengths of prompts and answers: fixed, from a trace, or sampled from a named distribution."""

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
# columns of common traces: Quire's, vLLM's, Azure's, Mooncake's
PROMPT_COLUMNS = (
    "prompt_tokens",
    "num_prompt_tokens",
    "prompt_len",
    "input_len",
    "input_length",
    "contexttokens",
    "prompt",
    "input",
)
OUTPUT_COLUMNS = (
    "output_tokens",
    "num_output_tokens",
    "output_len",
    "output_length",
    "generatedtokens",
    "output",
    "completion_tokens",
)


def fixed(num_prompt_tokens: int, num_output_tokens: int, count: int) -> list[Lengths]:
    return [_checked(Lengths(num_prompt_tokens, num_output_tokens), "--input-len and --output-len")] * count


def named(name: str, count: int, seed: int) -> list[Lengths]:
    if name not in DISTRIBUTIONS:
        raise ConfigError(f"--lengths {name} is not known: choose one of {', '.join(DISTRIBUTIONS)}")
    source = random.Random(seed)
    prompt, output = DISTRIBUTIONS[name]
    return [Lengths(prompt.draw(source), output.draw(source)) for _ in range(count)]


def from_csv(path: str, count: int, seed: int) -> list[Lengths]:
    """`count` rows in random order, again from the start where the file has fewer."""
    rows = _read(path)
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


def _read(path: str) -> list[Lengths]:
    try:
        with Path(path).expanduser().open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            prompt = _column(path, reader.fieldnames or (), PROMPT_COLUMNS)
            output = _column(path, reader.fieldnames or (), OUTPUT_COLUMNS)
            rows = [_row(path, number, row[prompt], row[output]) for number, row in enumerate(reader, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    rows = [row for row in rows if row.num_prompt_tokens > 0 and row.num_output_tokens > 0]
    if not rows:
        raise ConfigError(f"{path}: holds no request with a prompt and an answer")
    return rows


def _column(path: str, columns: Sequence[str], known: Sequence[str]) -> str:
    for name in known:
        for column in columns:
            if column.strip().lower() == name:
                return column
    raise ConfigError(f"{path}: has the columns {', '.join(columns)}, but none of {', '.join(known)}")


def _row(path: str, number: int, prompt: str, output: str) -> Lengths:
    try:
        return Lengths(int(float(prompt)), int(float(output)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} line {number}: {prompt!r}, {output!r} are no two numbers") from error


def _checked(lengths: Lengths, what: str) -> Lengths:
    if lengths.num_prompt_tokens < 1 or lengths.num_output_tokens < 1:
        raise ConfigError(
            f"{what} are {lengths.num_prompt_tokens} and {lengths.num_output_tokens}: give at least 1"
        )
    return lengths

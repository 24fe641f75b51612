"""What `bench serve` asks: prompts of given lengths, and when each is sent."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quire.bench.arrivals import arrival_times, replayed
from quire.bench.lengths import Lengths, named, within
from quire.bench.trace import TraceRow, read_trace
from quire.core.errors import ConfigError

DATASETS = ("random", "sharegpt", "alpaca", "trace")
PREFIX_TOKENS = 512  # of a piece that a trace names by a hash
# Each is one token in the vocabularies of most models, alone and behind a space: a prompt of n words has n tokens,
# whatever server it goes to. How many it had is what the server's usage says.
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
    """One request: what is asked, and how long the answer will be."""

    prompt: str
    lengths: Lengths
    at: float | None = None  # seconds on the trace's clock; None: the plan decides


@dataclass(frozen=True, slots=True)
class Workload:
    queries: Sequence[Query]
    source: str  # in words
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
    range_ratio: float = 0.0  # lengths are drawn from ± that share
    seed: int = 0
    max_total_tokens: int | None = None
    part: int = 0  # of a sweep: each has words of its own


def make_workload(plan: WorkloadPlan) -> Workload:
    """The same plan makes the same prompts."""
    if plan.num_prompts < 1:
        raise ConfigError(f"--num-prompts is {plan.num_prompts}: give at least 1")
    rows, source = _rows(plan)
    limit = plan.max_total_tokens
    held = rows
    if limit is not None:
        within([row.lengths for row in rows], limit)  # says so if nothing fits
        held = [row for row in rows if row.lengths.total <= limit]
    words = random.Random(f"words {plan.seed} {plan.part}")
    queries = [Query(_prompt(row, words, f"{plan.seed} {plan.part}"), row.lengths, row.at) for row in held]
    return Workload(queries, source, len(rows) - len(held))


def _rows(plan: WorkloadPlan) -> tuple[list[TraceRow], str]:
    count, seed = plan.num_prompts, plan.seed
    if plan.path is not None and plan.dataset == "trace":
        rows = read_trace(plan.path)
        return [rows[i % len(rows)] for i in range(count)] if rows[0].at is None else rows[:count], plan.path
    if plan.path is not None:  # lengths of a named kind from a file of one's own, in random order
        rows = read_trace(plan.path)
        chance = random.Random(seed)
        return [TraceRow(chance.choice(rows).lengths) for _ in range(count)], plan.path
    if plan.dataset == "trace":
        raise ConfigError("--dataset trace needs the trace: give --dataset-path FILE")
    if plan.dataset != "random":
        return [TraceRow(one) for one in named(plan.dataset, count, seed)], f"{plan.dataset}-like lengths"
    return [TraceRow(one) for one in _drawn(plan)], _in_words(plan)


def _drawn(plan: WorkloadPlan) -> list[Lengths]:
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


def _in_words(plan: WorkloadPlan) -> str:
    spread = f", ± {plan.range_ratio:.0%}" if plan.range_ratio else ""
    return f"{plan.input_len} in, {plan.output_len} out{spread}"


def _prompt(row: TraceRow, words: random.Random, seed: str) -> str:
    """Random words; pieces that a trace names are the same words wherever the name comes again."""
    count = row.lengths.num_prompt_tokens
    if not row.prefix_ids:
        return " ".join(words.choices(WORDS, k=count))
    found: list[str] = []
    for name in row.prefix_ids:
        found += random.Random(f"piece {seed} {name}").choices(WORDS, k=PREFIX_TOKENS)
    found += words.choices(WORDS, k=max(0, count - len(found)))
    return " ".join(found[:count])

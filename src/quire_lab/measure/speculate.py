"""Speculation against plain decoding: the same requests to each engine in turn, on text that repeats and that does not.

Where drafts are trees, an engine whose drafts are chains runs beside them. Answers end where the model ends them,
except for random prompts. Prompts are found in the prefix cache after the first time, in every engine, so what is
compared is decoding.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.drive import Bench, BenchRequest, plain_token_ids
from quire.bench.report import BenchReport, check_positive, engine_record
from quire.bench.table import aligned
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import Built
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire_lab.report.interval import Interval, Ratio

WORKLOADS = ("quote", "chat", "sampled", "random", "batch")
BATCH = 16  # requests at once in `batch`


@dataclass(frozen=True, slots=True)
class SpeculatePlan:
    num_tokens: int = 128
    rounds: int = 6  # the fewest that give an interval
    workloads: tuple[str, ...] = WORKLOADS
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "num_tokens", "rounds")


@dataclass(frozen=True, slots=True)
class Compared:
    """One workload: tokens per second of each round, plain and with speculation."""

    name: str
    plain: list[float]
    speculating: list[float]
    chains: list[float]  # of drafts without branches; empty if drafts are chains anyway
    num_drafted: int
    num_accepted: int
    seconds: float  # all rounds
    is_same: bool  # every answer has the same tokens

    @property
    def speedup(self) -> Ratio:
        """Of the rounds' own: within a round the engines take turns, so a slow minute hits both."""
        ratios = [fast / slow for fast, slow in zip(self.speculating, self.plain, strict=True)]
        return Ratio(Interval.of(ratios), self.seconds)


def run_speculate(
    config: EngineConfig,
    plain: Built,
    speculating: Built,
    template: ChatTemplate | None,
    plan: SpeculatePlan,
    chains: Built | None = None,
) -> BenchReport:
    """The same requests to each engine, in turns, so that a disturbance hits all alike."""
    benches = [Bench(built, plan.seed) for built in (plain, speculating, chains) if built is not None]
    if benches[0].tokenizer is None or template is None:
        raise ConfigError("this benchmark needs a model with a tokenizer and a chat template")
    compared = []
    for name in plan.workloads:
        requests = _requests(name, plan, plain, benches[0].tokenizer, template)
        compared.append(_compare(name, benches, requests, plan.rounds))
    settings = {
        **engine_record(config, speculating),
        "num_tokens": plan.num_tokens,
        "rounds": plan.rounds,
        "batch": BATCH,
    }
    head = [*_HEAD, "with chains"] if chains is not None else _HEAD
    table = aligned([head, *map(_row, compared)])
    rows = [("model", f"{plain.report.model}, {plain.report.precision.format_name}")]
    results = {workload.name: _result(workload) for workload in compared}
    return BenchReport("speculate", settings, results, rows, ["", table])


def _compare(name: str, benches: list[Bench], requests: list[list[BenchRequest]], rounds: int) -> Compared:
    speculation = benches[1].engine.speculation
    assert speculation is not None
    rates: tuple[list[float], list[float], list[float]] = [], [], []
    expected, *others = (_answers(bench, requests) for bench in benches)  # and warms all up
    drafted, accepted = speculation.stats.num_draft_tokens, speculation.stats.num_accepted_tokens
    started = time.perf_counter()
    for _ in range(rounds):
        for which, rate in enumerate(_round(benches, requests)):
            rates[which].append(rate)
    stats = speculation.stats
    same = all(answers == expected for answers in others)
    return Compared(
        name,
        *rates,
        stats.num_draft_tokens - drafted,
        stats.num_accepted_tokens - accepted,
        time.perf_counter() - started,
        same,
    )


def _round(benches: list[Bench], requests: list[list[BenchRequest]]) -> list[float]:
    """Tokens per second of each engine. They take turns batch by batch, and each comes first as often."""
    seconds, tokens = [0.0] * len(benches), [0] * len(benches)
    for turn, batch in enumerate(requests * 2):
        order = range(len(benches))
        for which in order if (turn + turn // len(requests)) % 2 == 0 else reversed(order):
            run = benches[which].serve(batch)
            seconds[which] += run.seconds
            tokens[which] += run.num_output_tokens
    return [count / spent for count, spent in zip(tokens, seconds, strict=True)]


def _answers(bench: Bench, requests: list[list[BenchRequest]]) -> dict[tuple[str, int], list[int]]:
    engine = bench.engine
    tokens: dict[tuple[str, int], list[int]] = {}
    for batch_index, batch in enumerate(requests):
        for index, request in enumerate(batch):
            engine.add(Request(f"warm-{batch_index}-{index}", request.prompt_token_ids, request.sampling))
        while engine.has_work:
            for update in engine.step():
                tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
    return tokens


# ---------------------------------------------------------------------- workloads


def _requests(
    name: str, plan: SpeculatePlan, built: Built, tokenizer: Tokenizer, template: ChatTemplate
) -> list[list[BenchRequest]]:
    """Batches that are served one after the other."""
    if name not in WORKLOADS:
        raise ConfigError(f"workload {name!r} is not known: choose from {', '.join(WORKLOADS)}")
    greedy = SamplingParams(temperature=0.0, max_tokens=plan.num_tokens)
    endless = greedy.changed(ignore_eos=True)

    def chat(text: str, sampling: SamplingParams = greedy) -> BenchRequest:
        rendered = template.render([{"role": "user", "content": text}])
        return BenchRequest(list(tokenizer.encode(rendered)), sampling)

    makers: dict[str, Callable[[], Sequence[Sequence[BenchRequest]]]] = {
        "quote": lambda: [[chat(_quote(passage))] for passage in PASSAGES],
        "chat": lambda: [[chat(question)] for question in QUESTIONS[:3]],
        "sampled": lambda: [
            [chat(question, greedy.changed(temperature=0.8, top_p=0.95, seed=i))]
            for i, question in enumerate(QUESTIONS[:3])
        ],
        "random": lambda: [[BenchRequest(_random_prompt(built, tokenizer, plan.seed), endless)]],
        "batch": lambda: [[chat(QUESTIONS[i % len(QUESTIONS)]) for i in range(BATCH)]],
    }
    return [list(batch) for batch in makers[name]()]


def _quote(passage: str) -> str:
    return (
        f"{passage}\n\nSummarise this text by quoting it: repeat the most important sentences word for word."
    )


def _random_prompt(built: Built, tokenizer: Tokenizer, seed: int) -> list[int]:
    return random.Random(seed).choices(plain_token_ids(built, tokenizer), k=128)


# ---------------------------------------------------------------------- the table

_HEAD = ["workload", "plain tokens/s", "with speculation", "speedup", "drafted", "accepted", "same tokens"]


def _row(workload: Compared) -> list[str]:
    share = workload.num_accepted / workload.num_drafted if workload.num_drafted else 0.0
    return [
        workload.name,
        f"{statistics.median(workload.plain):.1f}",
        f"{statistics.median(workload.speculating):.1f}",
        workload.speedup.text(),
        str(workload.num_drafted),
        f"{share:.0%}",
        "yes" if workload.is_same else "NO",
        *([f"{statistics.median(workload.chains):.1f}"] if workload.chains else []),
    ]


def _result(workload: Compared) -> dict[str, Any]:
    return {
        "plain_tokens_per_second": workload.plain,
        "speculating_tokens_per_second": workload.speculating,
        **({"chains_tokens_per_second": workload.chains} if workload.chains else {}),
        "speedup": workload.speedup.record(),
        "num_drafted": workload.num_drafted,
        "num_accepted": workload.num_accepted,
        "same_tokens": workload.is_same,
    }


# ---------------------------------------------------------------------- texts

PASSAGES = (
    "The lighthouse on the northern cape was built in 1874, after three ships were lost in a single winter. Its "
    "lamp burned rapeseed oil until 1911, when a paraffin burner took its place, and electricity came only in "
    "1953. The keeper and his family lived in a low stone house beside the tower and kept goats, hens and a small "
    "garden behind a wall that shut out the wind. Supplies arrived twice a month by boat, if the sea allowed it. "
    "In 1986 the light was automated and the last keeper, Anna Holm, moved to the village. She still climbs the "
    "tower every spring to count the nests on the gallery.",
    "A paged memory manager divides the space of each program into blocks of equal size. A block need not lie next "
    "to the one before it: a table says where each block is kept. When a program grows, the manager gives it one "
    "more block from a list of free ones, so that no large piece of memory has to be found. When two programs hold "
    "the same content, both tables may name the same block, and the block is copied only when one of them writes "
    "to it. The price is one look into the table for every access, which hardware makes almost free.",
    "To make the bread, mix 500 grams of flour with 350 grams of water and let it rest for half an hour. Add 10 "
    "grams of salt and 100 grams of ripe starter, and fold the dough every thirty minutes for two hours. Shape it "
    "into a ball, place it in a floured basket and leave it in the refrigerator overnight. Heat the oven to 250 "
    "degrees with an iron pot inside. Bake the loaf in the closed pot for 25 minutes and without the lid for "
    "another 20 minutes, until the crust is dark brown. Let it cool on a rack for at least an hour.",
)

QUESTIONS = (
    "What should I look at first when I visit a city that I do not know?",
    "Explain in simple words why the sky is blue.",
    "Write a short story about a clock that runs backwards.",
    "How does a bicycle stay upright?",
    "Give me three ideas for a birthday party in the garden.",
    "What is the difference between weather and climate?",
    "Describe how a letter travelled from one town to another two hundred years ago.",
    "Why do cats purr?",
)

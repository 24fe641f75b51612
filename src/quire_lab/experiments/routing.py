"""`routing`: which replica should get a request? Four policies on three workloads, on simulated replicas."""

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from quire.bench.workload import arrival_times, read_trace
from quire.core.config import EngineConfig
from quire.engine.build import build
from quire.fleet.policies import POLICIES, Costs
from quire.fleet.router import Router
from quire_lab.baselines import sglang_routing
from quire_lab.measure.replicas import Fleet, Turn
from quire_lab.measure.simulated_runs import basis, side_by_side
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, bar_style, plain_log

BASE: dict[str, Any] = {"model": "llama-3.1-8b", "device": "simulated:h200", "block_size": 256}
NUM_REPLICAS = 4
OURS = "prefix-work"
RULES: dict[str, Costs] = {
    "round-robin": POLICIES["round-robin"],
    "least-requests": POLICIES["least-requests"],
    "sglang": sglang_routing.costs,
    OURS: POLICIES[OURS],
}
WITHIN = 1.05  # of the best
WIDE = 20  # a larger range is drawn on a logarithmic axis
TRACE_BLOCK = 512  # tokens that one hash of Mooncake's trace stands for
VOCABULARY = 100_000
SHARED, MOONCAKE, CHATS = "shared prefixes", "Mooncake", "chats"
WORDS = {
    SHARED: "64 prompts of 2,048 tokens, 16 requests with each: 128 more tokens, 256 to answer; 60/s; 6 GiB of KV",
    MOONCAKE: "the first requests of Mooncake's conversation trace, in real time; 100 GiB of KV",
    CHATS: "300 chats of 8 turns, 512 tokens and 128 to answer each, behind 16 prompts of 2,048 tokens; 6 turns "
    "a second, 20 s between two of a chat; 20 GiB of KV",
}
POOLS = {SHARED: 6 << 30, MOONCAKE: 100 << 30, CHATS: 20 << 30}


@dataclass(frozen=True, slots=True)
class RoutingJob:
    workload: str
    rule: str
    size: int  # requests, or chats
    seed: int
    path: str | None  # of the trace


@dataclass(frozen=True, slots=True)
class Routed:
    """One policy on one workload; times in seconds."""

    workload: str
    rule: str
    hit_rate: float
    first_mean: float
    first_p90: float
    whole_mean: float
    makespan: float
    max_share: float
    num_requests: int


def run(setup: Setup) -> Finding:
    path = setup.data.path("mooncake")
    sizes = {
        SHARED: setup.pick(64, 1024, 1024),
        MOONCAKE: setup.pick(40, 6000, 6000) if path is not None else 0,
        CHATS: setup.pick(12, 300, 300),
    }
    jobs = [
        RoutingJob(name, rule, size, setup.seed, path)
        for name, size in sizes.items()
        if size
        for rule in RULES
    ]
    with setup.progress(len(jobs), "runs") as bar:
        results = side_by_side(setup, simulate, jobs, bar)
    return _finding(setup, results, path is not None)


def simulate(job: RoutingJob) -> Routed:
    config = EngineConfig.of(**BASE, kv_cache_memory_bytes=POOLS[job.workload])
    replicas = [build(config) for _ in range(NUM_REPLICAS)]
    has_history = job.rule == "sglang"
    size = sglang_routing.TREE_TOKENS if has_history else replicas[0].report.pool.num_tokens
    router = Router(RULES[job.rule], [size] * NUM_REPLICAS)
    served = Fleet(replicas, router, corrects=not has_history).run(WORKLOADS[job.workload](job))
    return Routed(
        workload=job.workload,
        rule=job.rule,
        hit_rate=served.hit_rate,
        first_mean=served.first_mean,
        first_p90=served.first_p90,
        whole_mean=served.whole_mean,
        makespan=served.seconds,
        max_share=served.max_share,
        num_requests=len(served.whole),
    )


# ---------------------------------------------------------------------- workloads


def _shared(job: RoutingJob) -> list[Turn]:
    """SGLang's generated-shared-prefix benchmark with its defaults."""
    drawn = random.Random(job.seed)
    groups = [drawn.choices(range(VOCABULARY), k=2048) for _ in range(max(1, job.size // 16))]
    order = [group for group in groups for _ in range(16)]
    drawn.shuffle(order)
    times = arrival_times(len(order), 60.0, 1.0, drawn)
    return [
        Turn(at, partial(operator.add, group, drawn.choices(range(VOCABULARY), k=128)), 256)
        for at, group in zip(times, order, strict=True)
    ]


def _trace_tokens(prefix_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Equal hashes of the trace become equal tokens."""
    tokens: list[int] = []
    for block in prefix_ids:
        tokens += [1 + block % VOCABULARY, 1 + block // VOCABULARY] + [7] * (TRACE_BLOCK - 2)
    tokens += [9] * max(0, num_tokens - len(tokens))
    return tokens[:num_tokens]


def _mooncake(job: RoutingJob) -> list[Turn]:
    assert job.path is not None
    rows = read_trace(job.path)[: job.size]
    start = rows[0].at or 0.0
    return [
        Turn(
            (row.at or 0.0) - start,
            partial(_trace_tokens, row.prefix_ids, row.lengths.num_prompt_tokens),
            row.lengths.num_output_tokens,
        )
        for row in rows
    ]


def _chats(job: RoutingJob) -> list[Turn]:
    drawn = random.Random(job.seed)
    tenants = [drawn.choices(range(VOCABULARY), k=2048) for _ in range(16)]
    times = arrival_times(job.size, 0.75, 1.0, drawn)

    def turn(at: float, history: Sequence[int], num_left: int, words: random.Random) -> Turn:
        prompt = [*history, *words.choices(range(VOCABULARY), k=512)]

        def follow(now: float, answer: Sequence[int]) -> Turn | None:
            if not num_left:
                return None
            return turn(now + 20.0, [*prompt, *answer], num_left - 1, words)

        return Turn(at, lambda: prompt, 128, follow)

    return [turn(at, drawn.choice(tenants), 7, random.Random(f"{job.seed} {at}")) for at in times]


WORKLOADS: dict[str, Callable[[RoutingJob], list[Turn]]] = {
    SHARED: _shared,
    MOONCAKE: _mooncake,
    CHATS: _chats,
}

# ---------------------------------------------------------------------- finding


def _finding(setup: Setup, results: Sequence[Routed], has_trace: bool) -> Finding:
    workloads = list(dict.fromkeys(result.workload for result in results))
    by_rule = {(result.workload, result.rule): result for result in results}
    checks = [_best_or_close(by_rule, workload) for workload in workloads]
    ours, turns = by_rule[SHARED, OURS], by_rule[SHARED, "round-robin"]
    take_away = (
        f"Routing by uncached work: on shared prefixes {ours.hit_rate:.0%} of prompt tokens are cached (round robin: "
        f"{turns.hit_rate:.0%}) and the first token comes after {1e3 * ours.first_mean:.0f} ms (round robin: "
        f"{1e3 * turns.first_mean:,.0f} ms)."
    )
    if has_trace:
        ours, theirs = by_rule[MOONCAKE, OURS], by_rule[MOONCAKE, "sglang"]
        take_away += (
            f" On Mooncake's trace: {ours.first_mean:.2f} s, by SGLang's rule {theirs.first_mean:.2f} s."
        )
    picture = Picture(
        "routing",
        "Which replica gets a request",
        "Time to the first token, mean and 90th percentile, by routing policy.",
        partial(_draw, by_rule=by_rule, workloads=workloads),
        height=3.6,
    )
    notes = [
        *basis(BASE),
        f"{NUM_REPLICAS} replicas; every policy gets the same requests",
        *(f"{workload}: {WORDS[workload]}" for workload in workloads),
        "sglang: the rule of sglang-router 0.3.2 with its defaults, over pieces of tokens instead of characters",
    ]
    if not has_trace:
        notes.append(
            "Mooncake's trace is left out: there is no mooncake/conversation_trace.jsonl in the data folder"
        )
    return Finding(
        take_away,
        [_table(results)],
        [picture],
        {"runs": [asdict(result) for result in results]},
        {"seed": setup.seed, "engine": dict(BASE), "pools": POOLS, "replicas": NUM_REPLICAS},
        checks,
        notes,
    )


def _best_or_close(by_rule: dict[tuple[str, str], Routed], workload: str) -> Check:
    best = min(RULES, key=lambda rule: by_rule[workload, rule].first_mean)
    ours, first = by_rule[workload, OURS].first_mean, by_rule[workload, best].first_mean
    return Check(
        f"{workload}: {OURS} has the shortest time to the first token, or one within 5 % of it",
        f"{1e3 * ours:,.0f} ms; best: {best}, {1e3 * first:,.0f} ms",
        ours <= WITHIN * first,
    )


def _table(results: Sequence[Routed]) -> Table:
    rows = [
        [
            result.workload,
            result.rule,
            f"{result.hit_rate:.3f}",
            f"{result.first_mean:.3f}",
            f"{result.first_p90:.3f}",
            f"{result.whole_mean:.2f}",
            f"{result.makespan:.0f}",
            f"{result.max_share:.2f}",
            f"{result.num_requests:,}",
        ]
        for result in results
    ]
    head = ["workload", "policy", "hit rate", "TTFT mean, s", "TTFT p90, s", "whole, s", "makespan, s"]
    return Table("Routing policies", [*head, "busiest ÷ mean", "requests"], rows, left=2)


def _draw(figure: Any, by_rule: dict[tuple[str, str], Routed], workloads: Sequence[str]) -> None:
    for axis, workload in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        places = range(len(RULES))
        runs = [by_rule[workload, rule] for rule in RULES]
        axis.bar(
            [x - 0.2 for x in places], [run.first_mean for run in runs], 0.4, label="mean", **bar_style(0)
        )
        axis.bar([x + 0.2 for x in places], [run.first_p90 for run in runs], 0.4, label="p90", **bar_style(1))
        axis.set_xticks(list(places), list(RULES), rotation=25, ha="right")
        axis.set(title=workload, ylabel="seconds to the first token")
        if max(run.first_p90 for run in runs) > WIDE * min(run.first_mean for run in runs):
            axis.set_yscale("log")
            plain_log(axis, "y")
        axis.grid(axis="x", visible=False)
        axis.legend(loc="upper right")


EXPERIMENT = Experiment(
    "routing",
    "Which replica gets a request",
    "Several replicas serve one model. Which should get a request: the idlest, or the one that has its prefix?",
    run,
)

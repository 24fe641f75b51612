"""`prefix`: what finding prompts again saves, for a system prompt that all requests share and for chats."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.bench.drive import Bench, BenchRequest, plain_token_ids
from quire.bench.workload import Lengths, TraceRow, read_trace
from quire.core.config import SchedulerConfig
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from quire_lab.measure.compare import PLANNED_PAIRS, Interleaved, interleave
from quire_lab.measure.counting_runner import CountingRunner
from quire_lab.measure.engines import greedy, in_words, opened, prompt_rate, submit, warm_up
from quire_lab.measure.sharing import SHARES
from quire_lab.report.data import FILES, DataFolder
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import GREY, Picture, bar_style, error_bars, line_style, plain_log
from quire_lab.report.interval import CONFIDENCE_WORDS, Interval, Ratio

# Chats as the Mooncake trace has them, scaled to a small model: equal prefix hashes become equal tokens.

TRACE_BLOCK = 512  # tokens that one hash of the trace stands for
# of the stand-in: chats that come back with all they said before, a few system prompts before them
_SYSTEMS, _SYSTEM_BLOCKS, _CHATS_SHARE, _TURNS = 8, 4, 0.15, 6


@dataclass(frozen=True, slots=True)
class ChatTurn:
    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class ChatTrace:
    turns: list[ChatTurn]
    source: str
    is_real: bool
    repeated_share: float  # of the prompts' tokens: what an endless cache would find, all turns one by one


@dataclass(frozen=True, slots=True)
class Scale:
    """Every hash becomes `tokens_per_hash` tokens; turns that then have more than `max_tokens` are left out."""

    tokens_per_hash: int
    max_tokens: int

    def of(self, row: TraceRow) -> Lengths:
        """Only whole pieces have a hash that may be found again: a prompt is cut to its hashes."""
        prompt = round(row.lengths.num_prompt_tokens * self.tokens_per_hash / TRACE_BLOCK)
        output = round(row.lengths.num_output_tokens * self.tokens_per_hash / TRACE_BLOCK)
        return Lengths(max(1, min(prompt, len(row.prefix_ids) * self.tokens_per_hash)), max(1, output))

    def fits(self, row: TraceRow) -> bool:
        return bool(row.prefix_ids) and self.of(row).total <= self.max_tokens


def chat_trace(
    data: DataFolder,
    count: int,
    scale: Scale,
    token_ids: Sequence[int],
    seed: int,
    *,
    only_returning: bool = False,
) -> ChatTrace:
    """`count` turns in the trace's order: the first that fit, or the first chats' that have several, if any has."""
    path = data.path("mooncake")
    rows = [row for row in (read_trace(path) if path else _stand_in(4 * count, seed)) if scale.fits(row)]
    returning = _returning(rows, count) if only_returning else []
    which = "turns of the first chats with several turns" if returning else "turns"
    rows = returning or rows[:count]
    source = f"{FILES['mooncake']}" if path else "a stand-in, drawn chats with growing history"
    words = f"chats: the first {len(rows):,} {which} that fit of {source}, every 512 tokens as {scale.tokens_per_hash}"
    turns, repeated_share = _turns(rows, scale, token_ids, seed)
    return ChatTrace(turns, words, path is not None, repeated_share)


def _turns(
    rows: Sequence[TraceRow], scale: Scale, token_ids: Sequence[int], seed: int
) -> tuple[list[ChatTurn], float]:
    maker, size = random.Random(seed), scale.tokens_per_hash
    pieces: dict[int, list[int]] = {}
    turns: list[ChatTurn] = []
    num_repeated = 0
    for row in rows:
        lengths = scale.of(row)
        known = 0
        while known < len(row.prefix_ids) and row.prefix_ids[known] in pieces:
            known += 1
        num_repeated += min(known * size, (lengths.num_prompt_tokens - 1) // size * size)
        for block in row.prefix_ids[known:]:
            if block not in pieces:
                pieces[block] = maker.choices(token_ids, k=size)
        prompt = [token for block in row.prefix_ids for token in pieces[block]]
        turns.append(ChatTurn(prompt[: lengths.num_prompt_tokens], lengths.num_output_tokens))
    total = sum(len(turn.prompt_token_ids) for turn in turns)
    return turns, num_repeated / max(1, total)


def _returning(rows: Sequence[TraceRow], count: int) -> list[TraceRow]:
    """Two turns are of one chat if they agree behind the piece that all of them begin with."""
    chats: dict[tuple[int, ...], list[TraceRow]] = {}
    for row in rows:
        chats.setdefault(row.prefix_ids[:2], []).append(row)
    chosen = [row for turns in chats.values() if len(turns) > 2 for row in turns][:count]
    return sorted(chosen, key=lambda row: row.at or 0.0)


def _stand_in(count: int, seed: int) -> list[TraceRow]:
    """Where there is no trace: chats that grow turn by turn behind one of a few system prompts."""
    source = random.Random(seed)
    rows: list[TraceRow] = []
    histories: list[list[int]] = []
    next_id = _SYSTEMS * _SYSTEM_BLOCKS
    for _ in range(count):
        if not histories or source.random() < _CHATS_SHARE:
            system = source.randrange(_SYSTEMS)
            histories.append([system * _SYSTEM_BLOCKS + i for i in range(_SYSTEM_BLOCKS)])
        history = source.choice(histories[-_TURNS:])
        grown = source.randint(1, 4)
        history += range(next_id, next_id + grown)
        next_id += grown
        lengths = Lengths(len(history) * TRACE_BLOCK, source.randint(64, 768))
        rows.append(TraceRow(lengths, float(len(rows)), tuple(history)))
    return rows


BLOCK_SIZE = 16
QUESTION, ANSWER = 16, 4  # tokens of each request behind the system prompt
VOCABULARY = 50_000
CHAT_CONTEXT = 1024  # scaled tokens: longer turns are left out
CHATS_AT_ONCE = 4  # on the model: a turn should find its predecessor finished


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """One run of the same requests, with or without the prefix cache."""

    seconds: float
    hit_rate: float  # of the prompts' tokens
    first_token: float  # seconds until a request's first token, mean, from its turn on
    num_computed: int  # tokens that the model computed


@dataclass(frozen=True, slots=True)
class OnAndOff:
    """The same requests with the prefix cache and without, in turns."""

    num_tokens: int  # of the system prompt; 0: chats
    measured: Interleaved[tuple[int, bool], PrefixRun]

    def counted(self, cached: bool) -> PrefixRun:
        """A run whose counts stand for all: they do not depend on time."""
        return self.measured.runs[self.num_tokens, cached][0]

    def interval(self, cached: bool, value: Callable[[PrefixRun], float]) -> Interval:
        return self.measured.interval((self.num_tokens, cached), value)

    @property
    def speedup(self) -> Ratio:
        return self.measured.ratio((self.num_tokens, False), (self.num_tokens, True), _seconds)

    @property
    def sooner(self) -> Ratio:
        """Of the first token."""
        return self.measured.ratio((self.num_tokens, False), (self.num_tokens, True), _first_token)

    @property
    def computed_share(self) -> float:
        """Of the tokens that are computed without a cache."""
        return self.counted(True).num_computed / self.counted(False).num_computed


def _seconds(run: PrefixRun) -> float:
    return run.seconds


def _first_token(run: PrefixRun) -> float:
    return 1e3 * run.first_token


@dataclass(frozen=True, slots=True)
class CacheResult:
    """How much a pool of a size finds again."""

    num_blocks: int
    hit_rate: float


def run(setup: Setup) -> Finding:
    with opened(setup, enable_prefix_caching=True, block_size=BLOCK_SIZE) as bench:
        warm_up(bench)
        plan = _Plan.of(setup, bench)
        systems = _systems(setup, bench, plan)
        tokens = plain_token_ids(bench.built, bench.tokenizer)
        scale = Scale(BLOCK_SIZE, plan.longest_turn)
        turns = chat_trace(setup.data, plan.num_turns, scale, tokens, setup.seed, only_returning=True)
        requests = [
            BenchRequest(turn.prompt_token_ids, greedy(turn.num_output_tokens)) for turn in turns.turns
        ]
        variants = {(0, cached): partial(_served, bench, requests, cached) for cached in (True, False)}
        chats = OnAndOff(0, interleave(setup, variants, _seconds, "chats on the model", share=0.5))
        with setup.progress(plan.num_replayed * len(plan.pools), "req") as bar:
            bar.note("chats and the pool's size")
            scale = Scale(BLOCK_SIZE, CHAT_CONTEXT)
            replay = chat_trace(setup.data, plan.num_replayed, scale, range(2, VOCABULARY), setup.seed)
            kept = [_kept(replay.turns, num_blocks, bar) for num_blocks in plan.pools]
        words = in_words(bench)
    return _finding(setup, systems, turns, chats, replay, kept, words)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A size that fits the machine: prompts are what costs here."""

    systems: tuple[int, ...]
    num_requests: int
    num_turns: int
    longest_turn: int
    num_replayed: int
    pools: tuple[int, ...]

    @classmethod
    def of(cls, setup: Setup, bench: Bench) -> "_Plan":
        report = bench.built.report
        room = min(report.limits.max_model_len, report.pool.num_tokens // 4) - QUESTION - ANSWER
        rate = prompt_rate(bench)
        systems = tuple(n for n in setup.pick((16, 64), (64, 256, 512), (64, 256, 1024, 2048)) if n <= room)
        # that are computed without a cache in one round of each half; as much time is left for all else
        tokens = 0.5 * 0.5 * setup.seconds / PLANNED_PAIRS * rate
        num_requests = max(3, min(setup.pick(3, 16, 64), int(tokens / max(1, sum(systems)))))
        num_turns = max(setup.pick(6, 12, 100), min(setup.pick(6, 80, 400), int(tokens / 250)))
        return cls(
            systems or (max(1, room // 2),),
            num_requests,
            num_turns,
            min(room, setup.pick(128, 512, CHAT_CONTEXT)),
            setup.pick(40, 1500, 12_000),
            setup.pick(
                (128, 1024), (256, 1024, 4096, 16_384, 65_536), (256, 1024, 4096, 16_384, 65_536, 262_144)
            ),
        )


def _systems(setup: Setup, bench: Bench, plan: _Plan) -> list[OnAndOff]:
    """Requests that share their first tokens, one after the other, so that each may find what the last computed."""
    tokens = plain_token_ids(bench.built, bench.tokenizer)
    variants = {}
    for num_tokens in plan.systems:
        maker = random.Random(setup.seed)
        system = maker.choices(tokens, k=num_tokens)
        requests = [
            BenchRequest([*system, *maker.choices(tokens, k=QUESTION)], greedy(ANSWER))
            for _ in range(plan.num_requests)
        ]
        for cached in (True, False):
            variants[num_tokens, cached] = partial(_served, bench, requests, cached, 1)
    measured = interleave(setup, variants, _seconds, "a system prompt", share=0.5)
    return [OnAndOff(num_tokens, measured) for num_tokens in plan.systems]


def _served(
    bench: Bench,
    requests: Sequence[BenchRequest],
    cached: bool,
    at_once: int = CHATS_AT_ONCE,
) -> PrefixRun:
    """`at_once` requests run at any time; without a cache every request has a salt of its own and finds nothing."""
    engine, memory = bench.engine, bench.engine.memory
    memory.reset_prefix_index()
    queries, hits = memory.stats.prefix_queries, memory.stats.prefix_hits
    computed = engine.stats.num_computed_tokens
    name, todo = time.monotonic_ns(), list(enumerate(requests))
    begun: dict[str, tuple[float, bool]] = {}
    firsts: list[float] = []
    started = time.perf_counter()
    while todo or engine.has_work:
        while todo and len(begun) < at_once:
            index, turn = todo.pop(0)
            request_id = f"prefix-{name}-{index}"
            salt = "" if cached else request_id
            engine.add(Request(request_id, turn.prompt_token_ids, turn.sampling, cache_salt=salt))
            begun[request_id] = (time.perf_counter(), False)
        for update in engine.step():
            since, seen = begun[update.request_id]
            if update.token_ids and not seen:
                firsts.append(time.perf_counter() - since)
                begun[update.request_id] = (since, True)
            if update.finish_reason is not None:
                del begun[update.request_id]
    seconds = time.perf_counter() - started
    num_hits, asked = memory.stats.prefix_hits - hits, memory.stats.prefix_queries - queries
    computed = engine.stats.num_computed_tokens - computed
    return PrefixRun(seconds, num_hits / max(1, asked), sum(firsts) / max(1, len(firsts)), computed)


def _kept(turns: Sequence[ChatTurn], num_blocks: int, bar: Callable[[], None]) -> CacheResult:
    """The trace through scheduler and memory alone, turn by turn: no model, the engine's own prefix index."""
    memory = PagedMemory(num_blocks, BLOCK_SIZE)
    limits = Limits(VOCABULARY, CHAT_CONTEXT + 1, 1, ())
    config = SchedulerConfig(1, 8192, steps_in_flight=0)
    engine = Engine(config, limits, memory, CountingRunner(VOCABULARY, SHARES, 0), 0)
    for index, turn in enumerate(turns):
        if memory.blocks_for(len(turn.prompt_token_ids) + turn.num_output_tokens) <= num_blocks:
            submit(
                engine, [BenchRequest(turn.prompt_token_ids, greedy(turn.num_output_tokens))], f"turn-{index}"
            )
            while engine.has_work:
                engine.step()
        bar()
    engine.check_integrity()
    return CacheResult(num_blocks, memory.stats.prefix_hits / max(1, memory.stats.prefix_queries))


def _finding(
    setup: Setup,
    systems: list[OnAndOff],
    turns: ChatTrace,
    chats: OnAndOff,
    replay: ChatTrace,
    kept: list[CacheResult],
    words: str,
) -> Finding:
    longest = systems[-1]
    take_away = (
        f"Requests whose system prompt of {longest.num_tokens} tokens is found again: "
        f"{longest.speedup.claim('times as fast')}. In the chats "
        f"{100 * chats.counted(True).hit_rate:.0f} % of all prompt tokens are found; the whole: "
        f"{chats.speedup.claim('times as fast')}."
    )
    picture = Picture(
        "prefix",
        "What finding prompts again saves",
        f"{longest.num_tokens} shared tokens, first token: {longest.sooner.short('times as soon')}. Chats: "
        f"{100 * kept[-1].hit_rate:.0f} % of prompt tokens found with the largest pool.",
        lambda figure: _draw(figure, systems, kept, replay),
        height=3.9,
    )
    results = {
        "systems": [
            {
                "system_tokens": run.num_tokens,
                **_record(run),
            }
            for run in systems
        ],
        "chats": {
            "num_turns": len(turns.turns),
            **_record(chats),
        },
        "replay": {
            "num_turns": len(replay.turns),
            "repeated_share": replay.repeated_share,
            "pools": [{"num_blocks": result.num_blocks, "hit_rate": result.hit_rate} for result in kept],
        },
    }
    checks = [
        Check(
            "the longer the shared prompt, the fewer of all tokens are computed",
            ", ".join(f"{run.num_tokens}: {100 * run.computed_share:.0f} %" for run in systems),
            systems[-1].computed_share <= systems[0].computed_share,
        ),
        Check(
            "a larger pool finds no less, and never more than the trace repeats",
            f"{100 * kept[0].hit_rate:.1f} % to {100 * kept[-1].hit_rate:.1f} %, "
            f"{100 * replay.repeated_share:.1f} % repeat",
            kept[-1].hit_rate >= kept[0].hit_rate and kept[-1].hit_rate <= replay.repeated_share + 0.01,
        ),
    ]
    return Finding(
        take_away,
        [_system_table(systems, len(turns.turns), chats), _pool_table(kept)],
        [picture],
        results,
        {"seed": setup.seed, "block_size": BLOCK_SIZE, "model": words},
        checks,
        (
            words,
            f"system prompt: requests one after the other, {QUESTION} tokens of their own, {ANSWER} tokens out; "
            f"chats: {CHATS_AT_ONCE} requests at any time",
            f"times: median and {CONFIDENCE_WORDS} interval; on and off in turns, {longest.measured.num_rounds} rounds "
            f"of system prompts, {chats.measured.num_rounds} of chats",
            turns.source,
            f"{replay.source}, turn by turn through scheduler and memory, no model",
            "off: every request has a cache salt of its own, so the same engine finds nothing",
        ),
    )  # fmt: skip


def _record(runs: OnAndOff) -> dict[str, Any]:
    return {
        "speedup": runs.speedup.record(),
        "first_token_speedup": runs.sooner.record(),
        **{
            name: {
                "seconds": runs.interval(cached, _seconds).record(),
                "first_token_ms": runs.interval(cached, _first_token).record(),
                "hit_rate": runs.counted(cached).hit_rate,
                "tokens_computed": runs.counted(cached).num_computed,
            }
            for name, cached in (("on", True), ("off", False))
        },
    }


def _system_table(systems: list[OnAndOff], num_turns: int, chats: OnAndOff) -> Table:
    lines = [(f"system prompt of {runs.num_tokens} tokens", runs) for runs in systems]
    lines.append((f"{num_turns} turns of chats", chats))
    rows = [
        [
            name,
            f"{100 * runs.counted(True).hit_rate:.1f}",
            f"{runs.counted(True).num_computed:,}",
            f"{runs.counted(False).num_computed:,}",
            runs.interval(True, _first_token).text(0),
            runs.interval(False, _first_token).text(0),
            runs.interval(True, _seconds).text(),
            runs.interval(False, _seconds).text(),
            runs.speedup.text(),
        ]
        for name, runs in lines
    ]
    head = [
        "requests",
        "found, %",
        "computed on",
        "off",
        "first token on, ms",
        "off, ms",
        "all on, s",
        "off, s",
        "speed-up",
    ]
    return Table("On the model, prefix cache on and off", head, rows)


def _pool_table(kept: list[CacheResult]) -> Table:
    rows = [
        [f"{one.num_blocks:,}", f"{one.num_blocks * BLOCK_SIZE:,}", f"{100 * one.hit_rate:.1f}"]
        for one in kept
    ]
    return Table("Chats and the pool's size", ["blocks", "tokens", "found, % of prompt tokens"], rows, left=0)


def _draw(figure: Any, systems: list[OnAndOff], kept: list[CacheResult], replay: ChatTrace) -> None:
    left, middle, right = figure.subplots(1, 3)
    places = range(len(systems))
    names = [str(run.num_tokens) for run in systems]
    for series, (words, cached) in enumerate((("cache on", True), ("cache off", False))):
        times = [runs.interval(cached, _first_token) for runs in systems]
        left.bar(
            [i + 0.4 * series for i in places],
            [interval.median for interval in times],
            0.38,
            yerr=error_bars(times),
            label=words,
            **bar_style(series),
        )
    left.set_xticks([i + 0.2 for i in places], names)
    left.set(title="time to first token", xlabel="tokens of system prompt", ylabel="milliseconds")
    left.legend(loc="best")
    ratios = [runs.speedup.interval for runs in systems]
    middle.bar(places, [ratio.median for ratio in ratios], 0.6, yerr=error_bars(ratios), **bar_style(2))
    middle.set_xticks(list(places), names)
    middle.axhline(1, color=GREY, linewidth=0.9)
    middle.set(title="speed-up of whole requests", xlabel="tokens of system prompt", ylabel="times as fast")
    for axis in (left, middle):
        axis.grid(axis="x", visible=False)
    right.plot(
        [result.num_blocks for result in kept],
        [100 * result.hit_rate for result in kept],
        label="found",
        **line_style(0),
    )
    right.axhline(
        100 * replay.repeated_share, color=GREY, linewidth=1, linestyle="--", label="repeats in the trace"
    )
    plain_log(right, "x")
    right.set_ylim(bottom=0)
    right.set(
        title="chats and the pool", xlabel=f"blocks of {BLOCK_SIZE} tokens", ylabel="% of prompt tokens"
    )
    right.legend(loc="lower right")


EXPERIMENT = Experiment(
    "prefix",
    "What finding prompts again saves",
    "Many prompts begin with what was computed before: a system prompt, a chat's history. What is that worth?",
    run,
)

"""`adapters`: thousands of adapters over one model, batched together against merging one after another."""

import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from safetensors.torch import save_file

from quire.bench.drive import Bench, BenchRequest
from quire.bench.workload import Lengths
from quire.core.request import Request
from quire.engine.build.resolve import is_simulated
from quire.engine.engine import Engine
from quire.memory.adapter_pages import AdapterPages
from quire.memory.paged import PagedMemory
from quire_lab.baselines.separate_pages import SeparatePages, fragmentation
from quire_lab.experiments.adapters_simulated import draw, simulate_adapters, simulated_finding
from quire_lab.measure.engines import in_words, opened, warm_up
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, line_style, plain_log

# Random adapters on disk for an experiment: a few files, and hard links to them under thousands of names.

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "c_attn")


def write_adapters(folder: Path, engine: Engine, count: int, ranks: tuple[int, ...], name: str) -> list[str]:
    """Adapters of these ranks in turn on the projections of attention; their names."""
    assert engine.adapters is not None
    sites = [site for site in engine.adapters.library.sites if site.part in ATTENTION]
    names = [f"{name}-{index}" for index in range(count)]
    generator = torch.Generator().manual_seed(0)
    for index, adapter in enumerate(names):
        rank = ranks[index % len(ranks)]
        target = folder / adapter
        target.mkdir()
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
        settings["target_modules"] = sorted({site.part for site in sites})
        (target / "adapter_config.json").write_text(json.dumps(settings))
        if index >= len(ranks):
            os.link(
                folder / names[index % len(ranks)] / "adapter_model.safetensors",
                target / "adapter_model.safetensors",
            )
            continue
        tensors = {}
        for site in sites:
            prefix = f"base_model.model.{site.name}"
            a = torch.randn(rank, site.num_in, generator=generator) * site.num_in**-0.5
            tensors[f"{prefix}.lora_A.weight"] = a.to(torch.bfloat16)
            b = torch.randn(site.num_out, rank, generator=generator) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = b.to(torch.bfloat16)
        save_file(tensors, target / "adapter_model.safetensors")
    return names


# The same requests with adapters in one pool of pages, or in memory of their own: what fits, counted in blocks.

SIZES = (2, 4, 8, 16, 32)  # blocks of adapters, in proportion to their ranks
POOL = 400  # blocks in all
REQUEST = 6  # blocks of K and V of a request
ADAPTERS = 100
ROUNDS = 3000


@dataclass(frozen=True, slots=True)
class Fitted:
    memory: str
    mean_running: float
    fragmentation: float  # of adapters' free memory, mean
    loads: int


def compare_memories(seed: int) -> tuple[Fitted, list[Fitted]]:
    """Unified, and with an eighth, a quarter and half of the blocks for adapters alone.

    Full all the time: a request that ends makes room for the next, drawn by a power law.
    """
    return _fill(0, seed), [_fill(POOL // part, seed) for part in (8, 4, 2)]


def _fill(num_separate: int, seed: int) -> Fitted:
    drawn = random.Random(seed)
    num_blocks = POOL - num_separate
    separate = SeparatePages(num_blocks + 1, num_separate) if num_separate else None
    memory = PagedMemory(num_blocks, 1, adapter_pages=separate)
    pages, weights = memory.adapter_pages, [1 / (number + 1) for number in range(ADAPTERS)]
    running: list[tuple[str, list[int]]] = []
    counts, gaps = [], []
    following: int | None = None  # the head of the queue: no request may pass it
    for _ in range(ROUNDS):
        while True:
            index = drawn.choices(range(ADAPTERS), weights)[0] if following is None else following
            held = _admit(memory, pages, f"{index}", SIZES[index % len(SIZES)])
            following = index if held is None else None
            if held is None:
                break
            running.append((f"{index}", held))
        counts.append(len(running))
        gaps.append(fragmentation(pages))
        if running:
            key, blocks = running.pop(drawn.randrange(len(running)))
            pages.release(key)
            for block in blocks:
                memory.pool.release(block)
    kind = f"separate, {num_separate} blocks" if num_separate else "unified"
    return Fitted(kind, sum(counts) / ROUNDS, sum(gaps) / ROUNDS, pages.stats.num_loads)


def _admit(memory: PagedMemory, pages: AdapterPages, key: str, size: int) -> list[int] | None:
    """The request's blocks, its adapter being held; None if both do not fit."""
    if not pages.is_resident(key):
        if not pages.has_room(size, REQUEST):
            return None
        pages.load(key, size, key)
    pages.acquire(key)
    if memory.num_free < REQUEST:
        pages.release(key)
        return None
    return [memory._take() for _ in range(REQUEST)]


MIXED = (4, 8, 16, 32, 64)
SHORT, LONG = 24, 16  # tokens in and out
PATIENCE = 10.0  # the service level: a first token within this multiple of its time alone
LOAD = 0.7  # of what the base serves at its fastest: how often requests come


@dataclass(frozen=True, slots=True)
class AdapterCase:
    mode: str  # base | batched | merge
    memory: str = "unified"
    num_adapters: int = 0
    exponent: float = 1.0
    ranks: tuple[int, ...] = MIXED


@dataclass(frozen=True, slots=True)
class AdapterRun:
    case: AdapterCase
    requests_per_second: float
    tokens_per_second: float
    first_token: float  # seconds, median
    attained: float  # share of requests within the service level
    mean_running: float
    loads: int
    evictions: int
    fragmentation: float  # of adapters' free memory, mean over steps


def run(setup: Setup) -> Finding:
    """On this machine, and on a simulated A100; only there where the user simulates."""
    simulated = simulated_finding(setup, *simulate_adapters(setup))
    if is_simulated(str(setup.engine.get("device", ""))):
        return simulated
    real = _measured(setup)
    return Finding(
        f"{real.take_away} {simulated.take_away}",
        [*real.tables, *simulated.tables],
        [*real.pictures, *simulated.pictures],
        {**real.results, "simulated": simulated.results},
        {**real.settings, "simulated": simulated.settings},
        [*real.checks, *simulated.checks],
        [*real.notes, *simulated.notes],
    )


def _measured(setup: Setup) -> Finding:
    counts = setup.pick((2, 6), (5, 100, 1000), (5, 100, 1000, 2000))
    num_requests = setup.pick(6, 48, 240)
    cases = [AdapterCase("base")]
    cases += [AdapterCase("batched", num_adapters=count) for count in counts]
    cases += [AdapterCase("batched", num_adapters=counts[-1], exponent=exponent) for exponent in (0.0, 2.0)]
    cases += [AdapterCase("batched", num_adapters=counts[-1], ranks=ranks) for ranks in ((8,), (64,))]
    cases += [AdapterCase("batched", "separate", counts[-1])]
    cases += [AdapterCase("merge", num_adapters=count) for count in counts]
    with (
        setup.progress(len(cases) * num_requests, "requests") as bar,
        tempfile.TemporaryDirectory() as directory,
    ):
        served: list[AdapterRun] = []
        rate, limit = 0.0, 0.0
        for case in cases:
            bar.note(_named(case))
            folder = Path(directory, f"case-{len(served)}")
            folder.mkdir()
            with opened(setup, **_settings(setup, case, folder)) as bench:
                warm_up(bench)
                words = in_words(bench)
                requests = bench.requests([Lengths(SHORT, LONG)] * num_requests)
                if not rate:
                    rate, limit = _pace(bench, requests)
                names = _names(setup, bench, case, folder, num_requests)
                served.append(_serve(bench, requests, names, case, rate, limit, setup.seed))
            bar(num_requests)
    return _finding(setup, served, rate, limit, words, num_requests)


def _settings(setup: Setup, case: AdapterCase, folder: Path) -> dict[str, Any]:
    """Merging needs weights in full precision, so all cases have them."""
    pool = {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": setup.pick(4, 16, 32)}
    plain = {"enable_prefix_caching": False, "quantization": "none", "max_model_len": 256}
    if case.mode == "base":
        return {**plain, **pool}
    mode = {"lora_mode": case.mode, "lora_memory": case.memory, "lora_dir": str(folder)}
    return {**plain, **pool, **mode}


def _names(setup: Setup, bench: Bench, case: AdapterCase, folder: Path, count: int) -> list[str | None]:
    if case.mode == "base":
        return [None] * count
    written = write_adapters(folder, bench.engine, case.num_adapters, case.ranks, "adapter")
    return list(draw(written, count, case.exponent, setup.seed))


def _pace(bench: Bench, requests: list[BenchRequest]) -> tuple[float, float]:
    """Requests a second for all cases, and the seconds that a first token may take."""
    alone = bench.serve(requests[:1])
    fastest = len(requests) / bench.serve(requests).seconds
    return LOAD * fastest, PATIENCE * alone.requests[0].first_token


def _serve(
    bench: Bench,
    requests: Sequence[BenchRequest],
    names: Sequence[str | None],
    case: AdapterCase,
    rate: float,
    limit: float,
    seed: int,
) -> AdapterRun:
    """Requests arrive at random, on average at this rate, independent of the engine's speed."""
    engine, drawn = bench.engine, random.Random(seed)
    arrivals, moment = [], 0.0
    for _ in requests:
        arrivals.append(moment)
        moment += drawn.expovariate(rate)
    started, came = engine.clock(), 0
    first: dict[str, float] = {}
    running: list[int] = []
    gaps: list[float] = []
    pages = engine.memory.adapter_pages
    loads, evictions = pages.stats.num_loads, pages.stats.num_evictions
    num_tokens = 0
    while came < len(requests) or engine.has_work:
        now = engine.clock() - started
        while came < len(requests) and arrivals[came] <= now:
            request = requests[came]
            engine.add(Request(f"{came}", request.prompt_token_ids, request.sampling, adapter=names[came]))
            came += 1
        for update in engine.step():
            num_tokens += len(update.token_ids)
            if update.token_ids:
                first.setdefault(update.request_id, engine.clock() - started)
        running.append(len(engine.scheduler.running))
        gaps.append(fragmentation(pages))
    seconds = engine.clock() - started
    engine.check_integrity()
    waits = [first[f"{index}"] - arrivals[index] for index in range(len(requests))]
    busy = [count for count in running if count] or [0]
    return AdapterRun(
        case,
        len(requests) / seconds,
        num_tokens / seconds,
        median(waits),
        sum(wait <= limit for wait in waits) / len(waits),
        mean(busy),
        pages.stats.num_loads - loads,
        pages.stats.num_evictions - evictions,
        mean(gaps),
    )


def _named(case: AdapterCase) -> str:
    if case.mode == "base":
        return "base"
    ranks = "mixed ranks" if case.ranks == MIXED else f"rank {case.ranks[0]}"
    return f"{case.mode}, {case.memory}, {case.num_adapters:,} adapters, i^-{case.exponent:g}, {ranks}"


def _finding(
    setup: Setup, served: list[AdapterRun], rate: float, limit: float, words: str, count: int
) -> Finding:
    base = served[0]
    batched = [
        run for run in served if run.case == AdapterCase("batched", num_adapters=run.case.num_adapters)
    ]
    merged = [run for run in served if run.case.mode == "merge"]
    unified, apart = compare_memories(setup.seed)
    most, least = batched[-1], merged[-1]
    take_away = (
        f"With {most.case.num_adapters:,} adapters batched together the model serves {most.tokens_per_second:,.0f} "
        f"tokens a second ({most.tokens_per_second / base.tokens_per_second:.0%} of the base alone, which was offered "
        f"as much) and {most.attained:.0%} of first tokens in time; merging one adapter after another serves "
        f"{least.tokens_per_second:,.0f} and {least.attained:.0%}."
    )
    picture = Picture(
        "adapters",
        "Many adapters over one model",
        f"{most.case.num_adapters:,} adapters: {most.tokens_per_second:,.0f} tokens a second batched, "
        f"{least.tokens_per_second:,.0f} merged one after another.",
        lambda figure: _draw(figure, base, batched, merged),
    )
    return Finding(
        take_away,
        [_table(served), _memory_table([unified, *apart])],
        [picture],
        {
            "served": [_record(run) for run in served],
            "rate": rate,
            "first_token_limit_seconds": limit,
            "memory": [asdict(memory) for memory in (unified, *apart)],
        },
        {"seed": setup.seed, "num_requests": count, "tokens_in": SHORT, "tokens_out": LONG, "model": words},
        [
            Check(
                "batching serves at least as much as merging, however many adapters",
                f"{most.tokens_per_second:,.0f} against {least.tokens_per_second:,.0f} tokens a second",
                all(
                    b.tokens_per_second >= 0.95 * m.tokens_per_second
                    for b, m in zip(batched, merged, strict=True)
                ),
            ),
            Check(
                "unified memory has no external fragmentation, memory of its own has, and holds fewer requests",
                f"{unified.mean_running:.1f} requests at once; "
                + ", ".join(
                    f"{memory.mean_running:.1f} with {memory.fragmentation:.0%} fragmented"
                    for memory in apart
                ),
                unified.fragmentation == 0.0
                and all(
                    memory.fragmentation > 0.0 and memory.mean_running < unified.mean_running
                    for memory in apart
                ),
            ),
        ],
        (
            words,
            f"{count} requests at random times, {rate:.2f} a second on average ({LOAD:.0%} of what the base serves at "
            f"its fastest), {SHORT} tokens in and {LONG} out; adapters on q, k, v and o, drawn by a power law i^-x",
            f"memory: {POOL} blocks that are always full, {ADAPTERS} adapters of {SIZES[0]} to {SIZES[-1]} blocks, "
            f"{REQUEST} blocks of K and V a request",
            f"in time: a first token within {limit:.2f} s, {PATIENCE:g} times what it takes alone",
        ),
    )


def _record(one: AdapterRun) -> dict[str, Any]:
    return {
        **asdict(one.case),
        **{name: getattr(one, name) for name in AdapterRun.__slots__ if name != "case"},
    }


def _table(served: list[AdapterRun]) -> Table:
    rows = [
        [
            _named(run.case),
            f"{run.tokens_per_second:,.1f}",
            f"{1e3 * run.first_token:,.0f}",
            f"{run.attained:.0%}",
            f"{run.mean_running:.1f}",
            str(run.loads),
            f"{run.fragmentation:.0%}",
        ]
        for run in served
    ]
    head = ["case", "tok/s", "first token, ms", "in time", "running", "loads", "fragmented"]
    return Table("Adapters", head, rows)


def _memory_table(fitted: list[Fitted]) -> Table:
    rows = [
        [one.memory, f"{one.mean_running:.1f}", f"{one.fragmentation:.1%}", f"{one.loads:,}"]
        for one in fitted
    ]
    return Table("A full pool, counted", ["memory", "requests at once", "fragmented", "loads"], rows)


def _draw(figure: Any, base: AdapterRun, batched: list[AdapterRun], merged: list[AdapterRun]) -> None:
    panels = figure.subplots(1, 3)
    values = (
        ("tokens a second", lambda run: run.tokens_per_second),
        ("first token, ms (median)", lambda run: 1e3 * run.first_token),
        ("first tokens in time, %", lambda run: 100 * run.attained),
    )
    for panel, (label, value) in zip(panels, values, strict=True):
        for series, (name, line) in enumerate((("batched", batched), ("merged", merged))):
            panel.plot(
                [run.case.num_adapters for run in line],
                [value(run) for run in line],
                label=name,
                **line_style(series),
            )
        panel.axhline(value(base), color="#595959", linewidth=1, label="base alone")
        plain_log(panel, "x")
        panel.set(xlabel="adapters", ylabel=label)
        panel.set_ylim(bottom=0)
    panels[0].legend(loc="best")


EXPERIMENT = Experiment(
    "adapters",
    "Thousands of adapters",
    "What does serving many fine-tuned models over one base cost, against switching the model from one to the next?",
    run,
)

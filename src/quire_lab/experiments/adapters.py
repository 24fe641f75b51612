"""`adapters`: thousands of adapters over one model, batched together against merging one after another."""

import json
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
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
from quire_lab.measure.compare import PLANNED_PAIRS, Interleaved, interleave
from quire_lab.measure.engines import in_words, opened, warm_up
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, error_bars, line_style, plain_log
from quire_lab.report.interval import CONFIDENCE_WORDS, all_held

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
            a = torch.randn(rank, site.num_inputs, generator=generator) * site.num_inputs**-0.5
            tensors[f"{prefix}.lora_A.weight"] = a.to(torch.bfloat16)
            b = torch.randn(site.num_outputs, rank, generator=generator) * 0.01
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
    cases = [AdapterCase("base")]
    cases += [AdapterCase("batched", num_adapters=count) for count in counts]
    cases += [AdapterCase("batched", num_adapters=counts[-1], exponent=exponent) for exponent in (0.0, 2.0)]
    cases += [AdapterCase("batched", num_adapters=counts[-1], ranks=ranks) for ranks in ((8,), (64,))]
    cases += [AdapterCase("batched", "separate", counts[-1])]
    cases += [AdapterCase("merge", num_adapters=count) for count in counts]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        benches: dict[tuple[str, str], Bench] = {}
        for case in cases:
            if (case.mode, case.memory) not in benches:
                bench = stack.enter_context(opened(setup, **_settings(setup, case, folder)))
                warm_up(bench)
                benches[case.mode, case.memory] = bench
        base = benches["base", "unified"]
        words = in_words(base)
        rate, limit = _pace(base, base.requests([Lengths(SHORT, LONG)] * setup.pick(6, 24, 48)))
        planned = int(rate * setup.seconds / len(cases) / PLANNED_PAIRS)
        num_requests = max(6, min(setup.pick(6, 48, 240), planned))
        requests = base.requests([Lengths(SHORT, LONG)] * num_requests)
        variants = {
            case: _Repeated(
                benches[case.mode, case.memory],
                case,
                requests,
                _write(benches[case.mode, case.memory], case, folder, index),
                rate,
                limit,
                setup.seed,
            )
            for index, case in enumerate(cases)
        }
        measured = interleave(setup, variants, _tokens_per_second, "adapters")
    return _finding(setup, measured, rate, limit, words, num_requests)


def _tokens_per_second(run: AdapterRun) -> float:
    return run.tokens_per_second


def _first_token(run: AdapterRun) -> float:
    return 1e3 * run.first_token


def _attained(run: AdapterRun) -> float:
    return 100 * run.attained


def _settings(setup: Setup, case: AdapterCase, folder: Path) -> dict[str, Any]:
    """Merging needs weights in full precision, so all cases have them."""
    pool = {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": setup.pick(4, 16, 32)}
    plain = {"enable_prefix_caching": False, "quantization": "none", "max_model_len": 256}
    if case.mode == "base":
        return {**plain, **pool}
    mode = {"lora_mode": case.mode, "lora_memory": case.memory, "lora_dir": str(folder)}
    return {**plain, **pool, **mode}


def _write(bench: Bench, case: AdapterCase, folder: Path, index: int) -> list[str]:
    """The case's own adapters; their names."""
    if case.mode == "base":
        return []
    return write_adapters(folder, bench.engine, case.num_adapters, case.ranks, f"case-{index}")


def _pace(bench: Bench, requests: list[BenchRequest]) -> tuple[float, float]:
    """Requests a second for all cases, and the seconds that a first token may take."""
    alone = bench.serve(requests[:1])
    fastest = len(requests) / bench.serve(requests).seconds
    return LOAD * fastest, PATIENCE * alone.requests[0].first_token


@dataclass(slots=True)
class _Repeated:
    """Serves a case each time it is called, with the adapters and arrivals that all cases get in the round."""

    bench: Bench
    case: AdapterCase
    requests: Sequence[BenchRequest]
    written: list[str]  # adapters
    rate: float
    limit: float
    seed: int

    def __call__(self) -> AdapterRun:
        self.seed += 1
        count = len(self.requests)
        names: list[str | None] = [None] * count
        if self.written:
            names = list(draw(self.written, count, self.case.exponent, self.seed))
        return _serve(self.bench, self.requests, names, self.rate, self.limit, self.seed)


def _serve(
    bench: Bench,
    requests: Sequence[BenchRequest],
    names: Sequence[str | None],
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


Measured = Interleaved[AdapterCase, AdapterRun]


def _finding(setup: Setup, measured: Measured, rate: float, limit: float, words: str, count: int) -> Finding:
    base = AdapterCase("base")
    batched = [
        case for case in measured.runs if case == AdapterCase("batched", num_adapters=case.num_adapters)
    ]
    merged = [case for case in measured.runs if case.mode == "merge"]
    unified, apart = compare_memories(setup.seed)
    over_merged = {
        case.num_adapters: measured.ratio(case, other, _tokens_per_second)
        for case, other in zip(batched, merged, strict=True)
    }
    most = batched[-1]
    over_base = measured.ratio(most, base, _tokens_per_second)
    sooner = measured.ratio(merged[-1], most, _first_token)
    take_away = (
        f"{most.num_adapters:,} adapters batched together serve "
        f"{measured.interval(most, _tokens_per_second).text(0)} tokens a second. Against the base alone, which was "
        f"offered as much: {over_base.claim('times the tokens')}. Against merging one adapter after another: "
        f"{over_merged[most.num_adapters].claim('times the tokens')}; first tokens: {sooner.claim('times as soon')}."
    )
    picture = Picture(
        "adapters",
        "Many adapters over one model",
        f"{most.num_adapters:,} adapters, batched against merged one after another: "
        f"{over_merged[most.num_adapters].short('times the tokens a second')}.",
        lambda figure: _draw(figure, measured, batched, merged),
    )
    return Finding(
        take_away,
        [_table(measured), _memory_table([unified, *apart])],
        [picture],
        {
            "served": [_record(measured, case) for case in measured.runs],
            "num_rounds": measured.num_rounds,
            "batched_over_base": over_base.record(),
            "batched_over_merged": {number: ratio.record() for number, ratio in over_merged.items()},
            "first_token_merged_over_batched": sooner.record(),
            "rate": rate,
            "first_token_limit_seconds": limit,
            "memory": [asdict(memory) for memory in (unified, *apart)],
        },
        {"seed": setup.seed, "num_requests": count, "tokens_in": SHORT, "tokens_out": LONG, "model": words},
        [
            Check(
                "batching serves at least as much as merging, however many adapters",
                ", ".join(f"{number:,}: {ratio.text()} ×" for number, ratio in over_merged.items()),
                all_held(ratio.interval.is_above(0.95) for ratio in over_merged.values()),
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
            f"all cases in turns, {measured.num_rounds} rounds, adapters and arrivals drawn again in each; medians "
            f"with {CONFIDENCE_WORDS} intervals; loads and evictions are those of the first round",
            f"memory: {POOL} blocks that are always full, {ADAPTERS} adapters of {SIZES[0]} to {SIZES[-1]} blocks, "
            f"{REQUEST} blocks of K and V a request",
            f"in time: a first token within {limit:.2f} s, {PATIENCE:g} times what it takes alone",
        ),
    )


def _record(measured: Measured, case: AdapterCase) -> dict[str, Any]:
    first = measured.runs[case][0]
    return {
        **asdict(case),
        "tokens_per_second": measured.interval(case, _tokens_per_second).record(),
        "first_token_ms": measured.interval(case, _first_token).record(),
        "attained_percent": measured.interval(case, _attained).record(),
        "mean_running": measured.interval(case, lambda run: run.mean_running).record(),
        "fragmentation": mean(run.fragmentation for run in measured.runs[case]),
        "loads": first.loads,
        "evictions": first.evictions,
    }


def _table(measured: Measured) -> Table:
    rows = [
        [
            _named(case),
            measured.interval(case, _tokens_per_second).text(1),
            measured.interval(case, _first_token).text(0),
            measured.interval(case, _attained).text(0),
            f"{measured.interval(case, lambda run: run.mean_running).median:.1f}",
            str(runs[0].loads),
            f"{mean(run.fragmentation for run in runs):.0%}",
        ]
        for case, runs in measured.runs.items()
    ]
    head = ["case", "tok/s", "first token, ms", "in time, %", "running", "loads", "fragmented"]
    return Table("Adapters", head, rows)


def _memory_table(fitted: list[Fitted]) -> Table:
    rows = [
        [one.memory, f"{one.mean_running:.1f}", f"{one.fragmentation:.1%}", f"{one.loads:,}"]
        for one in fitted
    ]
    return Table("A full pool, counted", ["memory", "requests at once", "fragmented", "loads"], rows)


def _draw(
    figure: Any, measured: Measured, batched: Sequence[AdapterCase], merged: Sequence[AdapterCase]
) -> None:
    panels = figure.subplots(1, 3)
    values = (
        ("tokens a second", _tokens_per_second),
        ("first token, ms (median)", _first_token),
        ("first tokens in time, %", _attained),
    )
    for panel, (label, value) in zip(panels, values, strict=True):
        for series, (name, cases) in enumerate((("batched", batched), ("merged", merged))):
            intervals = [measured.interval(case, value) for case in cases]
            panel.errorbar(
                [case.num_adapters for case in cases],
                [interval.median for interval in intervals],
                yerr=error_bars(intervals),
                capsize=2,
                label=name,
                **line_style(series),
            )
        alone = measured.interval(AdapterCase("base"), value).median
        panel.axhline(alone, color="#595959", linewidth=1, label="base alone")
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

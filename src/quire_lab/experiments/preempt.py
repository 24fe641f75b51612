"""`preempt`: when the pool is full, a request leaves it: swapped to host memory, or computed again."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from quire.bench.drive import Bench, BenchRequest
from quire.bench.lengths import Lengths
from quire.bench.table import in_bytes
from quire.core.request import Ints, ints
from quire.core.step import HostTransfers, Step
from quire.engine.build import block_layout
from quire.layers.attention import Pool
from quire.runner.transfer import TransferEngine
from quire_lab.measure.engines import in_words, opened, submit, warm_up
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, bar_style, line_style, plain_log

# What it costs to let a sequence go and bring it back: its blocks moved out and in, or its tokens computed again.


@dataclass(frozen=True, slots=True)
class Return:
    """Of one sequence, seconds: the least of many."""

    block_size: int
    num_tokens: int
    swap: float  # out and in
    recompute: float
    num_bytes: int  # of its blocks, one way


def measure_return(bench: Bench, num_tokens: int, repeats: int, seed: int) -> Return:
    """A pool of twice its size, its blocks anywhere in it; recomputing is a prompt of that length."""
    numbers, block_size = bench.built.report.precision, bench.built.report.pool.block_size
    layout = block_layout(block_size, bench.built.model, numbers)
    count = -(-num_tokens // block_size)
    pool = Pool(layout, 2 * count + 1, numbers.device)
    mover = TransferEngine(pool, count)
    source = random.Random(seed)
    blocks = ints(source.sample(range(1, 2 * count + 1), count))
    hosts = ints(range(1, count + 1))
    swap = min(_swap(mover, blocks, hosts, numbers.device) for _ in range(repeats + 1))
    recompute = min(bench.serve(bench.requests([Lengths(num_tokens, 1)])).seconds for _ in range(repeats))
    return Return(block_size, num_tokens, swap, recompute, count * layout.block_bytes)


def _swap(mover: TransferEngine, blocks: Ints, hosts: Ints, device: torch.device) -> float:
    none = ints()
    started = time.perf_counter()
    mover.move(_moving(HostTransfers(blocks, hosts, none, none)))
    mover.move(_moving(HostTransfers(none, none, hosts, blocks)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _moving(moves: HostTransfers) -> Step:
    """A step in which no row advances."""
    none = ints()
    return Step(0, (), none, none, none, none, none, none, none, none, none, none, moves=moves)


MODES = ("recompute", "swap", "auto")
MICRO_SIZES = (1, 4, 16, 64, 256)
SHORT, LONG = 16, 48  # tokens in and out of every request, end to end
DEMAND_SHARE = 4  # the pool is a quarter of what all requests would hold together


@dataclass(slots=True)
class PreemptionRun:
    """All requests under one mode with one block size; the least of the rounds."""

    mode: str
    block_size: int
    seconds: float = float("inf")
    latency: float = float("inf")  # seconds per token, mean
    preemptions: int = 0
    num_computed: int = 0  # tokens, those of preempted requests again and again
    token_ids: tuple[tuple[int, ...], ...] = ()


def run(setup: Setup) -> Finding:
    micro_sizes = setup.pick((1, 16), MICRO_SIZES, MICRO_SIZES)
    sizes = setup.pick((16,), (4, 16, 32), (1, 4, 16, 32))
    rounds, count, num_tokens = setup.pick((1, 6, 32), (2, 12, 256), (5, 64, 1024))
    total = len(micro_sizes) + (rounds * len(sizes) * len(MODES) + 1) * count
    with setup.progress(total, "measurements and requests") as bar:
        returns = []
        for size in micro_sizes:
            bar.note(f"one sequence, blocks of {size}")
            with opened(setup, block_size=size, num_blocks=4 * num_tokens // size, **_PLAIN) as bench:
                warm_up(bench)
                returns.append(measure_return(bench, num_tokens, setup.pick(2, 5, 20), setup.seed))
            bar()
        with opened(setup, **_PLAIN) as bench:
            requests, words = bench.requests([Lengths(SHORT, LONG)] * count), in_words(bench)
            bar.note("a pool for all")
            expected = _run(bench, requests, PreemptionRun("", 16), bar).token_ids
        served = _serve_all(setup, requests, sizes, rounds, bar)
    return _finding(setup, returns, served, expected, words, count)


_PLAIN: dict[str, Any] = {"enable_prefix_caching": False}


def _serve_all(
    setup: Setup, requests: list[BenchRequest], sizes: tuple[int, ...], rounds: int, bar: Any
) -> list[PreemptionRun]:
    """Modes take turns, so that a disturbance hits all of them alike."""
    runs = []
    for size in sizes:
        each = [PreemptionRun(mode, size) for mode in MODES]
        num_blocks = max(
            2 * -(-(SHORT + LONG) // size), len(requests) * (SHORT + LONG) // DEMAND_SHARE // size
        )
        with ExitStack() as stack:
            benches = []
            for run in each:
                changes = {
                    "block_size": size,
                    "num_blocks": num_blocks,
                    "preemption_mode": run.mode,
                    **_PLAIN,
                }
                benches.append(stack.enter_context(opened(setup, **changes)))
                warm_up(benches[-1])
            for _ in range(rounds):
                for run, bench in zip(each, benches, strict=True):
                    bar.note(f"{run.mode}, blocks of {size}")
                    _run(bench, requests, run, bar)
        runs += each
    return runs


def _run(
    bench: Bench, requests: list[BenchRequest], run: PreemptionRun, bar: Callable[[], None]
) -> PreemptionRun:
    engine = bench.engine
    before, started = engine.scheduler.stats.num_preemptions, engine.clock()
    computed = engine.stats.num_computed_tokens
    ids = submit(engine, requests, f"preempt-{engine.stats.num_requests}")
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    latencies = []
    while engine.has_work:
        for update in engine.step():
            tokens[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                latencies.append((engine.clock() - started) / len(tokens[update.request_id]))
                bar()
    engine.check_integrity()
    run.seconds = min(run.seconds, engine.clock() - started)
    run.latency = min(run.latency, sum(latencies) / len(latencies))
    run.preemptions = engine.scheduler.stats.num_preemptions - before
    run.num_computed = engine.stats.num_computed_tokens - computed
    run.token_ids = tuple(tuple(tokens[request_id]) for request_id in ids)
    return run


def _finding(
    setup: Setup,
    returns: list[Return],
    served: list[PreemptionRun],
    expected: tuple[tuple[int, ...], ...],
    words: str,
    count: int,
) -> Finding:
    usual = next(resumed for resumed in returns if resumed.block_size == 16)
    same = all(run.token_ids == expected for run in served)
    at_16 = {run.mode: run for run in served if run.block_size == 16}
    quicker = "Swapping" if usual.swap < usual.recompute else "Computing again"
    ratio = max(usual.swap, usual.recompute) / min(usual.swap, usual.recompute)
    take_away = (
        f"{quicker} is {ratio:.0f} times as fast here for a sequence of {usual.num_tokens} tokens with blocks of 16 "
        f"({1e3 * usual.swap:.1f} ms out and back, {1e3 * usual.recompute:.0f} ms to compute again). With a quarter of "
        f"the memory, {count} requests take {at_16['recompute'].seconds:.1f} s by recomputing, "
        f"{at_16['swap'].seconds:.1f} s by swapping and {at_16['auto'].seconds:.1f} s with auto."
    )
    picture = Picture(
        "preempt",
        "Leaving the pool and coming back",
        f"{usual.num_tokens} tokens, blocks of 16: {1e3 * usual.swap:.1f} ms to swap out and in, "
        f"{1e3 * usual.recompute:.0f} ms to compute again.",
        lambda figure: _draw(figure, returns, served),
    )
    return Finding(
        take_away,
        [_micro_table(returns), _served_table(served)],
        [picture],
        _record(returns, served, same),
        {"seed": setup.seed, "num_requests": count, "tokens_in": SHORT, "tokens_out": LONG, "model": words},
        _checks(served, same),
        (
            words,
            "one sequence: its blocks lie anywhere in the pool and are copied out to host memory and back; recomputing "
            "is a prompt of as many tokens; the least of several",
            f"end to end: {count} requests at once, {SHORT} tokens in and {LONG} out, a pool of a quarter of what they "
            "hold together; no prefix is found again; the least of the rounds",
        ),
    )  # fmt: skip


def _checks(served: list[PreemptionRun], same: bool) -> list[Check]:
    at_16 = {run.mode: run for run in served if run.block_size == 16}
    best = min(at_16["recompute"].seconds, at_16["swap"].seconds)
    return [
        Check(
            "all modes and block sizes give the tokens of a large pool",
            "the same" if same else "different",
            same,
        ),
        Check(
            "requests were preempted in every run",
            f"{min(run.preemptions for run in served)} to {max(run.preemptions for run in served)} times",
            all(run.preemptions > 0 for run in served),
        ),
        Check(
            "swapping computes no token twice: fewer tokens than recomputing",
            f"{at_16['swap'].num_computed:,} against {at_16['recompute'].num_computed:,}",
            at_16["swap"].num_computed < at_16["recompute"].num_computed,
        ),
        Check(
            "auto is not much slower than the better of the two (within 25 %)",
            f"{at_16['auto'].seconds / best:.2f} times its time",
            at_16["auto"].seconds <= 1.25 * best,
        ),
    ]


def _record(returns: list[Return], served: list[PreemptionRun], same: bool) -> dict[str, Any]:
    return {
        "one_sequence": [
            {
                "block_size": resumed.block_size,
                "num_tokens": resumed.num_tokens,
                "swap_seconds": resumed.swap,
                "recompute_seconds": resumed.recompute,
                "bytes_one_way": resumed.num_bytes,
            }
            for resumed in returns
        ],
        "end_to_end": [
            {
                "mode": run.mode,
                "block_size": run.block_size,
                "seconds": run.seconds,
                "normalised_latency_seconds": run.latency,
                "preemptions": run.preemptions,
                "tokens_computed": run.num_computed,
            }
            for run in served
        ],
        "same_tokens": same,
    }


def _micro_table(returns: list[Return]) -> Table:
    rows = [
        [
            str(resumed.block_size),
            f"{1e3 * resumed.swap:.2f}",
            f"{1e3 * resumed.recompute:.1f}",
            f"{resumed.recompute / resumed.swap:.1f}",
            f"{in_bytes(2 * resumed.num_bytes / resumed.swap)}/s",
        ]
        for resumed in returns
    ]
    title = f"One sequence of {returns[0].num_tokens} tokens"
    return Table(title, ["block size", "swap, ms", "recompute, ms", "ratio", "moved at"], rows, left=0)


def _served_table(served: list[PreemptionRun]) -> Table:
    rows = [
        [
            run.mode,
            str(run.block_size),
            f"{run.seconds:.2f}",
            f"{1e3 * run.latency:.1f}",
            str(run.preemptions),
            f"{run.num_computed:,}",
        ]
        for run in served
    ]
    head = ["mode", "block size", "all requests, s", "ms per token", "preempted", "tokens computed"]
    return Table("A quarter of the memory, end to end", head, rows)


def _draw(figure: Any, returns: list[Return], served: list[PreemptionRun]) -> None:
    left, right = figure.subplots(1, 2)
    sizes = [resumed.block_size for resumed in returns]
    left.plot(
        sizes, [1e3 * resumed.swap for resumed in returns], label="swap out and in", **line_style("swap")
    )
    left.plot(
        sizes, [1e3 * resumed.recompute for resumed in returns], label="recompute", **line_style("recompute")
    )
    plain_log(left, "x")
    plain_log(left, "y")
    left.set_xticks(sizes, [str(size) for size in sizes])
    left.minorticks_off()
    left.set(
        title=f"one sequence of {returns[0].num_tokens} tokens",
        xlabel="tokens per block",
        ylabel="milliseconds",
    )
    left.legend(loc="best")
    each = list(dict.fromkeys(run.block_size for run in served))
    for index, mode in enumerate(MODES):
        runs = [run for run in served if run.mode == mode]
        places = [each.index(run.block_size) + 0.27 * (index - 1) for run in runs]
        bars = right.bar(places, [run.seconds for run in runs], 0.25, label=mode, **bar_style(mode))
        right.bar_label(bars, labels=[f"{run.preemptions}" for run in runs], fontsize=7)
    right.set_xticks(range(len(each)), [str(size) for size in each])
    right.set(
        title="a quarter of the memory (labels: preemptions)",
        xlabel="tokens per block",
        ylabel="seconds, all requests",
    )
    right.grid(axis="x", visible=False)
    right.margins(y=0.25)
    right.legend(loc="upper right", ncols=3)


EXPERIMENT = Experiment(
    "preempt",
    "When memory runs out",
    "A request that must leave the pool can be moved to host memory, or computed again later. Which is cheaper?",
    run,
)

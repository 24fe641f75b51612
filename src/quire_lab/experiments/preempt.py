"""`preempt`: when the pool is full, a request leaves it: swapped to host memory, or computed again."""

import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quire.bench.drive import Bench, BenchRequest
from quire.bench.table import in_bytes
from quire.bench.workload import Lengths
from quire.core.request import Ints, ints
from quire.core.step import HostTransfers, Step
from quire.engine.build import block_layout
from quire.layers.attention import Pool
from quire.runner.transfer import TransferEngine
from quire_lab.measure.compare import Interleaved, interleave
from quire_lab.measure.engines import in_words, opened, submit, warm_up
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, bar_style, error_bars, line_style, plain_log
from quire_lab.report.interval import CONFIDENCE_WORDS, Interval, Ratio

# What it costs to let a sequence go and bring it back: its blocks moved out and in, or its tokens computed again.


@dataclass(frozen=True, slots=True)
class Return:
    """Of one sequence."""

    block_size: int
    num_tokens: int
    measured: Interleaved[str, float]  # "swap", out and in, and "recompute", in ms
    num_bytes: int  # of its blocks, one way

    @property
    def swap(self) -> Interval:
        return self.measured.interval("swap", float)

    @property
    def recompute(self) -> Interval:
        return self.measured.interval("recompute", float)

    @property
    def ratio(self) -> Ratio:
        """What computing again takes over what swapping takes."""
        return self.measured.ratio("recompute", "swap", float)


def measure_return(setup: Setup, bench: Bench, num_tokens: int, share: float) -> Return:
    """A pool of twice its size, its blocks anywhere in it; recomputing is a prompt of that length."""
    numbers, block_size = bench.built.report.precision, bench.built.report.pool.block_size
    layout = block_layout(block_size, bench.built.model, numbers)
    count = -(-num_tokens // block_size)
    pool = Pool(layout, 2 * count + 1, numbers.device)
    mover = TransferEngine(pool, count)
    source = random.Random(setup.seed)
    blocks = ints(source.sample(range(1, 2 * count + 1), count))
    hosts = ints(range(1, count + 1))
    _swap(mover, blocks, hosts, numbers.device)  # memory is touched once
    variants = {
        "swap": lambda: 1e3 * _swap(mover, blocks, hosts, numbers.device),
        "recompute": lambda: 1e3 * bench.serve(bench.requests([Lengths(num_tokens, 1)])).seconds,
    }
    measured = interleave(setup, variants, float, f"one sequence, blocks of {block_size}", share=share)
    return Return(block_size, num_tokens, measured, count * layout.block_bytes)


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
    return Step(0, (), none, none, none, none, none, moves=moves)


MODES = ("recompute", "swap", "auto")
MICRO_SIZES = (1, 4, 16, 64, 256)
SHORT, LONG = 16, 48  # tokens in and out of every request, end to end
DEMAND_SHARE = 4  # the pool is a quarter of what all requests would hold together


@dataclass(frozen=True, slots=True)
class PreemptionRun:
    """All requests, once."""

    seconds: float
    latency: float  # seconds per token, mean
    preemptions: int
    num_computed: int  # tokens, those of preempted requests again and again
    token_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Modes:
    """All requests under each mode, with one block size."""

    block_size: int
    measured: Interleaved[str, PreemptionRun]

    def counted(self, mode: str) -> PreemptionRun:
        """A run whose counts stand for all."""
        return self.measured.runs[mode][0]

    def seconds(self, mode: str) -> Interval:
        return self.measured.interval(mode, _seconds)

    def over(self, mode: str, other: str) -> Ratio:
        """Of the time that all requests take."""
        return self.measured.ratio(mode, other, _seconds)


def _seconds(run: PreemptionRun) -> float:
    return run.seconds


def run(setup: Setup) -> Finding:
    micro_sizes = setup.pick((1, 16), MICRO_SIZES, MICRO_SIZES)
    sizes = setup.pick((16,), (4, 16, 32), (1, 4, 16, 32))
    count, num_tokens = setup.pick((6, 32), (12, 256), (64, 1024))
    returns = []
    for size in micro_sizes:
        with opened(setup, block_size=size, num_blocks=4 * num_tokens // size, **_PLAIN) as bench:
            warm_up(bench)
            returns.append(measure_return(setup, bench, num_tokens, 0.3 / len(micro_sizes)))
    with opened(setup, **_PLAIN) as bench:
        requests, words = bench.requests([Lengths(SHORT, LONG)] * count), in_words(bench)
        expected = _run(bench, requests).token_ids
    served = [_serve_all(setup, requests, size, 0.7 / len(sizes)) for size in sizes]
    return _finding(setup, returns, served, expected, words, count)


_PLAIN: dict[str, Any] = {"enable_prefix_caching": False}


def _serve_all(setup: Setup, requests: list[BenchRequest], size: int, share: float) -> Modes:
    num_blocks = max(2 * -(-(SHORT + LONG) // size), len(requests) * (SHORT + LONG) // DEMAND_SHARE // size)
    with ExitStack() as stack:
        variants = {}
        for mode in MODES:
            changes = {"block_size": size, "num_blocks": num_blocks, "preemption_mode": mode, **_PLAIN}
            bench = stack.enter_context(opened(setup, **changes))
            warm_up(bench)
            variants[mode] = partial(_run, bench, requests)
        return Modes(size, interleave(setup, variants, _seconds, f"blocks of {size}", share=share))


def _run(bench: Bench, requests: list[BenchRequest]) -> PreemptionRun:
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
    seconds = engine.clock() - started
    engine.check_integrity()
    return PreemptionRun(
        seconds,
        sum(latencies) / len(latencies),
        engine.scheduler.stats.num_preemptions - before,
        engine.stats.num_computed_tokens - computed,
        tuple(tuple(tokens[request_id]) for request_id in ids),
    )


def _finding(
    setup: Setup,
    returns: list[Return],
    served: list[Modes],
    expected: tuple[tuple[int, ...], ...],
    words: str,
    count: int,
) -> Finding:
    usual = next(resumed for resumed in returns if resumed.block_size == 16)
    at_16 = next(modes for modes in served if modes.block_size == 16)
    same = all(run.token_ids == expected for run in _runs(served))
    take_away = (
        f"Swapping against computing again, for a sequence of {usual.num_tokens} tokens with blocks of 16: "
        f"{usual.ratio.claim('times as fast')} ({usual.swap.text(1)} ms out and back, {usual.recompute.text(1)} ms to "
        f"compute again). With a quarter of the memory {count} requests take {at_16.seconds('recompute').text()} s by "
        f"recomputing; by swapping: {at_16.over('recompute', 'swap').claim('times as fast')}; with auto: "
        f"{at_16.over('recompute', 'auto').claim('times as fast')}."
    )
    picture = Picture(
        "preempt",
        "Leaving the pool and coming back",
        f"{usual.num_tokens} tokens, blocks of 16, swapping against computing again: "
        f"{usual.ratio.short('times as fast')}.",
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
            f"is a prompt of as many tokens; in turns, {usual.measured.num_rounds} rounds with blocks of 16",
            f"end to end: {count} requests at once, {SHORT} tokens in and {LONG} out, a pool of a quarter of what they "
            f"hold together; no prefix is found again; modes in turns, {at_16.measured.num_rounds} rounds",
            f"times: medians with {CONFIDENCE_WORDS} intervals",
        ),
    )  # fmt: skip


def _runs(served: list[Modes]) -> list[PreemptionRun]:
    return [run for modes in served for runs in modes.measured.runs.values() for run in runs]


def _checks(served: list[Modes], same: bool) -> list[Check]:
    at_16 = next(modes for modes in served if modes.block_size == 16)
    best = min(("recompute", "swap"), key=lambda mode: at_16.seconds(mode).median)
    counts = [run.preemptions for run in _runs(served)]
    computed = {mode: at_16.counted(mode).num_computed for mode in MODES}
    return [
        Check(
            "all modes and block sizes give the tokens of a large pool",
            "the same" if same else "different",
            same,
        ),
        Check(
            "requests were preempted in every run",
            f"{min(counts)} to {max(counts)} times",
            min(counts) > 0,
        ),
        Check(
            "swapping computes no token twice: fewer tokens than recomputing",
            f"{computed['swap']:,} against {computed['recompute']:,}",
            computed["swap"] < computed["recompute"],
        ),
        Check(
            "auto is not much slower than the better of the two (within 25 %)",
            f"{at_16.over('auto', best).text()} times its time ({best})",
            at_16.over("auto", best).interval.is_below(1.25),
        ),
    ]


def _record(returns: list[Return], served: list[Modes], same: bool) -> dict[str, Any]:
    return {
        "one_sequence": [
            {
                "block_size": resumed.block_size,
                "num_tokens": resumed.num_tokens,
                "swap_ms": resumed.swap.record(),
                "recompute_ms": resumed.recompute.record(),
                "recompute_over_swap": resumed.ratio.record(),
                "bytes_one_way": resumed.num_bytes,
            }
            for resumed in returns
        ],
        "end_to_end": [
            {
                "mode": mode,
                "block_size": modes.block_size,
                "seconds": modes.seconds(mode).record(),
                "normalised_latency_seconds": modes.measured.interval(mode, lambda run: run.latency).record(),
                "recompute_over_this": modes.over("recompute", mode).record(),
                "preemptions": modes.counted(mode).preemptions,
                "tokens_computed": modes.counted(mode).num_computed,
            }
            for modes in served
            for mode in MODES
        ],
        "same_tokens": same,
    }


def _micro_table(returns: list[Return]) -> Table:
    rows = [
        [
            str(resumed.block_size),
            resumed.swap.text(),
            resumed.recompute.text(1),
            resumed.ratio.text(),
            f"{in_bytes(2e3 * resumed.num_bytes / resumed.swap.median)}/s",
        ]
        for resumed in returns
    ]
    title = f"One sequence of {returns[0].num_tokens} tokens"
    return Table(title, ["block size", "swap, ms", "recompute, ms", "ratio", "moved at"], rows, left=0)


def _served_table(served: list[Modes]) -> Table:
    rows = [
        [
            mode,
            str(modes.block_size),
            modes.seconds(mode).text(),
            modes.measured.interval(mode, lambda run: 1e3 * run.latency).text(1),
            str(modes.counted(mode).preemptions),
            f"{modes.counted(mode).num_computed:,}",
        ]
        for modes in served
        for mode in MODES
    ]
    head = ["mode", "block size", "all requests, s", "ms per token", "preempted", "tokens computed"]
    return Table("A quarter of the memory, end to end", head, rows)


def _draw(figure: Any, returns: list[Return], served: list[Modes]) -> None:
    left, right = figure.subplots(1, 2)
    sizes = [resumed.block_size for resumed in returns]
    swaps, recomputes = [resumed.swap for resumed in returns], [resumed.recompute for resumed in returns]
    for name, label, times in (
        ("swap", "swap out and in", swaps),
        ("recompute", "recompute", recomputes),
    ):
        medians = [interval.median for interval in times]
        left.errorbar(sizes, medians, yerr=error_bars(times), capsize=2, label=label, **line_style(name))
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
    for index, mode in enumerate(MODES):
        places = [number + 0.27 * (index - 1) for number in range(len(served))]
        times = [modes.seconds(mode) for modes in served]
        bars = right.bar(
            places,
            [interval.median for interval in times],
            0.25,
            yerr=error_bars(times),
            label=mode,
            **bar_style(mode),
        )
        right.bar_label(bars, labels=[f"{modes.counted(mode).preemptions}" for modes in served], fontsize=7)
    right.set_xticks(range(len(served)), [str(modes.block_size) for modes in served])
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

"""`blocksize`: attention's time and whole requests' latency for blocks of 1 to 256 tokens."""

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quire.bench.drive import Bench
from quire.bench.workload import Lengths
from quire.core.config import ModelConfig
from quire.engine.build import block_layout
from quire.engine.build.resolve import Precision
from quire.kernels import choose
from quire.layers.attention import Pool
from quire_lab.measure.compare import PLANNED_PAIRS, Interleaved, interleave
from quire_lab.measure.engines import in_words, opened, warm_up
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, bar_style, error_bars, line_style
from quire_lab.report.interval import CONFIDENCE_WORDS, Interval, Ratio

# How long attention itself takes in a decode step, for pages of any size.


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Sequences that each look back over `context` tokens."""

    num_sequences: int
    context: int


class AttentionStep:
    """Attention in all layers of one decode step; a sequence's blocks lie anywhere in the pool."""

    def __init__(
        self, model: ModelConfig, numbers: Precision, block_size: int, shape: DecodeShape, seed: int
    ) -> None:
        device = numbers.device
        blocks_each = -(-shape.context // block_size)
        total = shape.num_sequences * blocks_each
        self._model, self._device = model, device
        self._pool = Pool(block_layout(block_size, model, numbers), total + 1, device)
        for layer in range(model.num_layers):
            for pages in self._pool.layer(layer):
                pages.copy_(torch.randn(pages.shape, device=device).to(pages.dtype))
        order = list(range(1, total + 1))
        random.Random(seed).shuffle(order)
        self._tables = torch.tensor(order, dtype=torch.int32, device=device).view(
            shape.num_sequences, blocks_each
        )
        self._starts = torch.arange(shape.num_sequences + 1, dtype=torch.int32, device=device)
        self._lengths = torch.full((shape.num_sequences,), shape.context, dtype=torch.int32, device=device)
        queries = torch.randn(shape.num_sequences, model.num_heads, model.head_dim, device=device)
        self._queries = queries.to(numbers.format.activation_dtype)
        self._attend = choose("attention", device).paged_attention
        self()  # memory is touched once

    def __call__(self) -> None:
        scale = self._model.head_dim**-0.5
        for layer in range(self._model.num_layers):
            pages = self._pool.layer(layer)
            self._attend(self._queries, *pages, self._starts, self._lengths, self._tables, scale, 0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def timed(self, seconds: float) -> float:
        """The median of the calls that this many seconds have room for, one at least."""
        times: list[float] = []
        ends = time.perf_counter() + seconds
        while (started := time.perf_counter()) < ends or not times:
            self()
            times.append(time.perf_counter() - started)
        return statistics.median(times)


USUAL, LARGE = 16, 256
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512  # tokens, the longest request
POOL_TOKENS = 768  # of every engine, however it is cut: so little that blocks' ends count


@dataclass(frozen=True, slots=True)
class BlockSizeRun:
    """All requests with one block size."""

    latency: float  # seconds per token, mean over requests
    seconds: float  # until all requests were answered
    mean_running: float
    preemptions: int
    steps: int


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Attention alone, in seconds of all layers in a decode step, and whole requests."""

    sizes: Sequence[int]
    attention: Interleaved[int, float]
    served: Interleaved[int, BlockSizeRun]

    def latency(self, size: int) -> Interval:
        return self.served.interval(size, _latency)

    def best(self) -> tuple[int, Ratio]:
        """The size of the least latency, and 16's over it: that several were looked at widens the interval."""
        size = min(self.sizes, key=lambda each: self.latency(each).median)
        return size, self.served.ratio(USUAL, size, _latency, num_comparisons=len(self.sizes) - 1)


def _latency(run: BlockSizeRun) -> float:
    return 1e3 * run.latency


def run(setup: Setup) -> Finding:
    sizes = setup.pick((1, 16, 256), SIZES, SIZES)
    count = setup.pick(4, 10, 48)
    with opened(setup, **_settings(USUAL)) as bench:
        words, model, numbers = in_words(bench), bench.built.model, bench.built.report.precision
    shape = DecodeShape(setup.pick(2, 4, 32), CONTEXT)
    lengths = _lengths(count, setup.seed)
    each = 0.2 * setup.seconds / len(sizes) / (2 * PLANNED_PAIRS)
    steps = {
        size: partial(AttentionStep(model, numbers, size, shape, setup.seed).timed, each) for size in sizes
    }
    attention = interleave(setup, steps, float, "attention, block size", share=0.2)
    steps.clear()  # their pools are large
    with ExitStack() as stack:
        benches = {size: stack.enter_context(opened(setup, **_settings(size))) for size in sizes}
        for bench in benches.values():
            warm_up(bench)
        variants = {size: partial(_serve, bench, lengths) for size, bench in benches.items()}
        served = interleave(setup, variants, _latency, "requests, block size", share=0.8)
    return _finding(setup, BlockSizes(sizes, attention, served), shape, count, words)


def _settings(block_size: int) -> dict[str, Any]:
    return {
        "block_size": block_size,
        "num_blocks": POOL_TOKENS // block_size,
        "enable_prefix_caching": False,
        "max_num_seqs": None,
    }


def _lengths(count: int, seed: int) -> list[Lengths]:
    """Short prompts and answers of any length: most end inside a block."""
    source = random.Random(seed)
    return [Lengths(source.randint(8, 60), source.randint(8, 60)) for _ in range(count)]


def _serve(bench: Bench, lengths: list[Lengths]) -> BlockSizeRun:
    watched = bench.serve(bench.requests(lengths))
    latency = sum(times.last_token / times.num_output_tokens for times in watched.requests) / len(lengths)
    mean_running = sum(watched.num_running) / len(watched.num_running)
    return BlockSizeRun(
        latency, watched.seconds, mean_running, watched.num_preemptions, len(watched.num_running)
    )


def _finding(setup: Setup, measured: BlockSizes, shape: DecodeShape, count: int, words: str) -> Finding:
    usual, large = (measured.served.runs[size][0] for size in (USUAL, LARGE))
    attention = measured.attention.ratio(1, USUAL, float)
    latency = measured.served.ratio(LARGE, USUAL, _latency)
    best, over_best = measured.best()
    quicker = (
        f"Blocks of {best} are quicker than blocks of {USUAL}: {over_best.claim('times as fast')}"
        if over_best.is_above
        else f"No size is shown to be quicker than {USUAL}"
    )
    take_away = (
        f"Attention with blocks of 1 token against {USUAL}: {attention.claim('times as long')}. "
        f"Blocks of {LARGE} leave {large.mean_running:.1f} requests running where {USUAL} has "
        f"{usual.mean_running:.1f}; latency: {latency.claim('times as long')}. {quicker}."
    )
    picture = Picture(
        "blocksize",
        "Block size: attention against waste",
        f"Attention at 1: {attention.short('times as long')}. Large blocks cost memory: fewer requests run "
        f"({large.mean_running:.1f} instead of {usual.mean_running:.1f}).",
        lambda figure: _draw(figure, measured),
        height=3.9,
    )
    results = {
        "points": [_record(measured, size) for size in measured.sizes],
        "attention_of_1_over_16": attention.record(),
        "latency_of_256_over_16": latency.record(),
        "best": best,
        "latency_of_16_over_best": over_best.record(),
    }
    checks = [
        Check(
            "a pool in blocks of 256 holds fewer requests at a time than one in blocks of 16",
            f"{large.mean_running:.1f} against {usual.mean_running:.1f}",
            large.mean_running < usual.mean_running,
        ),
        Check(
            "blocks of 16 are within 50 % of the best end-to-end latency",
            over_best.text(),
            over_best.interval.is_below(1.5),
        ),
    ]
    return Finding(
        take_away,
        [_table(measured)],
        [picture],
        results,
        {
            "seed": setup.seed,
            "pool_tokens": POOL_TOKENS,
            "num_requests": count,
            "model": words,
        },
        checks,
        (
            words,
            f"attention: all layers of a decode step, {shape.num_sequences} sequences of {shape.context} tokens whose "
            f"blocks lie anywhere; all sizes in turns, {measured.attention.num_rounds} rounds",
            f"requests: {count} at once, 8 to 60 tokens in and out, a pool of {POOL_TOKENS:,} tokens cut as said; "
            f"all sizes in turns, {measured.served.num_rounds} rounds",
            f"times: medians with {CONFIDENCE_WORDS} intervals",
        ),
    )


def _record(measured: BlockSizes, size: int) -> dict[str, Any]:
    counted = measured.served.runs[size][0]
    return {
        "block_size": size,
        "attention_seconds": measured.attention.interval(size, float).record(),
        "normalised_latency_ms": measured.latency(size).record(),
        "seconds": measured.served.interval(size, lambda run: run.seconds).record(),
        "mean_running": counted.mean_running,
        "preemptions": counted.preemptions,
        "steps": counted.steps,
    }


def _table(measured: BlockSizes) -> Table:
    rows = []
    for size in measured.sizes:
        counted = measured.served.runs[size][0]
        rows.append([
            str(size),
            measured.attention.interval(size, float).scaled(1e3).text(),
            measured.latency(size).text(1),
            measured.served.interval(size, lambda run: run.seconds).text(),
            f"{counted.mean_running:.1f}",
            str(counted.preemptions),
            str(counted.steps),
        ])  # fmt: skip
    head = ["block size", "attention, ms", "ms per token", "all requests, s", "running", "preempted", "steps"]
    return Table("Block sizes", head, rows, left=0)


def _draw(figure: Any, measured: BlockSizes) -> None:
    left, middle, right = figure.subplots(1, 3)
    places = range(len(measured.sizes))
    names = [str(size) for size in measured.sizes]
    attention = [measured.attention.interval(size, float).scaled(1e3) for size in measured.sizes]
    latency = [measured.latency(size) for size in measured.sizes]
    for axis, intervals, series in ((left, attention, 0), (right, latency, 1)):
        medians = [interval.median for interval in intervals]
        axis.errorbar(places, medians, yerr=error_bars(intervals), capsize=2, **line_style(series))
    left.set(title="attention in one step", ylabel="milliseconds, all layers")
    running = [measured.served.runs[size][0].mean_running for size in measured.sizes]
    middle.bar(places, running, 0.7, **bar_style(2))
    middle.set(title="requests running", ylabel="mean over steps")
    right.set(title="latency, end to end", ylabel="ms per output token")
    for axis in (left, middle, right):
        axis.set_xticks(list(places), names)
        axis.set_xlabel("tokens per block")
        axis.set_ylim(bottom=0)
        axis.grid(axis="x", visible=False)


EXPERIMENT = Experiment(
    "blocksize",
    "How large a block should be",
    "Small blocks waste little memory; large ones are quicker to read. Where does it balance?",
    run,
)

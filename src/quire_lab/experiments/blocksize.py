"""`blocksize`: attention's time and whole requests' latency for blocks of 1 to 256 tokens."""

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from quire.bench.drive import Bench
from quire.bench.lengths import Lengths
from quire.core.config import ModelConfig
from quire.engine.build import block_layout
from quire.engine.build.resolve import Precision
from quire.kernels import choose
from quire.layers.attention import Pool
from quire_lab.measure.engines import in_words, opened, warm_up
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table
from quire_lab.report.figure import Picture, bar_style, line_style

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

    def least_seconds(self, seconds: float) -> float:
        """Of the calls that this many seconds have room for, one at least."""
        best, ends = float("inf"), time.perf_counter() + seconds
        while (started := time.perf_counter()) < ends or best == float("inf"):
            self()
            best = min(best, time.perf_counter() - started)
        return best


SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512  # tokens, the longest request
POOL_TOKENS = 768  # of every engine, however it is cut: so little that blocks' ends count


@dataclass(slots=True)
class BlockSizeResult:
    """Of one block size."""

    block_size: int
    attention: float = float("inf")  # seconds of all layers in a decode step: the least of many
    latency: float = float("inf")  # seconds per token, mean over requests: the least of the rounds
    seconds: float = float("inf")  # until all requests were answered
    mean_running: float = 0.0
    preemptions: int = 0
    steps: int = 0


def run(setup: Setup) -> Finding:
    sizes = setup.pick((1, 16, 256), SIZES, SIZES)
    rounds, count, each = setup.pick((1, 4, 0.02), (3, 10, 0.2), (5, 48, 1.0))
    with opened(setup, **_settings(16)) as bench:
        words, model, numbers = in_words(bench), bench.built.model, bench.built.report.precision
    shape = DecodeShape(setup.pick(2, 4, 32), CONTEXT)
    lengths = _lengths(count, setup.seed)
    results = [BlockSizeResult(size) for size in sizes]
    with setup.progress(len(sizes) * rounds * (1 + count), "steps and requests") as bar:
        steps = [AttentionStep(model, numbers, size, shape, setup.seed) for size in sizes]
        for _ in range(rounds):  # all sizes in turn, so that a disturbance hits none of them alone
            for result, step in zip(results, steps, strict=True):
                bar.note(f"attention, blocks of {result.block_size}")
                result.attention = min(result.attention, step.least_seconds(each))
                bar()
        del steps, step  # their pools are large
        with ExitStack() as stack:
            benches = [stack.enter_context(opened(setup, **_settings(size))) for size in sizes]
            for bench in benches:
                warm_up(bench)
            for _ in range(rounds):
                for result, bench in zip(results, benches, strict=True):
                    bar.note(f"requests, blocks of {result.block_size}")
                    _serve(bench, lengths, result, bar)
    return _finding(setup, results, shape, count, rounds, words)


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


def _serve(bench: Bench, lengths: list[Lengths], one: BlockSizeResult, bar: Callable[[], None]) -> None:
    watched = bench.serve(bench.requests(lengths), bar)
    latency = sum(times.last_token / times.num_output_tokens for times in watched.requests) / len(lengths)
    one.latency, one.seconds = min(one.latency, latency), min(one.seconds, watched.seconds)
    one.mean_running = sum(watched.num_running) / len(watched.num_running)
    one.preemptions, one.steps = watched.num_preemptions, len(watched.num_running)


def _finding(
    setup: Setup, measured: list[BlockSizeResult], shape: DecodeShape, count: int, rounds: int, words: str
) -> Finding:
    by_size = {result.block_size: result for result in measured}
    usual, smallest, large = by_size[16], by_size[1], by_size[256]
    best = min(measured, key=lambda each: each.latency)
    take_away = (
        f"With blocks of 1 token attention takes {smallest.attention / usual.attention:.2f} times as long as with 16; "
        f"blocks of 256 leave {large.mean_running:.1f} requests running where 16 has {usual.mean_running:.1f}, "
        f"and requests take {large.latency / usual.latency:.2f} times as long. Best here: {best.block_size}."
    )
    picture = Picture(
        "blocksize",
        "Block size: attention against waste",
        f"Small blocks cost attention time ({smallest.attention / usual.attention:.1f} × at 1), large ones memory: "
        f"fewer requests run ({large.mean_running:.1f} instead of {usual.mean_running:.1f}).",
        lambda figure: _draw(figure, measured),
        height=3.9,
    )
    results = {
        "points": [
            {
                "block_size": each.block_size,
                "attention_seconds": each.attention,
                "normalised_latency_seconds": each.latency,
                "seconds": each.seconds,
                "mean_running": each.mean_running,
                "preemptions": each.preemptions,
                "steps": each.steps,
            }
            for each in measured
        ]
    }
    checks = [
        Check(
            "a pool in blocks of 256 holds fewer requests at a time than one in blocks of 16",
            f"{large.mean_running:.1f} against {usual.mean_running:.1f}",
            large.mean_running < usual.mean_running,
        ),
        Check(
            "blocks of 16 are within 50 % of the best end-to-end latency",
            f"{usual.latency / best.latency:.2f} ×",
            usual.latency <= 1.5 * best.latency,
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
            "rounds": rounds,
            "model": words,
        },
        checks,
        (
            words,
            f"attention: all layers of a decode step, {shape.num_sequences} sequences of {shape.context} tokens whose "
            "blocks lie anywhere; the least of many",
            f"requests: {count} at once, 8 to 60 tokens in and out, a pool of {POOL_TOKENS:,} tokens cut as said; "
            f"the least of {rounds} rounds",
        ),
    )


def _table(results: list[BlockSizeResult]) -> Table:
    rows = [
        [
            str(result.block_size),
            f"{1e3 * result.attention:.2f}",
            f"{1e3 * result.latency:.1f}",
            f"{result.seconds:.2f}",
            f"{result.mean_running:.1f}",
            str(result.preemptions),
            str(result.steps),
        ]
        for result in results
    ]
    head = ["block size", "attention, ms", "ms per token", "all requests, s", "running", "preempted", "steps"]
    return Table("Block sizes", head, rows, left=0)


def _draw(figure: Any, results: list[BlockSizeResult]) -> None:
    left, middle, right = figure.subplots(1, 3)
    places = range(len(results))
    names = [str(result.block_size) for result in results]
    left.plot(places, [1e3 * result.attention for result in results], **line_style(0))
    left.set(title="attention in one step", ylabel="milliseconds, all layers")
    middle.bar(places, [result.mean_running for result in results], 0.7, **bar_style(2))
    middle.set(title="requests running", ylabel="mean over steps")
    right.plot(places, [1e3 * result.latency for result in results], **line_style(1))
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

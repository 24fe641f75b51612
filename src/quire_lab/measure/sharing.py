"""Sharing: how many blocks parallel sampling and beam search save, on the lengths of real requests.

The scheduler, the memory and beam search are the engine's own; only the model is missing (see CountingRunner). Saved is
what the PagedAttention paper calls it: blocks saved by sharing over blocks without it, summed over all steps.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from quire.bench.workload import Lengths, within
from quire.core.config import SchedulerConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import Built
from quire.engine.engine import Engine
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from quire_lab.measure.counting_runner import CountingRunner
from quire_lab.report.interval import Interval, Ratio
from quire_lab.simulate.beams import SHARES as SHARES

METHODS = {"parallel": "parallel sampling", "beam": "beam search"}
CONTEXT = 2048  # tokens, as the paper's models have
VOCABULARY = 50_000
BLOCK_SIZE = 16
ROWS = 256
WIDTHS = (2, 4, 6)
# in per cent: Figure 15 of "Efficient Memory Management for Large Language Model Serving with PagedAttention"
PAPER = {
    ("alpaca", "parallel"): (6.0, 10.0),
    ("sharegpt", "parallel"): (16.0, 31.0),
    ("alpaca", "beam"): (38.0, 55.0),
    ("sharegpt", "beam"): (44.0, 66.0),
}


@dataclass(frozen=True, slots=True)
class SharingWorkload:
    name: str  # "alpaca" or "sharegpt": whose range of the paper it is compared with
    source: str  # of the lengths, in words
    lengths: Sequence[Lengths]


@dataclass(frozen=True, slots=True)
class Saving:
    """Of one workload with one way of decoding."""

    workload: str
    method: str  # "parallel" or "beam"
    width: int
    num_requests: int
    num_too_long: int
    num_steps: int
    blocks_shared: int  # held, summed over steps
    blocks_unshared: int  # what the same sequences would hold alone
    copies: int  # blocks copied on write

    @property
    def percent(self) -> float:
        return 100.0 * (1.0 - self.blocks_shared / self.blocks_unshared) if self.blocks_unshared else 0.0


def sampling_for(method: str, width: int, max_tokens: int) -> SamplingParams:
    """`width` sequences that all run to their length."""
    if method == "beam":
        return SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens, ignore_eos=True)
    return SamplingParams(n=width, temperature=1.0, max_tokens=max_tokens, ignore_eos=True)


def measure_saving(
    workload: SharingWorkload,
    method: str,
    width: int,
    seed: int,
    on_finish: Callable[[], None] = lambda: None,
) -> Saving:
    """All requests at once, as many of them together as rows allow; the pool is never the limit."""
    held, num_too_long = within(workload.lengths, CONTEXT)
    engine = _engine(seed)
    prompts = random.Random(seed)
    for index, request in enumerate(held):
        prompt = [prompts.randrange(2, VOCABULARY) for _ in range(request.num_prompt_tokens)]
        engine.add(Request(str(index), prompt, sampling_for(method, width, request.num_output_tokens)))
    memory, shared, unshared = engine.memory, 0, 0
    while engine.has_work:
        finished = {update.request_id for update in engine.step() if update.finish_reason}
        shared += memory.num_blocks - memory.num_free
        unshared += sum(len(sequence.block_ids) for sequence in engine.scheduler.running)
        for _ in finished:
            on_finish()
    engine.check_integrity()
    return Saving(
        workload.name,
        method,
        width,
        len(held),
        num_too_long,
        engine.stats.num_steps,
        shared,
        unshared,
        memory.stats.copies,
    )


def _engine(seed: int) -> Engine:
    memory = PagedMemory(ROWS * CONTEXT // BLOCK_SIZE, BLOCK_SIZE, enable_prefix_caching=False)
    limits = Limits(VOCABULARY, CONTEXT, ROWS, ())
    config = SchedulerConfig(ROWS, CONTEXT, steps_in_flight=0)
    return Engine(config, limits, memory, CountingRunner(VOCABULARY, SHARES, seed), seed)


# Beam search on a real model, with and without sharing: the same requests in turn, tokens a second.

OUTPUT_LEN = 48
# plain text to go on with: a model's own beams branch as they do in use, which random tokens would not show
TEXTS = (
    "The history of the city begins with",
    "In this article we will discuss the ways in which",
    "Question: Why is the sky blue?\nAnswer:",
    "She opened the door and saw that the room was",
    "The most important thing about programming is",
    "def quicksort(items):\n    ",
    "Dear Sir or Madam, I am writing to you about",
    "Photosynthesis is the process by which plants",
)


@dataclass(frozen=True, slots=True)
class BeamRate:
    """Tokens of all beams a second, each counted once: medians of the rounds."""

    width: int
    shared: float
    unshared: float
    ratio: Ratio  # of the rounds' own
    saved_percent: float  # of blocks, by sharing
    copies_shared: int  # blocks copied in one round
    copies_unshared: int
    preemptions_shared: int  # in one round
    preemptions_unshared: int
    rounds: tuple[tuple[float, float], ...]  # tokens a second, shared and not


@dataclass(frozen=True, slots=True)
class _Round:
    rate: float
    saved_percent: float
    copies: int
    preemptions: int


def measure_rates(
    shared: Built, unshared: Built, prompts: Sequence[Sequence[int]], rounds: int, note: Callable[[str], None]
) -> list[BeamRate]:
    """Both engines take turns, so that a busy machine slows them alike."""
    rates = []
    for engine in (shared.engine, unshared.engine):
        _run(engine, prompts[:2], WIDTHS[0])  # memory is touched once
    for width in WIDTHS:
        note(f"beams of {width} on the model, {rounds} rounds each with and without sharing")
        started = time.perf_counter()
        pairs = [
            _pair(shared.engine, unshared.engine, prompts, width, index % 2 == 1) for index in range(rounds)
        ]
        ratios = Interval.of([shared_run.rate / other.rate for shared_run, other in pairs])
        rates.append(
            BeamRate(
                width,
                median(shared_run.rate for shared_run, _ in pairs),
                median(other.rate for _, other in pairs),
                Ratio(ratios, time.perf_counter() - started),
                pairs[0][0].saved_percent,
                pairs[0][0].copies,
                pairs[0][1].copies,
                pairs[0][0].preemptions,
                pairs[0][1].preemptions,
                tuple((shared_run.rate, other.rate) for shared_run, other in pairs),
            )
        )
    return rates


def _pair(
    shared: Engine, unshared: Engine, prompts: Sequence[Sequence[int]], width: int, is_reversed: bool
) -> tuple[_Round, _Round]:
    """One round of both; every second one begins with the other engine."""
    if is_reversed:
        other = _run(unshared, prompts, width)
        return _run(shared, prompts, width), other
    return _run(shared, prompts, width), _run(unshared, prompts, width)


def _run(engine: Engine, prompts: Sequence[Sequence[int]], width: int) -> _Round:
    memory, scheduler = engine.memory, engine.scheduler
    copies, preemptions = memory.stats.copies, scheduler.stats.num_preemptions
    held = alone = 0
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add(Request(f"sharing-{width}-{index}", prompt, sampling_for("beam", width, OUTPUT_LEN)))
    while engine.has_work:
        engine.step()
        held += memory.num_blocks - memory.num_free
        alone += sum(len(sequence.block_ids) for sequence in scheduler.running)
    seconds = time.perf_counter() - started
    saved = 100.0 * (1.0 - held / alone) if alone else 0.0
    return _Round(
        len(prompts) * width * OUTPUT_LEN / seconds,
        saved,
        memory.stats.copies - copies,
        scheduler.stats.num_preemptions - preemptions,
    )

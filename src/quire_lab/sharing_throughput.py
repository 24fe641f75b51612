"""Beam search on a real model, with and without sharing: the same requests in turn, tokens a second."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from quire.core.request import Request
from quire.engine.build import Built
from quire.engine.engine import Engine
from quire_lab.sharing import WIDTHS, sampling_for

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
    ratio: float  # the median of the rounds' own
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
    found = []
    for engine in (shared.engine, unshared.engine):
        _run(engine, prompts[:2], WIDTHS[0])  # memory is touched once
    for width in WIDTHS:
        note(f"beams of {width} on the model, {rounds} rounds each with and without sharing")
        pairs = [
            (_run(shared.engine, prompts, width), _run(unshared.engine, prompts, width))
            for _ in range(rounds)
        ]
        found.append(
            BeamRate(
                width,
                median(one.rate for one, _ in pairs),
                median(other.rate for _, other in pairs),
                median(one.rate / other.rate for one, other in pairs),
                pairs[0][0].saved_percent,
                pairs[0][0].copies,
                pairs[0][1].copies,
                pairs[0][0].preemptions,
                pairs[0][1].preemptions,
                tuple((one.rate, other.rate) for one, other in pairs),
            )
        )
    return found


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

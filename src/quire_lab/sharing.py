"""Sharing: how many blocks parallel sampling and beam search save, on the lengths of real requests.

The scheduler, the memory and beam search are the engine's own; only the model is missing (see CountingRunner). Saved is
what the PagedAttention paper calls it: blocks saved by sharing over blocks without it, summed over all steps.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.bench.lengths import Lengths, within
from quire.core.config import SchedulerConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from quire_lab.counting_runner import CountingRunner
from quire_lab.simulate.beams import SHARES as SHARES

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
class Workload:
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
    workload: Workload, method: str, width: int, seed: int, on_finish: Callable[[], None] = lambda: None
) -> Saving:
    """All requests at once, as many of them together as rows allow; the pool is never the limit."""
    held, num_too_long = within(workload.lengths, CONTEXT)
    engine = _engine(seed)
    prompts = random.Random(seed)
    for index, one in enumerate(held):
        prompt = [prompts.randrange(2, VOCABULARY) for _ in range(one.num_prompt_tokens)]
        engine.add(Request(str(index), prompt, sampling_for(method, width, one.num_output_tokens)))
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

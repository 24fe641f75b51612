"""What memory is spent on while requests of given lengths go through scheduler and memory, without a model."""

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from quire.bench.drive import BenchRequest
from quire.bench.lengths import Lengths, within
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.request import Sequence
from quire.engine.build.resolve import resolve_memory
from quire.engine.engine import Engine
from quire.engine.policies import make_memory
from quire.engine.validation import Limits
from quire.memory.paged import PagedMemory
from quire_lab.baselines.memory_usage import MemoryUsageSample, MemoryUsageSampler
from quire_lab.counting_runner import CountingRunner
from quire_lab.experiments.engines import greedy, submit
from quire_lab.sharing import SHARES

POOL_TOKENS = 15_700  # what OPT-13B has on a GPU of 40 GB: the setting of the published figures
CONTEXT = 2048
ROWS = 512
EVERY = 3  # steps: looking costs more than a step without a model
VOCABULARY = 50_000
WAYS = ("paged", "oracle", "pow2", "max")
KINDS = ("tokens", "reserved", "internal", "external", "free")  # of Spending; nothing here keeps ended rows


@dataclass(frozen=True, slots=True)
class Spent:
    """Of one way to give memory, over the steps in which somebody waited, if anybody did: there memory is the limit."""

    workload: str
    way: str
    block_size: int
    shares: dict[str, float]  # of the whole pool, by KINDS
    samples: Several[MemoryUsageSample]  # moments are steps
    mean_running: float
    max_slack: int  # positions in blocks that a sequence had not written, at most
    num_requests: int

    @property
    def held_waste(self) -> float:
        """Of the memory that is held: what holds no token."""
        held = sum(self.shares[kind] for kind in ("tokens", "reserved", "internal"))
        return 1.0 - self.shares["tokens"] / held if held else 0.0


def spend(
    workload: str,
    lengths: Several[Lengths],
    way: str,
    block_size: int = 16,
    on_finish: Callable[[], None] = lambda: None,
    pool_tokens: int = POOL_TOKENS,
) -> Spent:
    """All requests at once, as many of them together as memory allows."""
    held, _ = within(lengths, min(CONTEXT, pool_tokens))
    config = resolve_memory(
        MemoryConfig(
            block_size=block_size if way == "paged" else 1, reservation=way, enable_prefix_caching=False
        )
    )
    memory = make_memory(config, pool_tokens // config.block_size, CONTEXT)
    scheduler = SchedulerConfig(ROWS, 8192, steps_in_flight=0)
    runner = CountingRunner(VOCABULARY, SHARES, 0)
    engine = Engine(scheduler, Limits(VOCABULARY, CONTEXT, ROWS, ()), memory, runner)
    requests = [BenchRequest([2] * one.num_prompt_tokens, greedy(one.num_output_tokens)) for one in held]
    submit(engine, requests, way)
    sampler, before = MemoryUsageSampler(memory), MemoryUsageSampler(memory)
    running: list[int] = []
    slack = 0
    while engine.has_work:
        for update in engine.step():
            if update.finish_reason is not None:
                on_finish()
        if engine.stats.num_steps % EVERY:
            continue
        if isinstance(memory, PagedMemory):
            slack = max((slack, *(_slack(memory, one) for one in engine.scheduler.running)))
        first = engine.scheduler.waiting.peek()
        if first is not None:
            running.append(len(engine.scheduler.running))
            sampler.sample(float(engine.stats.num_steps), engine.scheduler.running, (), first.request)
        elif not running:
            before.sample(float(engine.stats.num_steps), engine.scheduler.running)
    engine.check_integrity()
    sampler = sampler if running else before  # nobody ever waited: then all steps count
    shares = sampler.mean_shares() or dict.fromkeys((*KINDS, "ended"), 0.0)
    return Spent(
        workload,
        way,
        config.block_size,
        shares,
        sampler.samples(),
        sum(running) / max(1, len(running)),
        slack,
        len(held),
    )


def _slack(memory: PagedMemory, sequence: Sequence) -> int:
    return len(sequence.block_ids) * memory.block_size - sequence.num_computed

"""build: an engine from its config, in the order plan → load → wire → report."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, Generic, TypeVar

from quire.adapters.peft import PackedAdapter
from quire.core import laboratory
from quire.core.config import EngineConfig, ModelConfig, ModelOptions, SchedulerConfig
from quire.core.errors import ConfigError, QuireError
from quire.core.sampling import SamplingParams
from quire.core.stats import StartStats
from quire.engine.adapters import Adapters
from quire.engine.build.adapters import BuiltAdapters, adapter_lines, build_adapters
from quire.engine.build.host_memory import HostMemory, make_host_memory
from quire.engine.build.pins import PinnedPrefix, pin_prefixes
from quire.engine.build.pool import BuiltPool, make_pool, start_kernel_warmup
from quire.engine.build.ranks import start_ranks
from quire.engine.build.report import Report, policies_in_words, running_on
from quire.engine.build.resolve import (
    BuildPlan,
    Progress,
    default_sampling,
    encoder_input,
    end_token_ids,
    is_simulated,
    make_plan,
    resolve_memory,
    resolve_scheduler,
)
from quire.engine.build.runner import BuiltRunner, build_runner, runner_limits
from quire.engine.build.weights import LoadedModels, load_models, make_proposer, offload_lines
from quire.engine.engine import Engine, EngineCore
from quire.engine.policies import make_memory
from quire.engine.speculation import Speculation
from quire.engine.validation import Limits
from quire.grammar.compiler import Compiler
from quire.grammar.matcher import GrammarError
from quire.grammar.vocabulary import Vocabulary
from quire.kernels.sm_share import num_sms
from quire.memory.cross import CrossMemory
from quire.memory.paged import PagedMemory
from quire.memory.swap import PendingTransfers
from quire.models.weight_shape import weight_groups
from quire.parallel.ranks import RankProcesses
from quire.runner.drafts import Proposals
from quire.runner.ranked import RankedRunner, RankRunner
from quire.scheduler.preemption import Preemption
from quire.text.load import choose_tokenizer
from quire.weights.source import Source

PREFILL_ENGINE = "quire.engine.prefill"  # not on the path of plain requests
E = TypeVar("E", bound=EngineCore[Any])


@dataclass(frozen=True, slots=True)
class Built(Generic[E]):
    """An engine that can serve, and what its start read and decided."""

    engine: E
    source: Source
    model: ModelConfig
    default_sampling: SamplingParams
    report: Report


@dataclass(frozen=True, slots=True)
class _Parts:
    """What stands between the loaded models and the engine."""

    scheduler: SchedulerConfig  # every limit decided
    limits: Limits
    host: HostMemory
    adapters: BuiltAdapters | None  # None: they are off
    proposals: Proposals | None  # None: no draft is judged by its probabilities
    runner: BuiltRunner


def build(config: EngineConfig, progress: Progress | None = None) -> Built[Engine]:
    """An engine that can serve. Raises QuireError with what to change where it cannot be built."""
    started = time.perf_counter()
    config = replace(config, memory=resolve_memory(config.memory))
    if is_simulated(config.runner.device):
        if config.runner.sm_share < 1.0:
            raise ConfigError("sm_share is for real GPUs: simulated:h200-sm50 names a simulated share")
        simulate = laboratory.load("simulate.build", "--device simulated")
        built: Built[Engine] = simulate.build_simulated(config, started)
        return built
    load = partial(load_models, progress=progress)
    if config.parallel.num_ranks == 1:
        return assemble(make_plan(config, progress), load, started)
    plan, peers = start_ranks(config, progress)
    try:
        return assemble(plan, load, started, peers)
    except BaseException:
        peers.close()
        if plan.part is not None:
            plan.part.close()
        raise


def assemble(
    plan: BuildPlan,
    load: Callable[[BuildPlan], LoadedModels],
    started: float,
    peers: RankProcesses | None = None,
) -> Built[Engine]:
    """An engine of what a plan decided. `started`: when that began, by `time.perf_counter`. `peers`: other ranks."""
    warmup = start_kernel_warmup(plan)
    models = load(plan)
    pool = make_pool(plan, models, warmup)
    parts = make_parts(plan, models, pool)
    engine = _make_engine(plan, models, pool, parts, peers)
    try:
        pinned = pin_prefixes(engine, plan.config, plan.source)
    except QuireError:
        engine.close()
        raise
    report = _report(plan, models, pool, parts, pinned, time.perf_counter() - started)
    return Built(engine, plan.source, plan.model, default_sampling(plan.source), report)


def make_parts(
    plan: BuildPlan,
    models: LoadedModels,
    pool: BuiltPool,
    received: dict[str, PackedAdapter] | None = None,
) -> _Parts:
    config, device = plan.config, plan.precision.device
    scheduler = resolve_scheduler(
        config.scheduler,
        device,
        pool.num_blocks // plan.groups.num_groups,
        config.parallel.pipeline_parallel_size,
    )
    max_num_seqs, max_tokens = scheduler.limits
    end_ids = end_token_ids(plan.source, plan.model)
    block_size = config.memory.block_size
    encoder = encoder_input(plan.model, plan.source, block_size, plan.max_model_len, max_tokens)
    limits = Limits(plan.model.vocab_size, plan.max_model_len, max_num_seqs, end_ids, max_tokens, encoder)
    for_runner = runner_limits(plan, scheduler, models.model, plan.precision)
    host = make_host_memory(plan, pool.pool)
    adapters = build_adapters(
        plan, models, pool.pool, for_runner, host.transfers, {} if received is None else received
    )
    speculative = plan.speculative
    judged = speculative is not None and speculative.acceptance == "rejection"
    proposals = Proposals() if judged else None
    runner = build_runner(
        models.model,
        pool.pool,
        for_runner,
        device,
        proposals,
        adapters.slots if adapters is not None else None,
        host.transfers,
        plan.part,
    )
    return _Parts(scheduler, limits, host, adapters, proposals, runner)


def _make_engine(
    plan: BuildPlan, models: LoadedModels, pool: BuiltPool, parts: _Parts, peers: RankProcesses | None
) -> Engine:
    config, host, runner = plan.config, parts.host, parts.runner.runner
    ranked = RankedRunner(runner, peers) if peers is not None and isinstance(runner, RankRunner) else None
    pending = PendingTransfers()
    memory = make_memory(
        config.memory,
        pool.num_blocks,
        plan.max_model_len,
        plan.source.fingerprint,
        host.num_swap_blocks,
        pending,
        host.make_offload_cache(pending),
        pool.num_adapter_blocks,
        PagedMemory if plan.model.encoder is None else CrossMemory,
        plan.groups,
        parts.limits.max_num_batched_tokens,
    )
    adapters = None
    if parts.adapters is not None:
        lora = config.adapters
        adapters = Adapters(parts.adapters.store, memory, lora.max_loras, merge=lora.lora_mode == "merge")
    make_speculation = None
    if plan.speculative is not None:
        proposer = make_proposer(plan, parts.scheduler, models.draft, pool.size, parts.proposals)
        make_speculation = partial(Speculation, plan.speculative, proposer, parts.limits.max_num_seqs)
    make: Callable[..., Engine] = Engine
    if (
        config.memory.role == "prefill"
        and host.transfers is not None
        and host.transfers.disk_tier is not None
    ):
        make = partial(import_module(PREFILL_ENGINE).PrefillEngine, host.pools, host.transfers.disk_tier)
    return make(
        parts.scheduler,
        parts.limits,
        memory,
        ranked or runner,
        config.model.seed,
        partial(Compiler, partial(model_vocabulary, config.model, plan.source, parts.limits)),
        make_speculation,
        Preemption(parts.scheduler.preemption_mode, host.block_seconds),
        adapters=adapters,
        when_filling=host.prepare_swap(pool.num_blocks),
        in_new_thread=runner.prepare_thread,
        check_ranks=peers.check if peers is not None else None,
    )


def _report(
    plan: BuildPlan,
    models: LoadedModels,
    pool: BuiltPool,
    parts: _Parts,
    pinned: tuple[PinnedPrefix, ...],
    seconds: float,
) -> Report:
    config, speculative = plan.config, plan.speculative
    weights_bytes = sum(t.numel() * t.element_size() for t in models.model.parameters().values())
    num_graphs, tiles = parts.runner.num_graphs, parts.runner.runner.tiles
    graphs = f", {num_graphs} sizes of steps captured as graphs" if num_graphs else ""
    return Report(
        model=config.model.served_model_name or plan.source.name,
        parallel="" if plan.part is None else str(plan.part),
        where=running_on(plan.precision, plan.num_threads),
        precision=plan.precision,
        start=StartStats(plan.num_threads, weights_bytes, seconds, num_sms(plan.precision.device)),
        groups=weight_groups(models.model),
        limits=parts.limits,
        pool=pool.size,
        device_memory=pool.device_memory,
        products=plan.precision.format.gemm.summary,
        started=f"in {seconds:.2f} s{graphs}{f', {tiles} tiles' if tiles else ''}",
        speculation=speculative.in_words if speculative else "",
        policies=policies_in_words(config.memory, parts.scheduler),
        host=parts.host.lines,
        offload=offload_lines(config, plan.precision, models.streaming),
        streaming=models.streaming,
        pinned=pinned,
        adapters=adapter_lines(config.adapters, parts.adapters, parts.limits.max_num_seqs),
    )


def model_vocabulary(options: ModelOptions, source: Source, limits: Limits) -> Vocabulary:
    """The vocabulary as grammars see it. Takes tenths of a second: made when the first request needs it."""
    tokenizer = choose_tokenizer(options, source)
    if tokenizer is None:
        raise GrammarError(
            "structured output needs a tokenizer, and this model has none: give one with --tokenizer"
        )
    size = limits.vocab_size  # a model may have more rows than its tokenizer has tokens, or fewer
    return Vocabulary(
        tokens=tuple(tokenizer.token_bytes(token_id) for token_id in range(size)),
        special_ids=frozenset(token_id for token_id in tokenizer.special_ids if token_id < size),
        end_ids=tuple(token_id for token_id in limits.eos_token_ids if token_id < size),
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )

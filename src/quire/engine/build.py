"""Builds an engine from its config: source, model, pool, runner, loop. Says what was decided."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from quire.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from quire.core.errors import QuireError
from quire.core.layout import BlockLayout
from quire.core.sampling import SamplingParams
from quire.engine.adapter_build import adapter_lines, build_adapters, separate_blocks, serve_adapters
from quire.engine.draft_model import DraftModel
from quire.engine.engine import Engine
from quire.engine.host_memory import HostMemory, make_host_memory, open_offload_cache
from quire.engine.offload import load_model, offload_lines
from quire.engine.pins import PinnedPrefix, pin_prefixes
from quire.engine.policies import make_memory
from quire.engine.policy_words import policies_in_words
from quire.engine.proposers import LoadedDraft, check_trees, load_draft, make_proposer
from quire.engine.resolve import (
    Precision,
    default_limits,
    resolve_max_model_len,
    resolve_memory,
    resolve_precision,
    resolve_scheduler,
)
from quire.engine.simulated_parts import open_shape, simulated_parts
from quire.engine.speculation import Speculation
from quire.engine.validation import Limits
from quire.engine.vocabulary import model_vocabulary
from quire.grammar.compiler import Compiler
from quire.kernels import native
from quire.kernels.registry import forces_reference
from quire.layers.factory import LayerFactory
from quire.layers.pool import Pool
from quire.memory.interface import Memory
from quire.memory.transfers import PendingTransfers
from quire.models import registry
from quire.models.model import Model
from quire.models.streamed import Streaming, is_streamed
from quire.runner.adapters import device_bytes
from quire.runner.device_runner import DeviceRunner
from quire.runner.devices import is_simulated
from quire.runner.graphs import token_counts
from quire.runner.profile import activation_bytes
from quire.runner.proposals import Proposals
from quire.runner.runner import Runner, RunnerLimits
from quire.runner.sizing import DeviceMemory, PoolSize, divide_gpu, free_host_bytes, pool_size
from quire.runner.warmup import KernelWarmup, warm_up_attention, warm_up_sampling
from quire.scheduler.preemption import Preemption
from quire.weights.open import open_source
from quire.weights.source import Source

GRAPH_SECONDS = 15.0  # of capturing at start; a third of that is usual, more if kernels are compiled too
DEFAULT_MAX_TOKENS = 256  # where the caller gives no sampling parameters at all
Progress = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, slots=True)
class Report:
    """What was decided at start, for people and for metrics."""

    model: str
    numbers: Precision
    weights_bytes: int
    pool: PoolSize
    device_memory: DeviceMemory | None  # None on a CPU
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    num_graphs: int  # sizes of steps that were captured at start
    tiles: str  # attention's, on a GPU: tuned, default or fixed
    seconds: float
    speculation: str = ""  # who drafts and how far, in words
    simulated: str = ""  # the device that is only simulated, and what it was fitted on, in words
    policies: str = ""  # those that are not the usual ones, in words
    host: tuple[str, ...] = ()  # host memory beside the pool, in words
    offload: tuple[str, ...] = ()  # which weights stream and what that costs, in lines
    streaming: Streaming | None = None  # the same as figures; None: all weights stay
    pinned: tuple[PinnedPrefix, ...] = ()
    adapters: tuple[str, ...] = ()  # how many may be asked for, and their limits, in words

    def lines(self) -> list[str]:
        numbers, pool = self.numbers, self.pool
        where = f"on {numbers.device.type}, {self.num_threads} threads"
        if numbers.device.type == "cuda":
            where = f"on {torch.cuda.get_device_name(numbers.device)}"
        if self.simulated:
            where = f"on {self.simulated}"
        divided = [] if self.device_memory is None else [_divided(self.device_memory)]
        graphs = f", {self.num_graphs} sizes of steps captured as graphs" if self.num_graphs else ""
        tiles = f", {self.tiles} tiles" if self.tiles else ""
        return [
            f"model     {self.model}, {numbers.format_name} {where}",
            f"weights   {self.weights_bytes / 1e6:,.0f} MB",
            *self.offload,
            *divided,
            f"pool      {pool.num_bytes / 1e6:,.0f} MB: {pool.num_blocks:,} blocks of {pool.block_size} tokens "
            f"= {pool.num_tokens:,} tokens in {numbers.kv_dtype} (set by {pool.limit})",
            *self.host,
            f"limits    {self.max_model_len:,} tokens per sequence, {self.max_num_seqs} sequences, "
            f"{self.max_num_batched_tokens:,} tokens per step",
            *self.adapters,
            *(prefix.line for prefix in self.pinned),
            *([f"drafts    {self.speculation}"] if self.speculation else []),
            *([f"policies  {self.policies}"] if self.policies else []),
            *([f"products  {numbers.format.products.summary}"] if numbers.format.products.summary else []),
            f"started   in {self.seconds:.2f} s{graphs}{tiles}",
        ]


def _divided(memory: DeviceMemory) -> str:
    parts = (
        (memory.weights, "weights"),
        (memory.activations, "activations"),
        (memory.pool, "pool"),
        (memory.others, "others and driver"),
        (memory.spare, "left alone"),
    )
    return f"memory    {memory.total / 1e9:,.1f} GB = " + " + ".join(
        f"{n / 1e9:,.1f} {what}" for n, what in parts
    )


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    source: Source
    model: ModelConfig
    default_sampling: SamplingParams
    report: Report


def build(config: EngineConfig, progress: Progress | None = None) -> Built:
    started = time.perf_counter()
    config = replace(config, memory=resolve_memory(config.memory))
    if is_simulated(config.runner.device):
        return _build_simulated(config, started)
    options = config.model
    source = open_source(
        options.model, revision=options.revision, load_format=options.load_format, progress=progress
    )
    described = registry.describe(source.config)
    numbers = resolve_precision(config, described)
    max_model_len = resolve_max_model_len(config, described)
    num_threads = set_threads(config.runner.num_threads, numbers)
    factory = LayerFactory(numbers.format, numbers.device, max_position=max_model_len)
    rehearsal = _rehearse(config, described, numbers, max_model_len)
    loaded = load_model(config, numbers, source, factory, partial(progress, "weights") if progress else None)
    model = loaded.model
    speculative = config.speculation.parsed
    if speculative is not None:
        check_trees(speculative, described, numbers, config.runner.deterministic)
    draft = load_draft(config, speculative, described, source, max_model_len) if speculative else None
    pool, size, divided = _make_pool(config, model, numbers, max_model_len, draft, rehearsal)
    num_apart = separate_blocks(config.adapters, size.num_blocks, size.block_bytes)
    scheduler = resolve_scheduler(config.scheduler, numbers.device, size.num_blocks - num_apart)
    runner_limits = _runner_limits(config, scheduler, model, numbers, max_model_len)
    on_gpu = numbers.device.type == "cuda"
    proposals = Proposals() if speculative is not None and speculative.acceptance == "rejection" else None
    adapted = build_adapters(config, model, factory, pool, numbers, runner_limits, source.name)
    given = (model, pool, runner_limits, numbers.device, proposals, adapted.slots if adapted else None)
    runner = DeviceRunner(*given) if on_gpu else Runner(*given)
    num_graphs = runner.warm_up(GRAPH_SECONDS) if isinstance(runner, DeviceRunner) else 0
    host = make_host_memory(config, pool)
    runner.mover = host.mover
    num_blocks = size.num_blocks - num_apart
    memory, evicted = _make_memory(config, source, numbers, host, pool, num_blocks, num_apart, max_model_len)
    adapters = serve_adapters(config.adapters, adapted, memory, host.mover)
    max_num_seqs, max_tokens = scheduler.limits
    limits = Limits(described.vocab_size, max_model_len, max_num_seqs, end_token_ids(source, described))
    report = Report(
        model=options.served_model_name or source.name,
        numbers=numbers,
        weights_bytes=sum(t.numel() * t.element_size() for t in model.parameters().values()),
        pool=size,
        device_memory=divided,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        num_threads=num_threads,
        num_graphs=num_graphs,
        tiles=runner.tiles if isinstance(runner, DeviceRunner) else "",
        seconds=0.0,
        speculation=speculative.in_words if speculative else "",
        policies=policies_in_words(config.memory, scheduler),
        host=(*host.lines, *evicted),
        offload=offload_lines(config, numbers, loaded.streaming),
        streaming=loaded.streaming,
        adapters=adapter_lines(config.adapters, adapted, max_num_seqs),
    )
    make_compiler = partial(Compiler, partial(model_vocabulary, options, source, limits))
    make_speculation = None
    if speculative is not None:
        drafting = _draft_model(config, scheduler, draft, size, max_model_len, proposals) if draft else None
        proposer = make_proposer(speculative, drafting)
        make_speculation = partial(Speculation, speculative, proposer, max_num_seqs)
    preemption = Preemption(scheduler.preemption_mode, host.block_seconds)
    parts = (scheduler, limits, memory, runner, options.seed, make_compiler, make_speculation, preemption)
    in_new_thread = runner.prepare_thread if isinstance(runner, DeviceRunner) else None
    when_filling = _prepare_swap(host, num_blocks)
    engine = Engine(*parts, adapters=adapters, when_filling=when_filling, in_new_thread=in_new_thread)
    try:
        pinned = pin_prefixes(engine, config, source)
    except QuireError:
        engine.close()
        raise
    report = replace(report, pinned=pinned, seconds=time.perf_counter() - started)
    return Built(engine, source, described, default_sampling(source), report)


def _make_memory(
    config: EngineConfig,
    source: Source,
    numbers: Precision,
    host: HostMemory,
    pool: Pool,
    num_blocks: int,
    num_apart: int,
    max_model_len: int,
) -> tuple[Memory, tuple[str, ...]]:
    """The memory with its offload cache, and the report's lines of the latter."""
    seed = config.model.seed if config.model.load_format == "dummy" else None
    kept = (source.fingerprint, numbers.format.name, numbers.device.type, config.runner.deterministic, seed)
    transfers = PendingTransfers()
    offload_cache, lines = open_offload_cache(config, host, transfers, pool.layout, *kept)
    memory = make_memory(
        config.memory,
        num_blocks,
        max_model_len,
        source.fingerprint,
        host.num_swap_blocks,
        transfers,
        offload_cache,
        num_apart,
    )
    return memory, lines


def _prepare_swap(host: HostMemory, num_blocks: int) -> Callable[[], None] | None:
    """Makes host memory ready for swaps before a step needs it; None without swap space."""
    if host.mover is None or not host.num_swap_blocks:
        return None
    return partial(host.mover.prepare, min(host.num_swap_blocks, num_blocks))


def _build_simulated(config: EngineConfig, started: float) -> Built:
    """The real scheduler and memory over a runner that only charges time, on a clock of its own."""
    source = open_shape(config)
    described = registry.describe(source.config)
    ends = end_token_ids(source, described)
    parts = simulated_parts(config, described, ends)
    size, scheduler = parts.pool, parts.scheduler
    num_blocks = size.num_blocks - parts.num_apart
    memory = make_memory(
        config.memory,
        num_blocks,
        parts.max_model_len,
        source.fingerprint,
        parts.num_swap_blocks,
        num_separate_blocks=parts.num_apart,
    )
    adapters = None
    if parts.adapters is not None:
        adapters = parts.adapters.serve(config, memory, parts.clock)
    max_num_seqs, max_tokens = scheduler.limits
    limits = Limits(described.vocab_size, parts.max_model_len, max_num_seqs, ends)
    make_compiler = partial(Compiler, partial(model_vocabulary, config.model, source, limits))
    preemption = Preemption(scheduler.preemption_mode, parts.move_seconds)
    engine = Engine(
        scheduler,
        limits,
        memory,
        parts.runner,
        config.model.seed,
        make_compiler,
        preemption=preemption,
        clock=parts.clock,
        adapters=adapters,
    )
    report = Report(
        model=config.model.served_model_name or source.name,
        numbers=parts.numbers,
        weights_bytes=parts.weights.num_bytes,
        pool=size,
        device_memory=None,
        max_model_len=parts.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        num_threads=0,
        num_graphs=0,
        tiles="",
        seconds=time.perf_counter() - started,
        policies=policies_in_words(config.memory, scheduler),
        simulated=parts.device.in_words,
    )
    return Built(engine, source, described, default_sampling(source), report)


def _rehearse(
    config: EngineConfig, described: ModelConfig, numbers: Precision, max_model_len: int
) -> KernelWarmup:
    """Compiles what takes longest beside the loading of weights; on a CPU there is nothing to compile."""
    if numbers.device.type != "cuda":
        return KernelWarmup(numbers.device)
    torch.cuda.init()
    max_rows, max_tokens = default_limits(config.scheduler, numbers.device)
    limits = RunnerLimits(
        max_rows,
        max_tokens,
        max_model_len,
        record_decodes=not config.runner.enforce_eager,
        activation_dtype=numbers.format.activation_dtype,
        deterministic=config.runner.deterministic,
    )
    layout = block_layout(config.memory.block_size, described, numbers)
    return KernelWarmup(
        numbers.device,
        partial(warm_up_sampling, described.vocab_size, numbers.device),
        partial(warm_up_attention, described, limits, layout, numbers.device),
    )


def _make_pool(
    config: EngineConfig,
    model: Model,
    numbers: Precision,
    max_model_len: int,
    draft: LoadedDraft | None,
    rehearsal: KernelWarmup,
) -> tuple[Pool, PoolSize, DeviceMemory | None]:
    layout = block_layout(config.memory.block_size, model.config, numbers)
    max_rows, max_tokens = default_limits(config.scheduler, numbers.device)
    divided = None
    if numbers.device.type == "cuda":
        measure = partial(
            activation_bytes, model, layout, max_rows, max_tokens, max_model_len, numbers.device
        )
        if rehearsal.goes_on:
            with suppress(Exception):  # this compiles beside it; what it says counts once it runs alone
                measure()
        rehearsal.join()
        drafts = config.speculation.parsed is not None
        with _tuning(config, model, numbers, token_counts(max_rows, max_tokens, drafts)):
            needed = measure()
        if config.adapters.enabled and config.adapters.lora_mode != "merge":
            needed += device_bytes(max_rows, sum(len(loader.parts) for loader in model.loaders().values()))
        divided = divide_gpu(numbers.device, config.memory.gpu_memory_utilization, needed)
    free = free_host_bytes() if divided is None else divided.pool
    memory, free = _less_draft(config.memory, layout, draft, free)
    size = pool_size(memory, layout, max_rows, max_model_len, free)
    return Pool(layout, size.num_blocks + 1, numbers.device), size, divided


def _tuning(
    config: EngineConfig, model: Model, numbers: Precision, sizes: list[int]
) -> AbstractContextManager[None]:
    """Has products measured that run inside it, where graphs will hold them; before the pool takes all memory."""
    if config.runner.enforce_eager or is_streamed(model):
        return nullcontext()
    return numbers.format.products.tuning(sizes)


def _less_draft(
    memory: MemoryConfig, layout: BlockLayout, draft: LoadedDraft | None, free: int
) -> tuple[MemoryConfig, int]:
    """What the target's pages may take: a draft model's pages, one for each of them, come out of the same memory."""
    if draft is None:
        return memory, free
    of_draft = block_layout(layout.block_size, draft.model.config, draft.numbers).block_bytes
    share = layout.block_bytes / (layout.block_bytes + of_draft)
    if memory.kv_cache_memory_bytes is not None:
        memory = replace(memory, kv_cache_memory_bytes=max(1, int(memory.kv_cache_memory_bytes * share)))
    return memory, int(free * share)


def _draft_model(
    config: EngineConfig,
    scheduler: SchedulerConfig,
    draft: LoadedDraft,
    size: PoolSize,
    max_model_len: int,
    proposals: Proposals | None,
) -> DraftModel:
    """Its runner, with pages under the target's block ids."""
    model, numbers = draft.model, draft.numbers
    layout = block_layout(size.block_size, model.config, numbers)
    pool = Pool(layout, size.num_blocks + 1, numbers.device)
    limits = _runner_limits(config, scheduler, model, numbers, max_model_len)
    runner_type = DeviceRunner if numbers.device.type == "cuda" else Runner
    runner = runner_type(model, pool, limits, numbers.device, proposals)
    if isinstance(runner, DeviceRunner):
        runner.warm_up(GRAPH_SECONDS)
    return DraftModel(runner, limits.max_num_batched_tokens, draws=proposals is not None)


def block_layout(block_size: int, model: ModelConfig, numbers: Precision) -> BlockLayout:
    return BlockLayout(model.num_layers, block_size, model.num_kv_heads, model.head_dim, numbers.kv_dtype)


def _runner_limits(
    config: EngineConfig, scheduler: SchedulerConfig, model: Model, numbers: Precision, max_model_len: int
) -> RunnerLimits:
    max_num_seqs, max_tokens = scheduler.limits
    # a tape needs native operations throughout; a CUDA graph takes whatever a model launches
    recordable = (model.recordable or numbers.device.type == "cuda") and not is_streamed(model)
    return RunnerLimits(
        max_num_seqs,
        max_tokens,
        max_model_len,
        record_decodes=recordable and not config.runner.enforce_eager,
        activation_dtype=numbers.format.activation_dtype,
        deterministic=config.runner.deterministic,
    )


def set_threads(asked: int | None, numbers: Precision) -> int:
    """The compute threads. Where native kernels do the work, torch keeps to one: two pools would fight."""
    num_threads = asked or native.default_num_threads()
    if numbers.device.type != "cpu":
        return num_threads
    has_native = not forces_reference() and native.available()
    if has_native:
        native.set_num_threads(num_threads)
    torch.set_num_threads(1 if has_native and numbers.format.native else num_threads)
    return num_threads


def end_token_ids(source: Source, model: ModelConfig) -> tuple[int, ...]:
    """What ends a sequence: generation_config.json knows best (chat models have several), else the config."""
    named = source.generation_config.get("eos_token_id")
    if named is None:
        return model.eos_token_ids
    return tuple(named) if isinstance(named, (list, tuple)) else (int(named),)


def default_sampling(source: Source) -> SamplingParams:
    """Sampling as the model's makers recommend it, where they do."""
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    asked = {k: source.generation_config[k] for k in known if source.generation_config.get(k) is not None}
    if source.generation_config.get("do_sample") is False:
        asked["temperature"] = 0.0
    return SamplingParams(max_tokens=DEFAULT_MAX_TOKENS, **asked)

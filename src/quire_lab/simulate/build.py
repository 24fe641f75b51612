"""Builds an engine on a simulated device: real settings, scheduler and memory, and a runner without a model."""

import time
from dataclasses import dataclass, replace
from functools import partial

import torch

from quire.core.config import EngineConfig, MemoryConfig, ModelConfig, SchedulerConfig
from quire.core.errors import ConfigError, WeightsError
from quire.core.layout import BlockLayout, LayerGroups
from quire.core.stats import PoolSize, StartStats
from quire.engine.build import Built, Report, default_sampling, end_token_ids
from quire.engine.build.adapters import separate_blocks
from quire.engine.build.assemble import model_vocabulary
from quire.engine.build.report import policies_in_words, running_on
from quire.engine.build.resolve import (
    Precision,
    block_layout,
    default_limits,
    encoder_decoder_config,
    encoder_input,
    layer_groups,
    resolve_max_model_len,
    resolve_precision,
    resolve_scheduler,
)
from quire.engine.engine import Engine
from quire.engine.policies import make_memory
from quire.engine.validation import Limits
from quire.grammar.compiler import Compiler
from quire.memory.cross import CrossMemory
from quire.memory.paged import PagedMemory
from quire.models import registry
from quire.models.weight_shape import WeightShape, weight_shape
from quire.quant.choice import check_float8
from quire.runner.sizing import CPU_POOL_LIMIT, CPU_POOL_SHARE, GPU_MARGIN, pool_size
from quire.scheduler.preemption import Preemption
from quire.weights.architectures import SHAPES
from quire.weights.source import Source, open_source
from quire_lab.simulate.adapters import SizedAdapters, size_adapters
from quire_lab.simulate.clock import VirtualClock
from quire_lab.simulate.cost_model import CostModel, ModelNumbers
from quire_lab.simulate.devices import SimulatedDevice, find_device
from quire_lab.simulate.runner import SimulatedRunner


class DeviceTooSmall(ConfigError):
    """The device's memory holds too little: a larger device may serve the same settings."""


@dataclass(frozen=True, slots=True)
class SimulatedParts:
    device: SimulatedDevice
    precision: Precision
    weights: WeightShape
    groups: LayerGroups
    pool: PoolSize
    scheduler: SchedulerConfig
    max_model_len: int
    num_swap_blocks: int  # that host memory holds
    move_seconds: float  # of one of them, one way
    runner: SimulatedRunner
    clock: VirtualClock
    num_adapter_blocks: int  # blocks of the pool that are adapters' alone
    adapters: SizedAdapters | None


def build_simulated(config: EngineConfig, started: float) -> Built:
    """The real scheduler and memory over a runner that only charges time, on a clock of its own."""
    source = open_shape(config)
    described = registry.describe(source.config)
    if described.encoder is not None:
        config = with_encoder_limits(config, described)
    ends = end_token_ids(source, described)
    parts = simulated_parts(config, described, ends)
    size, scheduler = parts.pool, parts.scheduler
    num_blocks = size.num_blocks - parts.num_adapter_blocks
    memory = make_memory(
        config.memory,
        num_blocks,
        parts.max_model_len,
        source.fingerprint,
        parts.num_swap_blocks,
        num_separate_blocks=parts.num_adapter_blocks,
        kind=PagedMemory if described.encoder is None else CrossMemory,
        groups=parts.groups,
        max_step_tokens=scheduler.limits[1],
    )
    adapters = None
    if parts.adapters is not None:
        adapters = parts.adapters.serve(config, memory, parts.clock)
    max_num_seqs, max_tokens = scheduler.limits
    encoder = encoder_input(described, source, config.memory.block_size, parts.max_model_len, max_tokens)
    limits = Limits(described.vocab_size, parts.max_model_len, max_num_seqs, ends, max_tokens, encoder)
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
    seconds = time.perf_counter() - started
    report = Report(
        model=config.model.served_model_name or source.name,
        where=running_on(parts.precision, 0, parts.device.in_words),
        precision=parts.precision,
        start=StartStats(0, parts.weights.num_bytes, seconds),
        groups=parts.weights.groups,
        limits=limits,
        pool=size,
        policies=policies_in_words(config.memory, scheduler),
        started=f"in {seconds:.2f} s",
    )
    return Built(engine, source, described, default_sampling(source), report)


def with_encoder_limits(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """As a real start has it: a step holds the longest prompt."""
    device = torch.device("meta" if find_device(config.runner.device).on_gpu else "cpu")
    usual = default_limits(config.scheduler, device)
    return encoder_decoder_config(config, resolve_max_model_len(config, model), usual)


def open_shape(config: EngineConfig) -> Source:
    """The model as it would be opened, or a published architecture by its name; no weights are read."""
    options, name = config.model, config.model.model
    load_format = "dummy" if name in SHAPES else options.load_format
    try:
        return open_source(name, revision=options.revision, load_format=load_format)
    except WeightsError as error:
        if name is None or "/" in name:
            raise
        known = ", ".join(SHAPES)
        raise WeightsError(f"{error}; architectures that can be simulated by name are {known}") from error


def check_simulated(config: EngineConfig) -> None:
    """ConfigError for what is not simulated."""
    if config.speculative_config is not None:
        raise ConfigError(
            "a simulated device has no words to guess, so speculation says nothing there: leave out speculative_config"
        )
    if config.memory.cpu_offload_gb:
        raise ConfigError("a simulated device holds all weights: leave out cpu_offload_gb")


def simulated_parts(
    config: EngineConfig, model: ModelConfig, end_token_ids: tuple[int, ...]
) -> SimulatedParts:
    """ConfigError where the device is not known, or where the model does not fit it."""
    device = find_device(config.runner.device)
    check_simulated(config)
    check_float8(device.title, device.float8, config.model.quantization, config.memory.kv_cache_dtype)
    # "meta" stands for a GPU: number formats of the CPU alone do not apply
    here = replace(config.runner, device="meta" if device.on_gpu else "cpu")
    precision = resolve_precision(replace(config, runner=here), model)
    max_model_len = resolve_max_model_len(config, model)
    weights = weight_shape(model, precision.format)
    groups = layer_groups(config, model, max_model_len)
    layout = block_layout(config.memory.block_size, model, precision, groups)
    try:
        pool = _pool(config, device, precision, layout, groups, weights, model, max_model_len)
        num_adapter_blocks = separate_blocks(config.adapters, pool.num_blocks, layout.block_bytes)
        num_blocks = (pool.num_blocks - num_adapter_blocks) // groups.num_groups
        scheduler = resolve_scheduler(config.scheduler, precision.device, num_blocks)
    except ConfigError as error:
        if config.memory.num_blocks is None and config.memory.kv_cache_memory_bytes is None:
            raise DeviceTooSmall(str(error)) from error
        raise  # the size of the pool is set, or the weights do not fit
    costs = _costs(model, precision, weights, layout)
    clock = VirtualClock()
    adapters = size_adapters(config, model, precision, device, layout.block_bytes, clock)
    cost = CostModel(device.rates, device.factors, costs, device.ranks)
    return SimulatedParts(
        device=device,
        precision=precision,
        weights=weights,
        groups=groups,
        pool=pool,
        scheduler=scheduler,
        max_model_len=max_model_len,
        num_swap_blocks=_num_swap_blocks(config, device, layout),
        move_seconds=cost.move_seconds,
        runner=SimulatedRunner(
            cost, clock, model.vocab_size, end_token_ids, adapters.cost if adapters else None
        ),
        clock=clock,
        num_adapter_blocks=num_adapter_blocks,
        adapters=adapters,
    )


def _num_swap_blocks(config: EngineConfig, device: SimulatedDevice, layout: BlockLayout) -> int:
    """As the real start has it, but for what is free here: each rank has its own part of the host's memory."""
    if config.memory.reservation != "paged" or config.scheduler.preemption_mode == "recompute":
        return 0
    if not device.rates.host_link:
        return 0
    return int(config.memory.swap_space * (1 << 30)) * device.ranks // layout.block_bytes


def model_costs(model: ModelConfig, precision: Precision, block_size: int) -> ModelNumbers:
    """What the model's steps read and compute at this precision, for a cost model."""
    layout = block_layout(block_size, model, precision)
    return _costs(model, precision, weight_shape(model, precision.format), layout)


def _costs(
    model: ModelConfig, precision: Precision, weights: WeightShape, layout: BlockLayout
) -> ModelNumbers:
    head = model.vocab_size * model.hidden_size
    return ModelNumbers(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        attention_width=model.num_heads * model.head_dim,
        read_bytes=weights.read_bytes,
        dense_parameters=max(0, weights.read_parameters - head),
        head_parameters=head,
        kv_bytes_per_token=layout.bytes_per_token,
        block_bytes=layout.block_bytes,
        activation_bytes=precision.format.activation_dtype.itemsize,
        expert_bytes=weights.experts.num_bytes if weights.experts else 0,
        expert_share=weights.experts.share(1) if weights.experts else 0.0,
        encoder_bytes=weights.encoder_bytes,
        encoder_parameters=weights.encoder_parameters,
    )


def _pool(
    config: EngineConfig,
    device: SimulatedDevice,
    precision: Precision,
    layout: BlockLayout,
    groups: LayerGroups,
    weights: WeightShape,
    model: ModelConfig,
    max_model_len: int,
) -> PoolSize:
    """As large as a real start makes it. Ranks split every block, so together they hold `ranks` times as many."""
    rows, tokens = default_limits(config.scheduler, precision.device)
    free = _free_bytes(config, device, weights, activation_bytes(model, precision.device, rows, tokens))
    memory: MemoryConfig = config.memory
    if memory.kv_cache_memory_bytes is not None:  # a limit of each rank
        memory = replace(memory, kv_cache_memory_bytes=memory.kv_cache_memory_bytes * device.ranks)
    return pool_size(memory, layout, groups, rows, max_model_len, free * device.ranks)


def _free_bytes(config: EngineConfig, device: SimulatedDevice, weights: WeightShape, activations: int) -> int:
    """Of one rank."""
    held = weights.num_bytes // device.ranks
    if not device.on_gpu:
        return int(min(CPU_POOL_LIMIT, CPU_POOL_SHARE * max(0, device.memory_bytes - held)))
    usable = int(device.memory_bytes * config.memory.gpu_memory_utilization)
    free = min(usable, device.memory_bytes - GPU_MARGIN) - held - activations
    if free <= 0:
        if device.whole is None:
            more = f"simulate more of them, such as simulated:{2 * device.ranks}x{device.name}"
        else:
            more = f"simulate a larger slice, fewer bits, or whole GPUs, such as simulated:2x{device.whole}"
        raise DeviceTooSmall(
            f"the weights take {held / 1e9:.1f} GB and {device.title} has {usable / 1e9:.1f} GB at "
            f"gpu_memory_utilization={config.memory.gpu_memory_utilization}: {more}"
        )
    return free


def activation_bytes(model: ModelConfig, device: torch.device, rows: int, tokens: int) -> int:
    """An estimate of what the real start measures: the widest layer of the largest step, or all logits."""
    if device.type == "cpu":
        return 0
    widest = 2 * tokens * (2 * model.intermediate_size + 4 * model.hidden_size)
    return max(widest, 3 * rows * model.vocab_size * 4)

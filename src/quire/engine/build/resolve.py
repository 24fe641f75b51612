"""Turns every `auto` setting into a decision, as new objects; BuildPlan holds them for the later stages."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quire.core.config import (
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    Task,
)
from quire.core.encoder_input import EncoderInput
from quire.core.errors import ConfigError, InvalidRequest, ModelError
from quire.core.layout import BlockLayout, LayerGroups
from quire.core.sampling import SamplingParams
from quire.kernels import native
from quire.kernels.registry import forces_reference
from quire.kernels.sm_share import enter
from quire.layers.factory import RankPart
from quire.models import registry
from quire.observe.host import machine_number
from quire.quant.choice import NO_FLOAT8_KV, choose_format, has_float8
from quire.quant.format import NumberFormat
from quire.weights.hyperparameters import first_token_id, token_ids
from quire.weights.source import Source, open_source

SIMULATED = "simulated"  # a device setting with this prefix names a simulated device
CPU_BATCHED_TOKENS = 512  # a step stays short enough for others' tokens to flow
GPU_BATCHED_TOKENS = 8192
CPU_NUM_SEQS = 256
GPU_NUM_SEQS = 1024  # a decode of few rows leaves the matrix units idle


DEFAULT_MAX_TOKENS = 256  # where the caller gives no sampling parameters at all
Progress = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, slots=True)
class Precision:
    """The number format that a model runs in, and its device."""

    device: torch.device
    format: NumberFormat
    kv_dtype: str

    @property
    def format_name(self) -> str:
        """`int8`, `float32`: a format's own name may go on with a digest of its layout."""
        return self.format.name.partition("-")[0].replace("_", "-")


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What is decided before any weight is loaded."""

    config: EngineConfig
    source: Source
    model: ModelConfig
    precision: Precision
    max_model_len: int
    num_threads: int
    part: RankPart | None = None  # of a model that several ranks compute; None: all of it

    @property
    def local(self) -> ModelConfig:
        """What this process builds: the model, or its part of it."""
        return self.model if self.part is None else self.part.cut.local

    def agreed(self, number: int) -> int:
        """The smallest that a rank has: ids of blocks are those of all."""
        return number if self.part is None else min(self.part.world.numbers(number))

    def ranks_here(self) -> int:
        """Ranks that share this machine's memory. All of them call it."""
        own = machine_number()
        return 1 if self.part is None else self.part.world.numbers(own).count(own)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return self.config.speculative_config

    @property
    def groups(self) -> LayerGroups:
        """Of the layers that this process has."""
        if self.part is not None and self.part.layers is not None:
            return LayerGroups.together(self.part.layers[1] - self.part.layers[0])
        return layer_groups(self.config, self.model, self.max_model_len)


def make_plan(config: EngineConfig, progress: Progress | None = None, task: Task = "generate") -> BuildPlan:
    """Opens the model's source and sets the compute threads. ConfigError where settings contradict the model."""
    options = config.model
    source = open_source(
        options.model, revision=options.revision, load_format=options.load_format, progress=progress
    )
    model = registry.describe(source.config, task)
    precision = resolve_precision(config, model)
    enter(config.runner.sm_share, precision.device)
    max_model_len = resolve_max_model_len(config, model)
    if model.encoder is not None:
        if config.parallel.num_ranks > 1:
            raise ConfigError(
                f"{model.architecture} has an encoder and runs on one rank: leave out tensor_parallel_size and "
                "pipeline_parallel_size"
            )
        config = encoder_decoder_config(
            config, max_model_len, default_limits(config.scheduler, precision.device)
        )
    usual = max(1, native.default_num_threads() // config.parallel.ranks_on_machine)
    num_threads = set_threads(config.runner.num_threads or usual, precision)
    return BuildPlan(config, source, model, precision, max_model_len, num_threads)


def is_simulated(device: str) -> bool:
    return device == SIMULATED or device.startswith(f"{SIMULATED}:")


def resolve_precision(config: EngineConfig, model: ModelConfig) -> Precision:
    device = resolve_device(config.runner.device)
    number_format = choose_format(
        device,
        config.model.dtype,
        config.model.quantization,
        model.dtype,
        config.runner.deterministic,
        model.quantized,
    )
    kv_dtype = config.memory.kv_cache_dtype
    if kv_dtype == "fp8":
        if not has_float8(device):
            raise ConfigError(NO_FLOAT8_KV)
        kv_dtype = "float8_e4m3fn"
    if kv_dtype == "auto":  # half precision costs int8 nothing in quality and halves what attention reads
        activations = str(number_format.activation_dtype).removeprefix("torch.")
        kv_dtype = "float16" if number_format.native else activations
    return Precision(device, number_format, kv_dtype)


def resolve_memory(config: MemoryConfig) -> MemoryConfig:
    """Memory that is reserved up front counts tokens, and nothing in it is found again."""
    if config.reservation == "paged":
        return config
    return replace(config, block_size=1, enable_prefix_caching=False)


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is not known: choose auto, cpu, cuda or simulated") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} was asked for, but PyTorch sees no GPU here: use device='cpu'")
    return device


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    asked = config.model.max_model_len
    if asked is None:
        return model.max_position
    if asked > model.max_position:
        raise ConfigError(
            f"max_model_len={asked} is more than the model's {model.max_position} positions: lower it"
        )
    return asked


def default_limits(config: SchedulerConfig, device: torch.device) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) as asked for or usual on this device, before the pool is known."""
    on_cpu = device.type == "cpu"
    rows = config.max_num_seqs or (CPU_NUM_SEQS if on_cpu else GPU_NUM_SEQS)
    usual = CPU_BATCHED_TOKENS if on_cpu else GPU_BATCHED_TOKENS
    return rows, config.max_num_batched_tokens or max(usual, rows)


def resolve_scheduler(
    config: SchedulerConfig, device: torch.device, num_blocks: int, num_stages: int = 1
) -> SchedulerConfig:
    max_num_seqs, max_tokens = default_limits(config, device)
    if config.max_num_seqs is None:
        max_num_seqs = min(max_num_seqs, num_blocks)
    if max_num_seqs > num_blocks:
        raise ConfigError(
            f"the pool has {num_blocks} blocks, too few for one per sequence with max_num_seqs={max_num_seqs}: "
            f"lower max_num_seqs to {num_blocks} or raise kv_cache_memory_bytes"
        )
    if config.steps_in_flight > 1:
        raise ConfigError(
            f"steps_in_flight={config.steps_in_flight} must be 0 or 1: pipeline_parallel_size has as many as stages"
        )
    steps = config.steps_in_flight * num_stages
    return replace(
        config, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens, steps_in_flight=steps
    )


def layer_groups(config: EngineConfig, model: ModelConfig, max_model_len: int) -> LayerGroups:
    """Which layers share a block: those with a sliding window apart from others, where their blocks can be freed.

    A draft model has the target's block ids, and needs all of them.
    """
    memory, speculative = config.memory, config.speculative_config
    drafts = speculative is not None and speculative.method == "draft_model"
    if drafts or memory.reservation != "paged" or not memory.share or not any(model.windows):
        return LayerGroups.together(model.num_layers)
    return LayerGroups.of([window if window < max_model_len else 0 for window in model.windows])


def block_layout(
    block_size: int, model: ModelConfig, precision: Precision, groups: LayerGroups | None = None
) -> BlockLayout:
    """`groups`: None for all layers in one block."""
    groups = groups or LayerGroups.together(model.num_layers)
    return BlockLayout(
        groups.num_layers,
        block_size,
        model.num_kv_heads,
        model.head_dim,
        precision.kv_dtype,
        groups.num_groups,
    )


def set_threads(asked: int | None, precision: Precision) -> int:
    """The compute threads of what this thread runs and builds.

    Where native kernels do the work, torch keeps to one: two pools would fight.
    """
    num_threads = asked or native.default_num_threads()
    if precision.device.type != "cpu":
        return num_threads
    has_native = not forces_reference() and native.available()
    if has_native:
        native.set_num_threads(num_threads)
    torch.set_num_threads(1 if has_native and precision.format.native else num_threads)
    return num_threads


def end_token_ids(source: Source, model: ModelConfig) -> tuple[int, ...]:
    """What ends a sequence: generation_config.json has precedence (chat models have several), else the config."""
    if source.generation_config.get("eos_token_id") is None:
        return model.eos_token_ids
    return token_ids(source.generation_config, "eos_token_id", "generation_config.json")


def default_sampling(source: Source) -> SamplingParams:
    """Sampling as the model's makers recommend it, where they do."""
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    asked = {k: source.generation_config[k] for k in known if source.generation_config.get(k) is not None}
    if source.generation_config.get("do_sample") is False:
        asked["temperature"] = 0.0
    try:
        return SamplingParams(max_tokens=DEFAULT_MAX_TOKENS, **asked)
    except InvalidRequest as error:
        raise ModelError(f"generation_config.json: {error}, or take it out of the file") from error


# ---------------------------------------------------------------------- encoder-decoder models


def encoder_decoder_config(
    config: EngineConfig, max_model_len: int, usual_limits: tuple[int, int]
) -> EngineConfig:
    """A step that is not limited by the settings holds the longest prompt beside all decodes: an encoder takes its
    input in one step. Raises ConfigError for settings that these models cannot have."""
    memory = config.memory
    refused = {
        "pin_prefix": memory.pin_prefix,
        f"role={memory.role!r}": memory.role != "both",
        "cpu_offload_gb": memory.cpu_offload_gb,
        "weights_memory_gb": memory.weights_memory_gb is not None,
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{name}: not available for encoder-decoder models: leave it out")
    if config.scheduler.max_num_batched_tokens is not None:
        return config
    max_num_seqs, max_tokens = usual_limits
    scheduler = replace(
        config.scheduler, max_num_batched_tokens=max(max_tokens, max_model_len + max_num_seqs)
    )
    return replace(config, scheduler=scheduler)


def encoder_input(
    model: ModelConfig, source: Source, block_size: int, max_model_len: int, max_num_batched_tokens: int
) -> EncoderInput | None:
    """None for a decoder. generation_config.json has precedence over config.json."""
    encoder, generation = model.encoder, source.generation_config
    if encoder is None:
        return None
    start = first_token_id(generation, "decoder_start_token_id")
    forced = first_token_id(generation, "forced_bos_token_id")
    if forced is None:
        forced = first_token_id(model.hf, "forced_bos_token_id")
    first = encoder.decoder_start if start is None else (start,)
    decoder_start = first if forced is None else (*first, forced)
    for token_id in (*decoder_start, encoder.pad_token_id):
        if token_id >= model.vocab_size:
            raise ConfigError(
                f"decoder_start_token_id, forced_bos_token_id or pad_token_id is {token_id}, outside the vocabulary of "
                f"{model.vocab_size}: correct config.json or generation_config.json"
            )
    room = min(max_model_len - len(decoder_start) - 1, max_num_batched_tokens) // block_size * block_size
    if room < 1:
        raise ConfigError(
            f"max_model_len={max_model_len} and max_num_batched_tokens={max_num_batched_tokens} leave no block of "
            f"{block_size} tokens for the encoder's input: raise them"
        )
    return replace(encoder, decoder_start=decoder_start, max_tokens=min(encoder.max_tokens, room))

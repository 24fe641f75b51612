"""Configs compose, are frozen, and reject unknown keys. What is measured at run time is not config."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from quire.core.adapters import AdapterConfig
from quire.core.errors import ConfigError
from quire.core.speculation import SpeculativeConfig, parse_speculative

USUAL_BLOCK_SIZE = 16
RESERVATIONS = ("paged", "max", "pow2", "oracle")
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "ft": {
        "batching": "static",
        "reservation": "max",
    },  # as FasterTransformer: whole requests, the longest memory
}
SCHEDULES = ("fcfs", "priority", "shortest", "fair")
BATCHING = ("continuous", "static", "dynamic")
DTYPES = ("auto", "float32", "float16", "bfloat16")
PREEMPTION_MODES = ("recompute", "swap", "auto")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known: choose one of {', '.join(allowed)}")


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and (not isinstance(value, int) or value < low):
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {low}")


def _not_negative(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
        raise ConfigError(f"{name}={value!r} must be a number of at least 0")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's hyperparameters as every room needs them; `hf` keeps the rest for the architecture's file."""

    architecture: str  # as in config.json's "architectures", e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    dtype: str = "float32"  # of the checkpoint
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    hf: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, in which numbers."""

    model: str | None = None  # None: the built-in model; a folder, a .gguf file or a hub id otherwise
    tokenizer: str | None = None
    dtype: str = "auto"
    quantization: str = "auto"  # auto | none | int8 | fp8
    load_format: str = "auto"  # auto | dummy
    max_model_len: int | None = None
    revision: str | None = None
    chat_template: str | None = None
    seed: int = 0
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _one_of("quantization", self.quantization, ("auto", "none", "int8", "fp8"))
        _at_least("max_model_len", self.max_model_len, 1)


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How the pool is cut and how large it may be."""

    block_size: int = USUAL_BLOCK_SIZE
    num_blocks: int | None = None  # wins over the byte limits; for tests and experiments
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    share: bool = True  # False, for experiments: a fork copies every block, and no prefix is found again
    reservation: str = "paged"  # or, for experiments, up front in one piece: max, pow2 or oracle
    pin_prefix: tuple[str, ...] = ()  # files of text or chat messages whose blocks are held from the start
    cpu_offload_gb: float = 0.0  # GiB of layers' weights that live in host memory and stream to the GPU
    weights_memory_gb: float | None = (
        None  # GiB of host memory that weights may take; the rest streams from disk
    )
    weights_offload_dir: str | None = None  # where those lie; None: in the cache folder
    swap_space: float = (
        4.0  # GiB of host memory for requests that must leave the pool; 0: they are computed again
    )
    kv_offload_gb: float = 0.0  # GiB of host memory for prefix blocks that the pool evicts
    kv_offload_dir: str | None = None  # a folder behind that memory

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        if self.block_size > 256:
            raise ConfigError(
                f"block_size={self.block_size} is larger than 256: choose 1 to 256 (16 is usual)"
            )
        _at_least("num_blocks", self.num_blocks, 1)
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, (*DTYPES, "fp8"))
        _one_of("reservation", self.reservation, RESERVATIONS)
        if self.reservation != "paged" and self.block_size not in (1, USUAL_BLOCK_SIZE):
            raise ConfigError(
                f"block_size={self.block_size} says nothing with reservation={self.reservation!r}, which counts "
                "tokens: leave it out"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization} is outside (0, 1]")
        named = (self.pin_prefix,) if isinstance(self.pin_prefix, str) else tuple(self.pin_prefix)
        object.__setattr__(self, "pin_prefix", named)
        _not_negative("cpu_offload_gb", self.cpu_offload_gb)
        if self.weights_memory_gb is not None and not self.weights_memory_gb > 0.0:
            raise ConfigError(f"weights_memory_gb={self.weights_memory_gb} must be more than 0")
        _not_negative("swap_space", self.swap_space)
        _not_negative("kv_offload_gb", self.kv_offload_gb)
        if self.kv_offload_dir is not None and not self.kv_offload_gb:
            raise ConfigError("kv_offload_dir needs host memory before it: give kv_offload_gb, such as 4")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much runs at once and how much may wait."""

    max_num_seqs: int | None = None  # None: 256 on a CPU, 1024 on a GPU, or one per block of a smaller pool
    max_num_batched_tokens: int | None = None  # None: 512 on a CPU, 8192 on a GPU
    max_queue_requests: int | None = 65536
    max_queue_tokens: int | None = None
    steps_in_flight: int = 1  # 0: commit each step before planning the next
    batching: str = "continuous"  # or static or dynamic: batches that start together and end together
    batch_size: int | None = None  # of a static or dynamic batch, in requests; None: max_num_seqs
    batch_window_ms: float = 50.0  # how long a dynamic batch waits to be full
    schedule: str = "fcfs"  # or priority, shortest, fair: who is admitted first, and preempted last
    max_prompt_chunk: int | None = None  # tokens of one prompt in one step; None: as many as the step has
    preset: str | None = None  # settings by one name, see PRESETS; those that are named themselves win
    preemption_mode: str = "auto"  # recompute | swap | auto, the cheaper of the two
    admit_after: str = "resumed"  # or completed: who may be admitted after a preemption

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_queue_requests", self.max_queue_requests, 1)
        _at_least("max_queue_tokens", self.max_queue_tokens, 1)
        if self.steps_in_flight not in (0, 1):
            raise ConfigError(f"steps_in_flight={self.steps_in_flight} must be 0 or 1")
        if self.preset is not None:
            _one_of("preset", self.preset, tuple(PRESETS))
        _one_of("batching", self.batching, BATCHING)
        _one_of("schedule", self.schedule, SCHEDULES)
        _at_least("batch_size", self.batch_size, 1)
        _at_least("max_prompt_chunk", self.max_prompt_chunk, 1)
        if self.batch_size and self.max_num_seqs and self.batch_size > self.max_num_seqs:
            raise ConfigError(
                f"batch_size={self.batch_size} is more than max_num_seqs={self.max_num_seqs}: lower it, or raise "
                "max_num_seqs"
            )
        if not 0.0 <= self.batch_window_ms < float("inf"):
            raise ConfigError(f"batch_window_ms={self.batch_window_ms} must be a number of at least 0")
        _one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _one_of("admit_after", self.admit_after, ("resumed", "completed"))

    @property
    def limits(self) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens), once both are decided."""
        if self.max_num_seqs is None or self.max_num_batched_tokens is None:
            raise ConfigError("max_num_seqs and max_num_batched_tokens must be resolved before they are used")
        return self.max_num_seqs, self.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Where and how the forward pass runs."""

    device: str = "auto"  # auto | cpu | cuda | simulated[:NAME]
    num_threads: int | None = None  # CPU threads; None: the physical cores
    enforce_eager: bool = False  # no recorded graphs
    deterministic: bool = False  # on a GPU: a request's tokens do not depend on its neighbours

    def __post_init__(self) -> None:
        _at_least("num_threads", self.num_threads, 1)


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding, off unless asked for."""

    speculative_config: str | None = None  # JSON: see SpeculativeConfig; a mapping is taken as well

    def __post_init__(self) -> None:
        given = self.speculative_config
        if given is not None:
            parse_speculative(given)
            if not isinstance(given, str):  # it travels as text
                object.__setattr__(self, "speculative_config", json.dumps(dict(given)))

    @property
    def parsed(self) -> SpeculativeConfig | None:
        return None if self.speculative_config is None else parse_speculative(self.speculative_config)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: ModelOptions = ModelOptions()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    runner: RunnerConfig = RunnerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    adapters: AdapterConfig = field(default_factory=AdapterConfig)

    @classmethod
    def of(cls, **flat: Any) -> "EngineConfig":
        """From flat settings, as flags and `LLM(...)` spell them. An unknown name is an error."""
        parts: dict[str, dict[str, Any]] = {}
        owner = option_owners()
        flat = {**PRESETS.get(flat.get("preset") or "", {}), **flat}
        for name, value in flat.items():
            if name not in owner:
                near = difflib.get_close_matches(name, owner, n=1)
                hint = f": did you mean {near[0]}?" if near else f". Known: {', '.join(sorted(owner))}"
                raise ConfigError(f"unknown setting {name!r}{hint}")
            parts.setdefault(owner[name], {})[name] = value
        kinds = {f.name: type(getattr(cls(), f.name)) for f in fields(cls)}
        return cls(**{part: kinds[part](**values) for part, values in parts.items()})


def option_owners() -> dict[str, str]:
    """Flat setting name -> the part of EngineConfig that has it."""
    default = EngineConfig()
    return {f.name: part.name for part in fields(EngineConfig) for f in fields(getattr(default, part.name))}

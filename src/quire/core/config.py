"""Configs compose, are frozen, and reject unknown keys. What is measured at run time is not config.

Each field carries the help text of its flag: `quire serve --help` and the documentation show the same words.
"""

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from quire.core.draft import MAX_NODES
from quire.core.encoder_input import EncoderInput
from quire.core.errors import ConfigError

Task = Literal["generate", "embed"]  # what a model is for
USUAL_BLOCK_SIZE = 16
ROLES = ("both", "prefill", "decode")  # of engines that share prompts through a folder
RESERVATIONS = ("paged", "max", "pow2", "oracle")
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # FasterTransformer: a batch runs until its last request ends, each with memory for the longest answer
    "ft": {"batching": "static", "reservation": "max"}
}
SCHEDULES = ("fcfs", "priority", "shortest", "fair")
BATCHING = ("continuous", "static", "dynamic")
DTYPES = ("auto", "float32", "float16", "bfloat16")
QUANTIZATIONS = ("auto", "none", "int8", "llm-int8", "int4", "nf4", "fp4", "fp8", "checkpoint")
PREEMPTION_MODES = ("recompute", "swap", "auto")
LORA_MEMORIES = ("unified", "separate")
LORA_MODES = ("batched", "merge")
ADAPTER_CONFIG_FILE = "adapter_config.json"  # what makes a folder an adapter
METHODS = ("ngram", "draft_model")
ACCEPTANCES = ("coupled", "rejection")
MAX_DRAFT = 32  # tokens; acceptance beyond is too rare to pay
MAX_WIDTH = 16  # branches of a tree
# tokens of a prompt-lookup draft, which costs nothing to make: with the last token a whole tile of 16 rows
LOOKED_UP = 15


def setting(default: Any = MISSING, help: str = "", *names: str, **flag: Any) -> Any:
    """A dataclass field whose `help` is the text of its command-line flag and its only documentation.

    `names`: the flag's spellings, where they are not the field's. `flag`: arguments of argparse that do not follow from
    the field's type; metavar="BYTES" is a size, such as 2GiB.
    """
    return field(default=default, metadata={"help": help, "names": names, "flag": flag})


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known: choose one of {', '.join(allowed)}")


def at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and (not isinstance(value, int) or value < low):
        raise ConfigError(f"{name}={value!r} must be a whole number of at least {low}")


def not_negative(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
        raise ConfigError(f"{name}={value!r} must be a number of at least 0")


def _hint(name: str, known: Collection[str]) -> str:
    """What to write instead of the unknown `name`: the nearest known one, or the list of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else f". Known: {', '.join(known)}"


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
    windows: tuple[int, ...] = ()  # of attention, per layer; 0: none; empty: no layer has one
    hf: Mapping[str, Any] = field(default_factory=dict)
    encoder: EncoderInput | None = None  # of an encoder-decoder model, whose other numbers are the decoder's

    @property
    def quantized(self) -> str:
        """The method by which the checkpoint's weights are quantized, as `quantization_config` names it; or empty."""
        found = self.hf.get("quantization_config")
        return str(found.get("quant_method", "unknown")) if isinstance(found, Mapping) else ""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, in which number format."""

    model: str | None = setting(None, "a folder, a .gguf file or a hub id (default: the built-in model)")
    tokenizer: str | None = setting(None, "folder or tokenizer.json to use instead of the model's own")
    dtype: str = setting("auto", "auto, float32, float16 or bfloat16")
    quantization: str = setting(
        "auto",
        "auto (what a quantized checkpoint has, GGUF's blocks of 512 MiB or more, otherwise int8 on a CPU), int8, "
        "llm-int8 (on a CPU), int4, nf4, fp4, fp8 (on a GPU that has it), checkpoint for the file's own numbers, or "
        "none for full precision",
        *("--quantization", "-q"),
    )
    load_format: str = setting(
        "auto", "auto, or dummy for random weights in the shape that config.json describes"
    )
    max_model_len: int | None = setting(
        None, "tokens per sequence, prompt and answer together (default: the model's context length)"
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub model")
    chat_template: str | None = setting(
        None, "jinja file, or the template itself, instead of the model's own"
    )
    seed: int = setting(0, "seed of the random generator and of dummy weights")
    served_model_name: str | None = setting(None, "name of the model in the API")

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("load_format", self.load_format, ("auto", "dummy"))
        one_of("quantization", self.quantization, QUANTIZATIONS)
        at_least("max_model_len", self.max_model_len, 1)


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How the KV pool is divided, how large it may be, and which memory backs it."""

    block_size: int = setting(USUAL_BLOCK_SIZE, "tokens per block of the KV cache")
    num_blocks: int | None = setting(None, "number of blocks in the KV cache, in place of its size in bytes")
    kv_cache_memory_bytes: int | None = setting(
        None, "size of the KV cache, such as 2GiB or 512M (default: from free memory)", metavar="BYTES"
    )
    gpu_memory_utilization: float = setting(0.9, "fraction of GPU memory to use, weights included")
    kv_cache_dtype: str = setting(
        "auto",
        "number format of the KV cache: auto, float32, float16, bfloat16, int8 with a scale per token and head, or "
        "(on a GPU) fp8",
    )
    enable_prefix_caching: bool = setting(True, "reuse KV blocks whose tokens were computed before")
    share: bool = setting(
        True, "forked sequences share their blocks; --no-share copies all of them, for comparison"
    )
    reservation: str = setting(
        "paged", "paged, or for comparison max, pow2 or oracle: contiguous memory reserved at admission"
    )
    pin_prefix: tuple[str, ...] = setting(
        (),
        "file of text, or of chat messages in JSON, that many requests begin with: its blocks are computed at start "
        "and never evicted (repeatable)",
        metavar="FILE",
    )
    cpu_offload_gb: float = setting(
        0.0,
        "GiB of weights in host memory: layers, which stream to the GPU in every step, or the least used experts",
    )
    weights_memory_gb: float | None = setting(
        None,
        "GiB of host memory for weights; further layers or experts are on disk (default: all in memory)",
    )
    weights_offload_dir: str | None = setting(
        None, "folder for layers that stream from disk (default: in the cache folder)"
    )
    swap_space: float = setting(
        4.0, "GiB of host memory for the KV blocks of preempted requests; 0 switches swapping off"
    )
    kv_offload_gb: float = setting(0.0, "GiB of host memory for prefix blocks evicted from the KV cache")
    kv_offload_dir: str | None = setting(
        None, "folder of a disk tier behind --kv-offload-gb, up to eight times its size; kept over restarts"
    )
    role: str = setting(
        "both",
        "prefill: compute prompts and write their blocks into --kv-offload-dir; decode: answer, with the blocks that "
        "prefill engines write into the shared folder; both: no hand-over",
    )

    def __post_init__(self) -> None:
        at_least("block_size", self.block_size, 1)
        if self.block_size > 256:
            raise ConfigError(
                f"block_size={self.block_size} is larger than 256: choose 1 to 256 (16 is usual)"
            )
        at_least("num_blocks", self.num_blocks, 1)
        at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        one_of("kv_cache_dtype", self.kv_cache_dtype, (*DTYPES, "int8", "fp8"))
        one_of("reservation", self.reservation, RESERVATIONS)
        if self.reservation != "paged" and self.block_size not in (1, USUAL_BLOCK_SIZE):
            raise ConfigError(
                f"block_size={self.block_size} says nothing with reservation={self.reservation!r}, which counts "
                "tokens: leave it out"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization} is outside (0, 1]")
        files = (self.pin_prefix,) if isinstance(self.pin_prefix, str) else tuple(self.pin_prefix)
        object.__setattr__(self, "pin_prefix", files)
        not_negative("cpu_offload_gb", self.cpu_offload_gb)
        if self.weights_memory_gb is not None and not self.weights_memory_gb > 0.0:
            raise ConfigError(f"weights_memory_gb={self.weights_memory_gb} must be more than 0")
        not_negative("swap_space", self.swap_space)
        not_negative("kv_offload_gb", self.kv_offload_gb)
        if self.kv_offload_dir is not None and not self.kv_offload_gb:
            raise ConfigError("kv_offload_dir needs host memory before it: give kv_offload_gb, such as 4")
        one_of("role", self.role, ROLES)
        if self.role != "both" and self.kv_offload_dir is None:
            raise ConfigError(
                f"role={self.role!r} hands prompts over through a folder that both engines share: give kv_offload_gb "
                "and kv_offload_dir, such as 1 and /dev/shm/quire-kv"
            )
        if self.role != "both" and not self.enable_prefix_caching:
            raise ConfigError(
                f"role={self.role!r} finds prompts in the prefix cache: leave enable_prefix_caching on"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much runs at once, how much may wait, and in which order."""

    max_num_seqs: int | None = setting(
        None, "sequences that run at once (default: 256 on a CPU, 1024 on a GPU, at most one per KV block)"
    )
    max_num_batched_tokens: int | None = setting(
        None, "tokens per step (default: 512 on a CPU, 8192 on a GPU)"
    )
    max_queue_requests: int | None = setting(65536, "requests that may wait")
    max_queue_tokens: int | None = setting(None, "prompt tokens that may wait (default: no limit)")
    steps_in_flight: int = setting(
        1,
        "1: the next step is scheduled while one runs; 0: after it (with pipeline stages as many as there are stages)",
    )
    batching: str = setting(
        "continuous",
        "continuous, or for comparison static or dynamic: the requests of a batch start and end together",
    )
    batch_size: int | None = setting(None, "requests in a static or dynamic batch (default: max_num_seqs)")
    batch_window_ms: float = setting(50.0, "milliseconds that a dynamic batch waits to be full")
    schedule: str = setting(
        "fcfs",
        "order of admission: fcfs, priority (lower values first), shortest, or fair (between API keys or users); "
        "preemption takes the reverse order",
    )
    max_prompt_chunk: int | None = setting(
        None, "most prompt tokens of one request in one step (default: the step's limit)"
    )
    itl_goal: str = setting(
        "off",
        "goal for the time between tokens, in milliseconds: prompts are prefilled in chunks that keep to it; auto: 2.4 "
        "times a decode step, at least 10 ms; off: no goal (default: auto for a server and AsyncLLM, else off)",
    )
    preset: str | None = setting(
        None, "several settings at once: ft is static batching with memory reserved to the maximum"
    )
    preemption_mode: str = setting(
        "auto", "what happens to a preempted request: recompute, swap, or auto, the cheaper one"
    )
    admit_after: str = setting(
        "resumed", "when new requests are admitted: once preempted ones have resumed, or completed"
    )

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue_requests", "max_queue_tokens"):
            at_least(name, getattr(self, name), 1)
        at_least("steps_in_flight", self.steps_in_flight, 0)
        if self.preset is not None:
            one_of("preset", self.preset, tuple(PRESETS))
        one_of("batching", self.batching, BATCHING)
        one_of("schedule", self.schedule, SCHEDULES)
        at_least("batch_size", self.batch_size, 1)
        at_least("max_prompt_chunk", self.max_prompt_chunk, 1)
        if self.batch_size and self.max_num_seqs and self.batch_size > self.max_num_seqs:
            raise ConfigError(
                f"batch_size={self.batch_size} is more than max_num_seqs={self.max_num_seqs}: lower it, or raise "
                "max_num_seqs"
            )
        if not 0.0 <= self.batch_window_ms < float("inf"):
            raise ConfigError(f"batch_window_ms={self.batch_window_ms} must be a number of at least 0")
        self.itl_seconds  # noqa: B018 refuses what is no number
        one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        one_of("admit_after", self.admit_after, ("resumed", "completed"))

    @property
    def itl_seconds(self) -> float | None:
        """The goal for the time between two tokens; None: auto, or off."""
        if self.itl_goal in ("auto", "off"):
            return None
        try:
            milliseconds = float(self.itl_goal)
        except (TypeError, ValueError):
            milliseconds = 0.0
        if not 0.0 < milliseconds < float("inf"):
            raise ConfigError(
                f"itl_goal={self.itl_goal!r} must be auto, off or a number of milliseconds above 0"
            )
        return milliseconds / 1000.0

    @property
    def limits(self) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens), once both are decided."""
        if self.max_num_seqs is None or self.max_num_batched_tokens is None:
            raise ConfigError("max_num_seqs and max_num_batched_tokens must be resolved before they are used")
        return self.max_num_seqs, self.max_num_batched_tokens


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Where and how the forward pass runs."""

    device: str = setting(
        "auto",
        "auto, cpu, cuda, or simulated:NAME to schedule steps for an absent device (h200, a100-40g, …)",
    )
    num_threads: int | None = setting(None, "CPU threads (default: the physical cores)")
    sm_share: float = setting(1.0, "share of the GPU's SMs to use, by MPS or else by a green context")
    enforce_eager: bool = setting(False, "run every step without CUDA graphs and recordings")
    deterministic: bool = setting(
        False,
        "on a GPU: a request's tokens do not depend on the rest of the batch (slower; always so on a CPU in int8)",
    )

    def __post_init__(self) -> None:
        at_least("num_threads", self.num_threads, 1)
        if not 0.0 < self.sm_share <= 1.0:
            raise ConfigError(
                f"sm_share={self.sm_share} is outside (0, 1]: 0.5 is half of the GPU, 1 all of it"
            )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Ranks: processes that compute one model together, each on a device or some cores of its own."""

    tensor_parallel_size: int = setting(
        1,
        "ranks that divide each layer's heads and columns among them, evenly or not",
        *("--tensor-parallel-size", "-tp"),
    )

    pipeline_parallel_size: int = setting(
        1,
        "stages that divide the layers among them, each of tensor_parallel_size ranks; as many steps are in flight",
        *("--pipeline-parallel-size", "-pp"),
    )

    distributed_executor_backend: str = setting(
        "mp", "where ranks run: mp: on this machine; ray: on machines of a Ray cluster (CPU only)"
    )

    def __post_init__(self) -> None:
        at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        one_of("distributed_executor_backend", self.distributed_executor_backend, ("mp", "ray"))

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_on_machine(self) -> int:
        """Ranks that share the cores and GPUs of one machine. Ray gives each its own, wherever it is."""
        return 1 if self.distributed_executor_backend == "ray" else self.num_ranks


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """LoRA adapters: enabled by `enable_lora`, `lora_modules` or `lora_dir`."""

    enable_lora: bool = setting(False, "serve LoRA adapters; implied by --lora-modules and --lora-dir")
    lora_modules: tuple[str, ...] = setting(
        (),
        "adapters as NAME=FOLDER, one or more; a request selects one with `model: NAME`",
        nargs="+",
        metavar="NAME=FOLDER",
    )
    lora_dir: str | None = setting(
        None, "folder of adapters, each named by its folder; adapters loaded at run time must lie in it"
    )
    lora_memory: str = setting(
        "unified",
        "unified: adapters use blocks of the KV pool; separate: they use memory of their own, for comparison",
    )
    lora_memory_bytes: int | None = setting(
        None, "size of the separate memory, taken from the pool (default: a quarter of it)", metavar="BYTES"
    )
    lora_mode: str = setting(
        "batched",
        "batched: any mix in one step; merge: one adapter at a time, merged into the weights, for comparison",
    )
    fully_sharded_loras: bool = setting(
        False,
        "with several ranks: each holds a part of an adapter's matrices, and only results of A are exchanged",
    )
    max_loras: int | None = setting(None, "different adapters in one step (default: as many as sequences)")
    max_lora_rank: int | None = setting(None, "refuse adapters of a higher rank (default: 512)")
    max_cpu_loras: int | None = setting(None, "adapters cached in host memory (default: as many as fit)")
    max_cpu_lora_bytes: int | None = setting(
        None, "host memory for adapters (default: a quarter of free memory, at most 16GiB)", metavar="BYTES"
    )

    def __post_init__(self) -> None:
        given = self.lora_modules
        if isinstance(given, Mapping):  # folders by name, as Python callers write them
            given = tuple(f"{name}={path}" for name, path in given.items())
        object.__setattr__(self, "lora_modules", tuple(given))
        self.modules()
        one_of("lora_memory", self.lora_memory, LORA_MEMORIES)
        one_of("lora_mode", self.lora_mode, LORA_MODES)
        limits = ("max_loras", "max_lora_rank", "max_cpu_loras", "max_cpu_lora_bytes", "lora_memory_bytes")
        for name in limits:
            at_least(name, getattr(self, name), 1)

    @property
    def enabled(self) -> bool:
        return self.enable_lora or bool(self.lora_modules) or self.lora_dir is not None

    def modules(self) -> dict[str, str]:
        """Folders by name."""
        folders: dict[str, str] = {}
        for module in self.lora_modules:
            name, equals, path = module.partition("=")
            if not equals or not name or not path:
                raise ConfigError(f"lora_modules: {module!r} is not of the form name=folder")
            if name in folders:
                raise ConfigError(f"lora_modules names {name!r} twice: give each adapter a name of its own")
            folders[name] = path
        return folders

    def check_folders(self) -> None:
        """ConfigError if a named folder is missing. At first start only: a restart after a fault goes on without it."""
        if self.lora_dir is not None and not Path(self.lora_dir).is_dir():
            raise ConfigError(f"lora_dir: there is no folder {self.lora_dir}: make it, or check the path")
        for name, path in self.modules().items():
            if not Path(path).is_dir():
                raise ConfigError(f"adapter {name!r}: there is no folder {path}")
            if not Path(path, ADAPTER_CONFIG_FILE).exists():
                raise ConfigError(
                    f"adapter {name!r}: {path} has no {ADAPTER_CONFIG_FILE}: give a folder that PEFT saved"
                )


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The fields of `--speculative-config`. Lengths are upper bounds: the engine drafts less where that is faster."""

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_max: int = 4  # tokens of the longest n-gram that is looked up
    prompt_lookup_min: int = 2
    model: str | None = None  # of method draft_model: a folder, a .gguf file or a hub id
    quantization: str = "auto"  # of the draft model
    disable_by_batch_size: int | None = None  # no drafts from this batch size on; None: max_num_seqs
    adaptive: bool = True  # False: always the full length and width, for experiments
    tree_width: int = 1  # branches of a token tree, at most; 1: drafts are chains
    acceptance: str = "coupled"  # "rejection": rejection sampling, for requests without a seed

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative_config: method {self.method!r} is not known: choose one of {', '.join(METHODS)}"
            )
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "tree_width"):
            _check_count(name, getattr(self, name))
        if self.num_speculative_tokens > MAX_DRAFT:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens is {self.num_speculative_tokens}: at most {MAX_DRAFT}"
            )
        self._check_tree()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min ({self.prompt_lookup_min}) is more than prompt_lookup_max "
                f"({self.prompt_lookup_max}): lower it"
            )
        if self.disable_by_batch_size is not None:
            _check_count("disable_by_batch_size", self.disable_by_batch_size)
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"speculative_config: adaptive is {self.adaptive!r}: give true or false")
        if (self.method == "draft_model") != (self.model is not None):
            raise ConfigError(
                "speculative_config: give method draft_model and its model together"
                if self.model is None
                else f"speculative_config: method {self.method} has no model of its own: leave out model"
            )

    def _check_tree(self) -> None:
        width, num_nodes = self.tree_width, self.tree_width * self.num_speculative_tokens
        if width > MAX_WIDTH:
            raise ConfigError(f"speculative_config: tree_width is {width}: at most {MAX_WIDTH}")
        if width > 1 and num_nodes > MAX_NODES:
            raise ConfigError(
                f"speculative_config: tree_width × num_speculative_tokens is {width} × {self.num_speculative_tokens} = "
                f"{num_nodes}: a tree has at most {MAX_NODES} tokens, so lower one of them"
            )
        if self.acceptance not in ACCEPTANCES:
            raise ConfigError(
                f"speculative_config: acceptance {self.acceptance!r} is not known: choose one of "
                f"{', '.join(ACCEPTANCES)}"
            )
        if self.acceptance == "rejection" and self.method != "draft_model":
            raise ConfigError(
                f"speculative_config: acceptance rejection needs a draft's probabilities, and {self.method} has none: "
                "choose method draft_model or leave acceptance out"
            )

    @property
    def in_words(self) -> str:
        lookup = f"looked up by {self.prompt_lookup_min} to {self.prompt_lookup_max} tokens"
        drafter = lookup if self.method == "ngram" else f"by {self.model}"
        tree = f" in trees of {self.tree_width} branches" if self.tree_width > 1 else ""
        rejection = ", accepted by rejection sampling" if self.acceptance == "rejection" else ""
        always = "" if self.adaptive else ", always"
        return f"{drafter}, at most {self.num_speculative_tokens} tokens{tree}{always}{rejection}"


def parse_speculative(given: SpeculativeConfig | str | Mapping[str, Any]) -> SpeculativeConfig:
    """From JSON or a mapping. ConfigError for an unknown or missing name, or an invalid value."""
    if isinstance(given, SpeculativeConfig):
        return given
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"speculative_config is not JSON ({error}): {given!r}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config must be a JSON object with a method, not {given!r}")
    known = [field.name for field in fields(SpeculativeConfig)]
    for name in given:
        if name not in known:
            raise ConfigError(f"speculative_config: unknown name {name!r}{_hint(str(name), known)}")
    if "method" not in given:
        raise ConfigError(f"speculative_config has no method: choose one of {', '.join(METHODS)}")
    usual: dict[str, Any] = {}
    if given["method"] == "ngram" and given.get("tree_width", 1) == 1:
        usual["num_speculative_tokens"] = LOOKED_UP
    return SpeculativeConfig(**{**usual, **given})


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"speculative_config: {name} is {value!r}: give a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of one engine. `of` makes it from flat names, as flags and `LLM(...)` spell them."""

    model: ModelOptions = ModelOptions()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    runner: RunnerConfig = RunnerConfig()
    speculative_config: SpeculativeConfig | None = setting(  # noqa: RUF009 a field, too
        None,
        'draft tokens and verify them in one step: JSON, {"method": "ngram"} drafts by prompt lookup',
        metavar="JSON",
        type=str,
    )
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    parallel: ParallelConfig = ParallelConfig()

    @classmethod
    def of(cls, **flat: Any) -> "EngineConfig":
        """From flat settings. An unknown name is an error; `speculative_config` may be JSON or a mapping."""
        parts: dict[str, dict[str, Any]] = {}
        speculative: SpeculativeConfig | None = None
        owner = option_owners()
        kinds = {option.name: option.type for options in setting_groups().values() for option in options}
        for name, value in {**PRESETS.get(flat.get("preset") or "", {}), **flat}.items():
            if name not in owner:
                raise ConfigError(f"unknown setting {name!r}{_hint(name, sorted(owner))}")
            if kinds[name] is bool and not isinstance(value, int):  # "no" would be true
                raise ConfigError(f"{name}={value!r} must be True or False")
            if name == "speculative_config":
                speculative = None if value is None else parse_speculative(value)
            else:
                parts.setdefault(owner[name], {})[name] = value
        default = cls()
        made = {part: type(getattr(default, part))(**values) for part, values in parts.items()}
        return cls(**made, speculative_config=speculative)


def setting_groups() -> dict[str, list[Field[Any]]]:
    """The settings by the part of EngineConfig that has them; one that is a part itself is alone in its group."""
    default = EngineConfig()
    parts = {part.name: (part, getattr(default, part.name)) for part in fields(EngineConfig)}
    return {name: [part] if value is None else list(fields(value)) for name, (part, value) in parts.items()}


def option_owners() -> dict[str, str]:
    """Flat setting name -> the field of EngineConfig that has it."""
    return {option.name: part for part, options in setting_groups().items() for option in options}

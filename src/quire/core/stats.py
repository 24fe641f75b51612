"""What an engine counts and decides, as one tree of records. Each field says how it is exported and how it is shown.

Rooms increment their own record; `Engine.snapshot` joins the records. `/metrics` walks the tree with `walk`, the start
report and `quire env` walk theirs with `rows`: a new statistic is one field here and one line where it is counted.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """How a field is exported, in Prometheus's terms."""

    kind: str  # "counter" | "gauge"
    name: str  # without the prefix of all metrics
    help: str
    in_bytes: bool = False  # the field counts KV blocks and the metric bytes


@dataclass(frozen=True, slots=True)
class Shown:
    """How a field is shown to people. Neighbours with the same label share a line."""

    label: str  # "" for a tuple of whole lines
    text: str | Callable[[Any], str] = "{}"  # a format, or what makes the text
    empty: str = ""  # for an empty value, which is left out otherwise

    def of(self, value: Any) -> str:
        if not value:
            return self.empty
        return self.text.format(value) if isinstance(self.text, str) else self.text(value)


def shown(
    label: str, text: str | Callable[[Any], str] = "{}", empty: str = "", default: Any = MISSING
) -> Any:
    """A field that reports show and metrics do not export."""
    metadata = {"shown": Shown(label, text, empty)}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def counter(name: str, help: str, *, in_bytes: bool = False) -> Any:
    """A field that only grows, from zero."""
    return field(default=0, metadata={"metric": Metric("counter", name, help, in_bytes)})


def gauge(
    name: str, help: str, default: Any = MISSING, *, in_bytes: bool = False, shown: Shown | None = None
) -> Any:
    """A field that goes up and down. Without `default` the constructor requires it."""
    metadata = {"metric": Metric("gauge", name, help, in_bytes), "shown": shown}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def walk(record: Any) -> Iterator[tuple[Metric, float]]:
    """Every exported field of a record and of the records inside it, with its value."""
    for entry in fields(record):
        value = getattr(record, entry.name)
        metric = entry.metadata.get("metric")
        if metric is not None:
            yield metric, value
        elif is_dataclass(value):
            yield from walk(value)


LABEL = 10  # width of the labels of a start report


def rows(record: Any) -> list[tuple[str, str]]:
    """(label, text) of every field that is shown, of a record and of the records inside it; empty ones are left out."""
    shown_rows: list[tuple[str, str]] = []
    for entry in fields(record):
        value, how = getattr(record, entry.name), entry.metadata.get("shown")
        if how is None:
            shown_rows += rows(value) if is_dataclass(value) else ()
        elif how.label == "":
            shown_rows += [(line[:LABEL].strip(), line[LABEL:]) for line in map(str, value)]
        elif text := how.of(value):
            if shown_rows and shown_rows[-1][0] == how.label:
                text = f"{shown_rows.pop()[1]}, {text}"
            shown_rows.append((how.label, text))
    return shown_rows


@dataclass(slots=True)
class StepStats:
    """Requests, tokens and steps of one engine, and where the time of its host thread goes."""

    num_requests: int = 0
    num_finished: int = 0  # sequences
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = counter("engine_computed_tokens_total", "Tokens through the model.")
    num_steps: int = counter("engine_steps_total", "Forward passes.")
    schedule_seconds: float = 0.0  # deciding steps
    commit_seconds: float = 0.0  # turning results into updates
    # includes sampling
    step_seconds: float = counter("engine_step_seconds_total", "Seconds in forward passes.")
    mask_seconds: float = 0.0  # grammars' masks, made while a forward pass runs


@dataclass(slots=True)
class SchedulerStats:
    num_steps: int = 0
    num_preemptions: int = counter("num_preemptions_total", "Requests sent back to the queue.")
    num_swaps_out: int = counter("num_swaps_out_total", "Requests that went to host memory.")
    num_swaps_in: int = counter("num_swaps_in_total", "Requests that came back from there.")
    num_admissions: int = 0


@dataclass(slots=True)
class MemoryStats:
    prefix_queries: int = counter("prefix_cache_queries_total", "Tokens looked up.")
    prefix_hits: int = counter("prefix_cache_hits_total", "Tokens found in the prefix cache.")
    copies: int = 0  # blocks copied on write


@dataclass(slots=True)
class SwapStats:
    blocks_out: int = counter("swap_out_bytes_total", "Bytes that went there.", in_bytes=True)
    blocks_in: int = counter("swap_in_bytes_total", "Bytes that came back.", in_bytes=True)
    blocks_found: int = 0  # came back through the prefix index, without a copy


@dataclass(slots=True)
class OffloadStats:
    """Blocks of the prefix cache in its host-memory and disk tiers."""

    saved: int = counter("kv_offload_saved_blocks_total", "Evicted blocks that were kept.")
    dropped: int = counter("kv_offload_dropped_blocks_total", "Evicted blocks that were not.")
    host_hits: int = counter("kv_offload_hit_blocks_total", "Blocks that came back to the pool.")
    # Counted among host_hits too once they are used.
    disk_hits: int = counter("kv_offload_disk_hit_blocks_total", "Blocks read from the disk.")
    disk_faults: int = counter("kv_offload_disk_fault_blocks_total", "Files that failed.")


@dataclass(slots=True)
class SpeculationStats:
    num_drafts: int = counter("spec_decode_num_drafts_total", "Drafts that were verified.")
    num_draft_tokens: int = counter("spec_decode_num_draft_tokens_total", "Their tokens.")
    num_accepted_tokens: int = counter(
        "spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted."
    )


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The load of an engine at this moment."""

    num_running: int = gauge("num_requests_running", "Sequences in the batch.", 0)
    num_waiting: int = gauge("num_requests_waiting", "Requests in the engine's queue.", 0)


@dataclass(slots=True)
class RoutingStats:
    """What the router knows of a replica."""

    num_routed: int = counter("replica_requests_total", "Requests that were sent to the replica.")
    num_open: int = gauge("replica_requests_open", "Requests of the replica without their last token.", 0)
    pending_tokens: int = gauge(
        "replica_pending_tokens", "Uncached prompt tokens that the replica has to compute, as estimated.", 0
    )
    handed_over: int = counter(
        "replica_handed_over_tokens_total", "Prompt tokens that a prefill replica computed for this one."
    )


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks in use at this moment, in the pool and in host memory beside it."""

    num_blocks_used: int = 0
    usage: float = gauge("kv_cache_usage_perc", "Share of the pool's blocks in use, 0 to 1.", 0.0)
    swap_used: int = gauge("swap_bytes", "Host memory that swapped requests hold.", 0, in_bytes=True)
    swap_space: int = gauge("swap_space_bytes", "Host memory for swapped requests.", 0, in_bytes=True)
    offload_used: int = gauge("kv_offload_bytes", "Host memory of evicted blocks.", 0, in_bytes=True)
    offload_space: int = gauge("kv_offload_space_bytes", "Host memory for evicted blocks.", 0, in_bytes=True)
    offload_disk: int = gauge("kv_offload_disk_bytes", "Disk space of evicted blocks.", 0, in_bytes=True)


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """LoRA adapters: the pool's blocks that they take, host copies, loads and evictions."""

    num_names: int = 0  # that were named or asked for so far
    num_blocks_kv: int = gauge("pool_blocks_kv", "Blocks in use by K and V.", 0)
    num_blocks: int = gauge("pool_blocks_lora", "Blocks that hold adapters, idle ones included.", 0)
    num_blocks_in_use: int = gauge("pool_blocks_lora_in_use", "Blocks of adapters that run now.", 0)
    num_in_pages: int = gauge("lora_adapters_in_pages", "Adapters in the pool.", 0)
    num_in_use: int = gauge("lora_adapters_running", "Adapters that run now.", 0)
    num_on_host: int = gauge("lora_adapters_on_host", "Adapters read from disk and kept in host memory.", 0)
    host_bytes: int = gauge("lora_host_bytes", "What they take there.", 0)
    num_reads: int = counter("lora_reads_total", "Adapters read from disk.")
    num_failures: int = counter("lora_failures_total", "Adapters that could not be read.")
    num_loads: int = counter("lora_loads_total", "Adapters copied into pages.")
    num_evictions: int = counter("lora_evictions_total", "Idle adapters whose pages were taken.")
    num_uses: int = counter("lora_uses_total", "Sequences that began with an adapter.")
    hit_rate: float = gauge("lora_hit_rate", "Share of uses whose adapter lay in pages already.", 0.0)
    running: tuple[str, ...] = ()  # names, at most a hundred
    waiting: tuple[str, ...] = ()


@dataclass(slots=True)
class EngineStats:
    """The root. An encoder counts steps only; `adapters` is None where adapters are off."""

    steps: StepStats = field(default_factory=StepStats)
    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    memory: MemoryStats = field(default_factory=MemoryStats)
    pool: PoolStats = field(default_factory=PoolStats)
    swap: SwapStats = field(default_factory=SwapStats)
    offload: OffloadStats = field(default_factory=OffloadStats)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    adapters: AdapterStats | None = None


@dataclass(frozen=True, slots=True)
class StartStats:
    """What one start of an engine decided and took, beside the limits of a request."""

    num_threads: int
    weights_bytes: int = gauge(
        "weights_bytes",
        "Size of the weights.",
        shown=Shown("weights", lambda num_bytes: f"{num_bytes / 1e6:,.0f} MB"),
    )
    seconds: float = gauge("engine_start_seconds", "How long the engine took to start.")
    num_sms: int = gauge("engine_sms", "SMs of its GPU that the engine may use; 0 on a CPU.", 0)


SCORE_PATHS = ("/v1/score", "/v1/rerank")


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """The vectors of an encoder."""

    width: int
    normalize: bool  # vectors have length one
    pooling: str = "mean"
    labels: tuple[str, ...] = ()  # of a classifier, whose vectors are its classes' scores
    predicts_masked: bool = False
    prompts: dict[str, str] = field(default_factory=dict)  # what a text begins with, by name of the prompt
    default_prompt: str | None = None  # its name

    def __str__(self) -> str:
        if self.labels:
            more = ", …" if self.width > 4 else ""
            classes = "classes" if self.width > 1 else "class"
            return f"scores of {self.width} {classes}: {', '.join(self.labels[:4])}{more}"
        length = ", of length one" if self.normalize else ""
        masked = "; predicts masked tokens" if self.predicts_masked else ""
        return f"{self.width} numbers, {self.pooling} of the tokens{length}{masked}"

    @property
    def kind(self) -> str:
        """What the model does, in words."""
        return "makes class scores" if self.labels else "makes embeddings"

    @property
    def paths(self) -> tuple[str, ...]:
        """The endpoints that serve it."""
        if self.labels:
            return ("/v1/classify", *(SCORE_PATHS if len(self.labels) == 1 else ()))
        return ("/v1/embeddings", *SCORE_PATHS, *(("/v1/fill-mask",) if self.predicts_masked else ()))


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool as it was sized at start; block 0 is never given out and not counted."""

    num_blocks: int = gauge("kv_cache_blocks", "Blocks in the pool.")
    block_size: int = gauge("kv_cache_block_size", "Tokens per block.")
    num_bytes: int = gauge("kv_cache_bytes", "Size of the pool.")  # with block 0
    dtype: str = ""  # of K and V
    limit: str = ""  # what set the size, in words
    num_full: int = 1  # groups of layers that keep all tokens of a sequence, see LayerGroups
    num_window: int = 0  # groups of layers that keep the last `window` tokens
    window: int = 0

    def __bool__(self) -> bool:
        """An encoder has no pool."""
        return self.num_blocks > 0

    def __str__(self) -> str:
        return (
            f"{self.num_bytes / 1e6:,.0f} MB: {self.num_blocks:,} blocks of {self.block_size} tokens "
            f"= {self.num_tokens:,} tokens in {self.dtype} (set by {self.limit}){self.groups_in_words}"
        )

    @property
    def groups_in_words(self) -> str:
        """What layers with a sliding window keep; empty where there are none."""
        if not self.num_window:
            return ""
        share = self.num_window / (self.num_full + self.num_window)
        return f"; {share:.0%} of a token's K and V are freed behind the window of {self.window:,} tokens"

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks of a sequence of `num_tokens` that decodes."""
        whole = -(-num_tokens // self.block_size)
        kept = -(-self.window // self.block_size) + 1
        return self.num_full * whole + self.num_window * min(whole, kept)

    @property
    def block_bytes(self) -> int:
        return self.num_bytes // (self.num_blocks + 1)

    @property
    def num_tokens(self) -> int:
        """Of sequences within their window, if there is one."""
        return self.num_blocks // (self.num_full + self.num_window) * self.block_size

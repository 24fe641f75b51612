"""Report: what was decided at start, as the lines that an engine prints and the numbers that metrics export."""

from dataclasses import dataclass

import torch

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.stats import VectorFormat
from quire.engine.build.pins import PinnedPrefix
from quire.engine.build.resolve import Precision
from quire.models.offload import Streaming
from quire.models.weight_shape import WeightGroup
from quire.runner.sizing import DeviceMemory, PoolSize

_RESERVATIONS = {
    "max": "memory reserved to max_model_len",
    "pow2": "memory reserved to the next power of two of max_tokens",
    "oracle": "memory reserved to max_tokens",
}
_SCHEDULES = {
    "priority": "lower priority values first",
    "shortest": "shortest requests first, with ageing",
    "fair": "fair shares among tenants",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was decided at start, for people and for metrics."""

    model: str
    precision: Precision
    weights_bytes: int
    groups: tuple[WeightGroup, ...]  # how the weights are stored
    pool: PoolSize
    device_memory: DeviceMemory | None  # None on a CPU
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    num_graphs: int  # sizes of steps that were captured at start
    tiles: str  # attention's, on a GPU: tuned, default or fixed
    seconds: float
    speculation: str = ""  # the method and its draft length
    simulated: str = ""  # the simulated device, and what it was fitted on
    policies: str = ""  # other than the defaults
    host: tuple[str, ...] = ()  # host memory beside the pool
    offload: tuple[str, ...] = ()  # which weights stream and what that costs
    streaming: Streaming | None = None  # the same as numbers; None: all weights stay
    pinned: tuple[PinnedPrefix, ...] = ()
    adapters: tuple[str, ...] = ()  # how many are known, and their limits
    vectors: VectorFormat | None = None  # of an encoder, which has no pool

    def lines(self) -> list[str]:
        precision, pool = self.precision, self.pool
        where = f"on {precision.device.type}, {self.num_threads} threads"
        if precision.device.type == "cuda":
            where = f"on {torch.cuda.get_device_name(precision.device)}"
        if self.simulated:
            where = f"on {self.simulated}"
        if self.vectors is not None:
            return [
                f"encoder   {self.model}, {precision.format_name} {where}",
                self._weights,
                self.vectors.line,
                f"limits    {self.max_model_len:,} tokens per text, {self.max_num_seqs} texts and "
                f"{self.max_num_batched_tokens:,} tokens per step",
                f"started   in {self.seconds:.2f} s",
            ]
        divided = [] if self.device_memory is None else [_divided(self.device_memory)]
        graphs = f", {self.num_graphs} sizes of steps captured as graphs" if self.num_graphs else ""
        tiles = f", {self.tiles} tiles" if self.tiles else ""
        return [
            f"model     {self.model}, {precision.format_name} {where}",
            self._weights,
            *self.offload,
            *divided,
            f"pool      {pool.num_bytes / 1e6:,.0f} MB: {pool.num_blocks:,} blocks of {pool.block_size} tokens "
            f"= {pool.num_tokens:,} tokens in {precision.kv_dtype} (set by {pool.limit})",
            *self.host,
            f"limits    {self.max_model_len:,} tokens per sequence, {self.max_num_seqs} sequences, "
            f"{self.max_num_batched_tokens:,} tokens per step",
            *self.adapters,
            *(prefix.line for prefix in self.pinned),
            *([f"drafts    {self.speculation}"] if self.speculation else []),
            *([f"policies  {self.policies}"] if self.policies else []),
            *([f"products  {precision.format.gemm.summary}"] if precision.format.gemm.summary else []),
            f"started   in {self.seconds:.2f} s{graphs}{tiles}",
        ]

    @property
    def _weights(self) -> str:
        stored = "; ".join(group.in_words for group in self.groups)
        return f"weights   {self.weights_bytes / 1e6:,.0f} MB: {stored}"


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


def policies_in_words(memory: MemoryConfig, scheduler: SchedulerConfig) -> str:
    """Policies other than the defaults: continuous batching, paging, first come, first served."""
    words = []
    if scheduler.batching != "continuous":
        size = scheduler.batch_size or scheduler.max_num_seqs
        window = (
            f", which wait {scheduler.batch_window_ms:g} ms at most"
            if scheduler.batching == "dynamic"
            else ""
        )
        words.append(f"{scheduler.batching} batches of up to {size} requests{window}")
    if memory.reservation != "paged":
        words.append(f"{_RESERVATIONS[memory.reservation]}, in one piece, no sharing (for comparison)")
    if scheduler.schedule != "fcfs":
        words.append(_SCHEDULES[scheduler.schedule])
    if scheduler.preset is not None:
        words.append(f"preset {scheduler.preset}")
    return "; ".join(words)

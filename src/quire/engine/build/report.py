"""Report: what was decided at start, as the lines that an engine prints and the numbers that metrics export."""

from dataclasses import dataclass

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.stats import LABEL, PoolSize, StartStats, VectorFormat, rows, shown
from quire.engine.build.pins import PinnedPrefix
from quire.engine.build.resolve import Precision
from quire.engine.validation import Limits
from quire.kernels.sm_share import gpu_name
from quire.models.expert_placement import ExpertPlacement
from quire.models.offload import Streaming
from quire.models.weight_shape import WeightGroup
from quire.runner.sizing import DeviceMemory

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


def in_groups(groups: tuple[WeightGroup, ...]) -> str:
    """Bits per weight of every part, and what is not quantized."""
    parts = [f"{group.part} {group.bits:.2f} ({group.scheme})" for group in groups]
    return f"bits per weight: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was decided at start, for people and for metrics. The start report shows the fields in their order."""

    model: str = shown("model")
    where: str = shown("model")  # number format, device and threads
    parallel: str = shown("ranks", default="")  # what each rank holds of a layer
    precision: Precision
    start: StartStats
    groups: tuple[WeightGroup, ...] = shown("weights", in_groups)  # how the weights are stored
    offload: tuple[str, ...] = shown("", default=())  # which weights stream and what that costs
    device_memory: DeviceMemory | None = shown("memory", default=None)  # None on a CPU
    pool: PoolSize = shown("pool", default=PoolSize(0, 0, 0))  # of an encoder empty
    vectors: VectorFormat | None = shown("vectors", default=None)  # of an encoder
    host: tuple[str, ...] = shown("", default=())  # host memory beside the pool
    limits: Limits
    adapters: tuple[str, ...] = shown("", default=())  # how many are known, and their limits
    pinned: tuple[PinnedPrefix, ...] = shown("", default=())
    speculation: str = shown("drafts", default="")  # the method and its draft length
    policies: str = shown("policies", default="")  # other than the defaults
    products: str = shown("products", default="")  # GEMM algorithms that were measured
    started: str = shown("started", default="")
    streaming: Streaming | ExpertPlacement | None = None  # `offload` as numbers; None: all weights stay

    def lines(self) -> list[str]:
        return [f"{label:<{LABEL}}{text}" for label, text in rows(self)]


def running_on(precision: Precision, num_threads: int, simulated: str = "") -> str:
    """The number format, and the device with its threads; or the simulated device, and what it was fitted on."""
    where = simulated or f"{precision.device.type}, {num_threads} threads"
    if precision.device.type == "cuda" and not simulated:
        where = gpu_name(precision.device)
    return f"{precision.format_name} on {where}"


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

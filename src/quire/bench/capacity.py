"""What a model needs on a device, before anything is loaded: the same arithmetic as the engine's own start.

The table of GPUs: `bandwidth` and `flops` are the data sheets' (dense bf16; fp16 where there is no bf16), `memory` is
the total that PyTorch reports, which is less than the name says, and `measured` is a read rate that this project
measured: where there is one, it is used instead of `bandwidth`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from quire.core.config import EngineConfig, ModelConfig, ParallelConfig
from quire.core.errors import ConfigError
from quire.core.stats import PoolSize
from quire.engine.build.ranks import check_ranks
from quire.engine.build.resolve import (
    Precision,
    block_layout,
    default_limits,
    layer_groups,
    resolve_max_model_len,
    resolve_precision,
)
from quire.layers.factory import RankPart
from quire.models import registry
from quire.models.expert_placement import experts_away, resident_experts
from quire.models.weight_shape import WeightShape, weight_shape
from quire.parallel.cut import cut_layers, cut_model
from quire.parallel.group import Group
from quire.quant.choice import check_float8
from quire.runner.sizing import CPU_POOL_LIMIT, CPU_POOL_SHARE, GPU_MARGIN, free_host_bytes, pool_size
from quire.weights.source import Source

GiB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory: int  # bytes
    bandwidth: float  # bytes per second
    flops: float  # per second
    source: str
    measured: float | None = None  # bytes per second
    float8: bool = True  # has matrix units for it


GPUS = (
    Gpu(
        "H200", int(139.8 * GiB), 4.80e12, 989e12, "NVIDIA H200 data sheet, SXM; read rate measured", 4.26e12
    ),
    Gpu("H100", int(79.1 * GiB), 3.35e12, 989e12, "NVIDIA H100 data sheet, SXM5"),
    Gpu("H100-PCIe", int(79.1 * GiB), 2.00e12, 756e12, "NVIDIA H100 data sheet, PCIe"),
    Gpu("A100-80", int(79.2 * GiB), 2.04e12, 312e12, "NVIDIA A100 data sheet, SXM4 80 GB", float8=False),
    Gpu("A100-40", int(39.4 * GiB), 1.555e12, 312e12, "NVIDIA A100 data sheet, 40 GB", float8=False),
    Gpu("L40S", int(44.4 * GiB), 0.864e12, 362e12, "NVIDIA L40S data sheet"),
    Gpu("L4", int(22.0 * GiB), 0.300e12, 121e12, "NVIDIA L4 data sheet"),
    Gpu("A10", int(22.0 * GiB), 0.600e12, 125e12, "NVIDIA A10 data sheet", float8=False),
    Gpu("T4", int(14.6 * GiB), 0.320e12, 65e12, "NVIDIA T4 data sheet, fp16", float8=False),
    Gpu("RTX-4090", int(23.5 * GiB), 1.008e12, 165e12, "NVIDIA Ada architecture white paper"),
    Gpu("V100", int(31.7 * GiB), 0.900e12, 125e12, "NVIDIA V100 data sheet, SXM2 32 GB, fp16", float8=False),
)


def find_gpu(name: str) -> Gpu:
    """The GPU of a name in any spelling: "rtx 4090", "4090", "A100 80GB", or as PyTorch reports it."""
    wanted = _words(name)
    for gpu in GPUS:
        if "".join(_words(gpu.name)) == "".join(wanted):
            return gpu
    within = [gpu for gpu in GPUS if set(_words(gpu.name)) <= set(wanted)]
    if within:  # "NVIDIA H100 PCIe" is an H100, but more exactly an H100-PCIe
        return max(within, key=lambda gpu: len(_words(gpu.name)))
    around = [gpu for gpu in GPUS if wanted and set(wanted) <= set(_words(gpu.name))]
    if len(around) == 1:
        return around[0]
    if around:
        raise ConfigError(f"--gpu {name} may be {' or '.join(gpu.name for gpu in around)}: name one")
    known = ", ".join(gpu.name for gpu in GPUS)
    raise ConfigError(f"--gpu {name} is not in the table ({known}): give --memory and --bandwidth instead")


def _words(name: str) -> list[str]:
    return [word.removesuffix("gb") for word in re.findall(r"[a-z0-9]+", name.lower())]


# Resident memory of `quire serve` beside weights and pool, measured on Linux: libraries, and for each token of the
# vocabulary its tokenizer, texts and logits.
ENGINE_BYTES, ENGINE_TOKEN_BYTES = 180_000_000, 900
HTTP_BYTES, HTTP_TOKEN_BYTES = 78_000_000, 470
GPU_CONTEXT_BYTES = 500_000_000  # CUDA's context and the libraries' workspaces: an estimate


@dataclass(frozen=True, slots=True)
class Device:
    """Where the model would run. A rate of 0 is not known."""

    name: str
    on_gpu: bool
    memory: int | None  # bytes; None: this machine, as much as is free now
    read_rate: float  # bytes per second
    flops: float  # per second
    source: str
    float8: bool = True


def device_of(gpu: Gpu) -> Device:
    rate = gpu.measured or gpu.bandwidth
    return Device(gpu.name, True, gpu.memory, rate, gpu.flops, gpu.source, gpu.float8)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits on a device. `pool` is as the engine would allocate it."""

    model_name: str
    model: ModelConfig
    format_name: str
    kv_dtype: str
    weights: WeightShape
    kv_bytes_per_token: int
    pool: PoolSize
    max_model_len: int
    max_num_seqs: int
    num_resident: int | None = None  # experts of each layer that stay, by use; None: all weights stay
    away_bytes: int = 0  # of weights that are not on the device
    is_rank: bool = False  # one of several, beside which others take memory

    @property
    def engine_bytes(self) -> int:
        """What the engine process keeps in host memory beside weights and pool."""
        return ENGINE_BYTES + ENGINE_TOKEN_BYTES * self.model.vocab_size

    @property
    def http_bytes(self) -> int:
        """What the HTTP process of `quire serve` takes."""
        return HTTP_BYTES + HTTP_TOKEN_BYTES * self.model.vocab_size

    @property
    def server_bytes(self) -> int:
        """Host memory of `quire serve` on a CPU once the pool is full."""
        weights = self.weights.num_bytes - self.away_bytes
        return weights + self.pool.num_bytes + self.engine_bytes + self.http_bytes

    def sequences_of(self, context: int) -> int:
        """Number of sequences of `context` tokens that run at once."""
        return min(self.pool.num_blocks // self.pool.blocks_of(context), self.max_num_seqs)

    def kv_bytes_read(self, context: int) -> float:
        """By a decode of one sequence: layers with a window read that much only."""
        pool = self.pool
        inside = min(context, pool.window) if pool.num_window else 0
        share = (pool.num_full * context + pool.num_window * inside) / (pool.num_full + pool.num_window)
        return share * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bound of a decode step's time: it reads all weights and every sequence's KV cache, and multiplies them."""

    num_sequences: int
    step_seconds: float
    bound: str  # "memory" | "compute"

    @property
    def tokens_per_second(self) -> float:
        return self.num_sequences / self.step_seconds

    def cost_per_million(self, price_per_hour: float) -> float:
        return price_per_hour / 3600 / self.tokens_per_second * 1e6


def plan_capacity(config: EngineConfig, source: Source, device: Device) -> Capacity:
    """Of the rank that has most to hold, where there are several. ConfigError if the weights alone do not fit."""
    model = registry.describe(source.config)
    if config.parallel.num_ranks == 1:
        return _capacity_of(config, source, device, model)
    check_ranks(config, model, device.on_gpu)
    ranks = [_capacity_of(config, source, device, model, part) for part in _parts(config.parallel, model)]
    fewest = min(rank.pool.num_blocks for rank in ranks)  # ids of blocks are those of all
    most = max(ranks, key=lambda rank: rank.weights.num_bytes + fewest * rank.pool.block_bytes)
    if fewest == most.pool.num_blocks:
        return most
    num_bytes = (fewest + 1) * most.pool.block_bytes
    pool = replace(most.pool, num_blocks=fewest, num_bytes=num_bytes, limit="the smallest rank")
    return replace(most, pool=pool, max_num_seqs=min(rank.max_num_seqs for rank in ranks))


def _parts(parallel: ParallelConfig, model: ModelConfig) -> Iterator[RankPart]:
    """Of each rank, without ranks that have as much as another one."""
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    known = set()
    for stage, layers in enumerate(cut_layers(model, pp) if pp > 1 else [None]):
        for rank in range(tp):
            cut = cut_model(model, rank, tp)
            spans = (cut.heads[rank], cut.kv_heads[rank], cut.inner[rank], cut.vocab[rank], layers or (0, 0))
            size = (stage == 0, *(last - first for first, last in spans))
            if size not in known:
                known.add(size)
                yield RankPart(cut, Group(rank, tp), Group(stage, pp), layers)


def _capacity_of(
    config: EngineConfig, source: Source, device: Device, model: ModelConfig, part: RankPart | None = None
) -> Capacity:
    """`part`: of one rank; it has an equal share of the memory of a machine whose other ranks have theirs."""
    name, sharing = source.name, 1
    precision = _precision(config, model, device)
    max_model_len = resolve_max_model_len(config, model)
    weights = weight_shape(model, precision.format, source.encodings, part)
    if part is not None:
        number = part.stages.rank * part.group.size + part.group.rank
        name = f"{name}, rank {number} of {config.parallel.num_ranks}"
        sharing = 1 if device.on_gpu else config.parallel.ranks_on_machine
        first, last = part.layers or (0, model.num_layers)
        model = replace(part.cut.local, num_layers=last - first)
    groups = layer_groups(config, model, max_model_len)
    layout = block_layout(config.memory.block_size, model, precision, groups)
    num_resident = _resident_experts(config, device, weights)
    away_bytes = _away_bytes(weights, num_resident)
    kept_bytes = sharing * (weights.num_bytes - away_bytes)
    free = _free_bytes(config, device, kept_bytes, mapped=precision.format.worth_keeping) // sharing
    max_rows, _ = default_limits(config.scheduler, precision.device)
    pool = pool_size(config.memory, layout, groups, max_rows, max_model_len, free)
    return Capacity(
        name, model, precision.format_name, precision.kv_dtype, weights, layout.bytes_per_token, pool, max_model_len,
        min(max_rows, pool.num_blocks // groups.num_groups), num_resident, away_bytes, part is not None,
    )  # fmt: skip


def _away_bytes(weights: WeightShape, num_resident: int | None) -> int:
    experts = weights.experts
    if num_resident is None or experts is None:
        return 0
    return int((experts.num_experts - num_resident) * experts.num_layers * experts.expert_bytes)


def _resident_experts(config: EngineConfig, device: Device, weights: WeightShape) -> int | None:
    """As the engine would decide. ConfigError where it would stream whole layers, whose time is not planned."""
    memory, experts = config.memory, weights.experts
    asked = memory.cpu_offload_gb if device.on_gpu else memory.weights_memory_gb
    if not asked:
        return None
    num_resident = None
    if experts is not None:
        num_bytes, sizes = asked * GiB, (experts.expert_bytes, experts.num_experts, experts.num_layers)
        if not device.on_gpu:
            num_resident = resident_experts(int(num_bytes - weights.num_bytes + experts.num_bytes), *sizes)
        elif (num_away := experts_away(int(num_bytes), *sizes)) is not None:
            num_resident = experts.num_experts - num_away
    if num_resident is None:
        name = "cpu_offload_gb" if device.on_gpu else "weights_memory_gb"
        raise ConfigError(
            f"with {name}={asked:g} whole layers of this model stream, which a plan does not know: leave it out, or "
            "give an amount that experts of a mixture cover"
        )
    return num_resident


def floor_of(capacity: Capacity, device: Device, context: int, num_sequences: int) -> Floor:
    """The lower bound of a decode step with `num_sequences` sequences of `context` tokens each."""
    model, weights = capacity.model, capacity.weights
    read = weights.bytes_read(num_sequences) + num_sequences * capacity.kv_bytes_read(context)
    attention = 4 * context * model.num_layers * model.num_heads * model.head_dim
    operations = num_sequences * (2 * weights.read_parameters + attention)
    reading = read / device.read_rate
    computing = operations / device.flops if device.flops else 0.0
    return Floor(num_sequences, max(reading, computing), "memory" if reading >= computing else "compute")


def _precision(config: EngineConfig, model: ModelConfig, device: Device) -> Precision:
    """Resolved on torch's "meta" device for a GPU that is absent: neither has the CPU's own formats."""
    check_float8(device.name, device.float8, config.model.quantization, config.memory.kv_cache_dtype)
    runner = replace(config.runner, device="meta" if device.on_gpu else "cpu")
    return resolve_precision(replace(config, runner=runner), model)


def _free_bytes(config: EngineConfig, device: Device, kept_bytes: int, mapped: bool) -> int:
    """Bytes left for the pool. Weights that are mapped from a file can be evicted, so they don't count."""
    kept = 0 if mapped else kept_bytes
    if not device.on_gpu:
        if device.memory is not None:
            return int(min(CPU_POOL_LIMIT, CPU_POOL_SHARE * max(0, device.memory - kept)))
        now = free_host_bytes()
        return now if now >= CPU_POOL_LIMIT else int(max(0, now - CPU_POOL_SHARE * kept))
    assert device.memory is not None, "a GPU's memory is known"
    usable = min(int(device.memory * config.memory.gpu_memory_utilization), device.memory - GPU_MARGIN)
    left = usable - kept_bytes - GPU_CONTEXT_BYTES
    if left <= 0:
        raise ConfigError(
            f"the weights take {kept_bytes / 1e9:.1f} GB and {device.name} has {usable / 1e9:.1f} GB "
            f"at gpu_memory_utilization={config.memory.gpu_memory_utilization}: take a larger device"
        )
    return left

"""What a model needs on a device, before anything is loaded: the same arithmetic as the engine's own start."""

from dataclasses import dataclass, replace

from quire.bench.gpus import Gpu
from quire.core.config import EngineConfig, ModelConfig
from quire.core.errors import ConfigError
from quire.engine.build import block_layout
from quire.engine.build.resolve import Precision, default_limits, resolve_max_model_len, resolve_precision
from quire.models import registry
from quire.models.weight_shape import WeightShape, weight_shape
from quire.runner.sizing import CPU_POOL_LIMIT, CPU_POOL_SHARE, PoolSize, free_host_bytes, pool_size
from quire.weights.source import Source

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


def device_of(gpu: Gpu) -> Device:
    return Device(gpu.name, True, gpu.memory, gpu.read_rate, gpu.flops, gpu.source)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits. `pool` is as the engine would allocate it."""

    model_name: str
    model: ModelConfig
    format_name: str
    kv_dtype: str
    weights: WeightShape
    kv_bytes_per_token: int
    pool: PoolSize
    max_model_len: int
    max_num_seqs: int

    def sequences_of(self, context: int) -> int:
        """How many sequences of this length run at once."""
        blocks_each = -(-context // self.pool.block_size)
        return min(self.pool.num_blocks // blocks_each, self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class Floor:
    """No step can be shorter: it reads all weights and every sequence's KV, and multiplies them."""

    num_sequences: int
    step_seconds: float
    bound: str  # "memory" | "compute"

    @property
    def tokens_per_second(self) -> float:
        return self.num_sequences / self.step_seconds

    def cost_per_million(self, price_per_hour: float) -> float:
        return price_per_hour / 3600 / self.tokens_per_second * 1e6


def plan_capacity(config: EngineConfig, source: Source, device: Device) -> Capacity:
    """ConfigError if the weights alone do not fit, with both numbers."""
    model = registry.describe(source.config)
    numbers = _numbers(config, model, device)
    max_model_len = resolve_max_model_len(config, model)
    weights = weight_shape(model, numbers.format)
    layout = block_layout(config.memory.block_size, model, numbers)
    free = _free_bytes(config, device, weights, mapped=numbers.format.worth_keeping)
    max_rows, _ = default_limits(config.scheduler, numbers.device)
    pool = pool_size(config.memory, layout, max_rows, max_model_len, free)
    return Capacity(
        model_name=source.name,
        model=model,
        format_name=numbers.format_name,
        kv_dtype=numbers.kv_dtype,
        weights=weights,
        kv_bytes_per_token=layout.bytes_per_token,
        pool=pool,
        max_model_len=max_model_len,
        max_num_seqs=min(max_rows, pool.num_blocks),
    )


def floor_of(capacity: Capacity, device: Device, context: int, num_sequences: int) -> Floor:
    """The floor of one decode step with this many sequences of `context` tokens each."""
    model, weights = capacity.model, capacity.weights
    read = weights.read_bytes + num_sequences * context * capacity.kv_bytes_per_token
    attention = 4 * context * model.num_layers * model.num_heads * model.head_dim
    operations = num_sequences * (2 * weights.read_parameters + attention)
    reading = read / device.read_rate
    computing = operations / device.flops if device.flops else 0.0
    return Floor(num_sequences, max(reading, computing), "memory" if reading >= computing else "compute")


def _numbers(config: EngineConfig, model: ModelConfig, device: Device) -> Precision:
    """A GPU that is not here is spelled "meta": neither needs anything of the CPU's own formats."""
    if device.on_gpu and config.model.quantization == "int8":
        raise ConfigError("quantization='int8' runs on the CPU only so far: use quantization='none' on a GPU")
    runner = replace(config.runner, device="meta" if device.on_gpu else "cpu")
    return resolve_precision(replace(config, runner=runner), model)


def _free_bytes(config: EngineConfig, device: Device, weights: WeightShape, mapped: bool) -> int:
    """What is left for the pool. Weights that are mapped from a file can be dropped, so they don't count."""
    kept = 0 if mapped else weights.num_bytes
    if not device.on_gpu:
        if device.memory is not None:
            return int(min(CPU_POOL_LIMIT, CPU_POOL_SHARE * max(0, device.memory - kept)))
        now = free_host_bytes()
        return now if now >= CPU_POOL_LIMIT else int(max(0, now - CPU_POOL_SHARE * kept))
    assert device.memory is not None, "a GPU's memory is known"
    usable = int(device.memory * config.memory.gpu_memory_utilization)
    left = usable - weights.num_bytes - GPU_CONTEXT_BYTES
    if left <= 0:
        raise ConfigError(
            f"the weights take {weights.num_bytes / 1e9:.1f} GB and {device.name} has {usable / 1e9:.1f} GB "
            f"at gpu_memory_utilization={config.memory.gpu_memory_utilization}: take a larger device"
        )
    return left

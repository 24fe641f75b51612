"""Where replicas run: each on a GPU of its own, or with its share of the cores."""

from collections.abc import Sequence
from dataclasses import replace

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.observe.host import default_num_threads, visible_gpus

MAX_REPLICAS = 64


def own_configs(config: EngineConfig, count: int, roles: Sequence[str] = ()) -> list[EngineConfig]:
    """The settings of each replica, wherever it runs: its seeds and its role."""
    if not 1 <= count <= MAX_REPLICAS:
        raise ConfigError(f"data_parallel_size={count} is outside 1 to {MAX_REPLICAS}")
    configs = [_with_own_seeds(config, index) for index in range(count)]
    if roles:
        memories = [replace(config.memory, role=role) for role in roles]
        configs = [replace(own, memory=memory) for own, memory in zip(configs, memories, strict=True)]
    return configs


def with_threads(configs: Sequence[EngineConfig], num_threads: int) -> list[EngineConfig]:
    return [replace(own, runner=replace(own.runner, num_threads=num_threads)) for own in configs]


def replica_configs(config: EngineConfig, count: int, roles: Sequence[str] = ()) -> list[EngineConfig]:
    """As `own_configs`, on this machine. A number of threads that was asked for is that of each."""
    configs = own_configs(config, count, roles)
    device, num_gpus = config.runner.device, len(visible_gpus())
    if device not in ("auto", "cuda") or not num_gpus:
        return with_threads(configs, config.runner.num_threads or max(1, default_num_threads() // count))
    share, on_one = config.memory.gpu_memory_utilization, -(-count // num_gpus)
    if on_one > 1 and config.memory.kv_cache_memory_bytes is None and share * on_one > 1.0:
        raise ConfigError(
            f"data_parallel_size={count} puts {on_one} replicas on one of {num_gpus} GPUs, and each takes "
            f"gpu_memory_utilization={share} of it: lower that to {0.95 / on_one:.2f}, or start fewer replicas"
        )
    return [
        replace(own, runner=replace(own.runner, device=f"cuda:{index % num_gpus}"))
        for index, own in enumerate(configs)
    ]


def _with_own_seeds(config: EngineConfig, index: int) -> EngineConfig:
    """Requests without a seed are drawn from the engine's: replicas must not repeat each other. Random weights are
    drawn from it too and must be equal.
    """
    if config.model.load_format == "dummy":
        return config
    return replace(config, model=replace(config.model, seed=config.model.seed + index))

"""`quire serve --auto`: settings for this machine by the arithmetic of `quire plan`, each with its reason."""

import sys
from typing import Any

import torch

from quire.bench.capacity import Capacity, Device, plan_capacity
from quire.bench.machine import cpu_name, describe_gpus
from quire.bench.table import aligned, in_bytes
from quire.cli.start import described_source
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, ModelError
from quire.runner.sizing import CPU_POOL_LIMIT, CPU_POOL_SHARE, available_memory
from quire.weights.source import Source

SMALLER = "int4"  # tried where the weights do not fit
HOST_SHARE = 0.9  # of the free memory that a server on a CPU may take


def chosen(engine: dict[str, Any]) -> dict[str, Any]:
    """`engine`, with quantization and max_model_len where they are not given. Prints every choice on stderr."""
    config = EngineConfig.of(**engine)
    device, why = _device(config)
    source = described_source(config)
    rows = [["device", device.name, why]]
    try:
        plan, format_row = _fitting(engine, source, device)
    except ModelError:  # an encoder, which has no KV cache; an unknown model is refused by the start
        plan, format_row = None, ["settings", "as usual", "the model generates no text"]
    rows.append(format_row)
    if plan is not None:
        if format_row[1] == SMALLER:
            engine = {**engine, "quantization": SMALLER}
        length, reason = _length(plan, "max_model_len" in engine)
        engine = {**engine, "max_model_len": length}
        rows += [["max_model_len", f"{length:,}", reason], _share(config, device, plan)]
    print(aligned(rows), file=sys.stderr, flush=True)
    return engine


def _device(config: EngineConfig) -> tuple[Device, str]:
    asked = config.runner.device
    if asked != "cpu" and torch.cuda.is_available():
        gpu = describe_gpus()[0]
        return Device(gpu.name, True, gpu.memory_bytes, 0.0, 0.0, ""), "a GPU is visible"
    why = "no GPU is visible" if asked != "cpu" else "--device cpu"
    return Device(cpu_name(), False, None, 0.0, 0.0, ""), why


def _fitting(engine: dict[str, Any], source: Source, device: Device) -> tuple[Capacity, list[str]]:
    """The plan with the most precise weights that fit, and the row that says so. ConfigError if none do."""
    given = "quantization" in engine
    try:
        plan = plan_capacity(EngineConfig.of(**engine), source, device)
        memory = device.memory if device.on_gpu else int(HOST_SHARE * available_memory())
        weights = in_bytes(plan.weights.num_bytes)
        fits = device.on_gpu or plan.server_bytes <= (memory or 0)
        if given or fits:
            why = "as given" if given else f"{weights} of weights fit in {in_bytes(memory or 0)}"
            return plan, ["quantization", plan.format_name, why]
        too_large = f"{weights} in {plan.format_name} do not fit in {in_bytes(memory or 0)}"
    except ConfigError as error:
        if given:
            raise
        too_large = str(error)
    # quantized already: other numbers would lose more, and need the whole in memory first
    if source.encodings:
        raise ConfigError(f"--auto: {too_large}: choose a smaller model or file")
    plan = plan_capacity(EngineConfig.of(**{**engine, "quantization": SMALLER}), source, device)
    return plan, ["quantization", SMALLER, too_large]


def _length(plan: Capacity, given: bool) -> tuple[int, str]:
    if given:
        return plan.max_model_len, "as given"
    if plan.pool.num_tokens >= plan.max_model_len:
        return plan.max_model_len, f"the model's context; the KV cache holds {plan.pool.num_tokens:,} tokens"
    return plan.pool.num_tokens, f"what the KV cache holds; the model's context is {plan.max_model_len:,}"


def _share(config: EngineConfig, device: Device, plan: Capacity) -> list[str]:
    pool = f"{in_bytes(plan.pool.num_bytes)} of KV cache (set by {plan.pool.limit})"
    if device.on_gpu:
        return ["memory share", f"{config.memory.gpu_memory_utilization:.0%} of the GPU", pool]
    limit = f"{CPU_POOL_SHARE:.0%} of free memory for the KV cache, at most {in_bytes(CPU_POOL_LIMIT)}"
    return ["memory share", limit, pool]

"""What a model takes of each GPU of a group, and how long its requests take there, by the simulator's cost model."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.bench.capacity import GPU_CONTEXT_BYTES
from quire.core.config import EngineConfig, ModelConfig
from quire.core.errors import ConfigError
from quire.engine.build.ranks import can_be_cut
from quire.engine.build.resolve import (
    SIMULATED,
    Precision,
    default_limits,
    resolve_max_model_len,
    resolve_precision,
)
from quire.models import registry
from quire.models.weight_shape import weight_shape
from quire.parallel.cut import cut_layers, cut_model
from quire.runner.sizing import GPU_MARGIN
from quire_lab.placement.simulate import ModelOnShape, ParallelShape
from quire_lab.simulate.build import activation_bytes, check_simulated, model_costs, open_shape
from quire_lab.simulate.cost_model import CostModel, ModelNumbers, StepCounts
from quire_lab.simulate.devices import SimulatedDevice

MAX_SLOTS = 32  # requests of a model that a group computes at once
UTILIZATION = 0.9  # of a GPU's memory, all engines on it together


@dataclass(frozen=True, slots=True)
class Sized:
    """One model with the lengths of its requests."""

    model: ModelConfig
    weight_bytes: int
    numbers: ModelNumbers
    prompt_tokens: int
    output_tokens: int
    num_batched_tokens: int
    needs_float8: bool


def size_model(settings: Mapping[str, Any], prompt_tokens: int, output_tokens: int) -> Sized:
    """`settings`: of the engine. One output token: requests of one pass, as AlpaServe has them."""
    config = EngineConfig.of(**{**settings, "device": SIMULATED})
    check_simulated(config)
    model = registry.describe(open_shape(config).config)
    if model.encoder is not None:
        raise ConfigError(f"{model.architecture} has an encoder: placement is for models that only decode")
    if prompt_tokens + output_tokens > (context := resolve_max_model_len(config, model)):
        raise ConfigError(
            f"prompt_tokens + output_tokens is {prompt_tokens + output_tokens} and the context has {context} tokens: "
            "give shorter ones"
        )
    precision: Precision = resolve_precision(
        replace(config, runner=replace(config.runner, device="meta")), model
    )
    return Sized(
        model=model,
        weight_bytes=weight_shape(model, precision.format).num_bytes,
        numbers=model_costs(model, precision, config.memory.block_size),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        num_batched_tokens=default_limits(config.scheduler, torch.device("meta"))[1],
        needs_float8=config.model.quantization == "fp8",
    )


def usable_bytes(device: SimulatedDevice) -> int:
    """Of one GPU, for all engines on it."""
    return min(int(UTILIZATION * device.memory_bytes), device.memory_bytes - GPU_MARGIN)


def held_bytes(sized: Sized, shape: ParallelShape) -> int:
    """Of each GPU without KV: weights, activations and CUDA's context. Ranks of a stage each have the token table."""
    table = sized.model.vocab_size * sized.model.hidden_size * sized.numbers.activation_bytes
    weights = (sized.weight_bytes - table) / shape.size + (table if shape.tp > 1 else table / shape.size)
    work = activation_bytes(sized.model, torch.device("meta"), MAX_SLOTS, sized.num_batched_tokens)
    return int(weights) + work // shape.tp + GPU_CONTEXT_BYTES


def request_bytes(sized: Sized, shape: ParallelShape) -> int:
    """KV of one request on each GPU. More ranks than key-value heads hold the same heads."""
    parts = min(shape.tp, sized.model.num_kv_heads) * shape.pp
    return (sized.prompt_tokens + sized.output_tokens) * sized.numbers.kv_bytes_per_token // parts


def serve(sized: Sized, device: SimulatedDevice, shape: ParallelShape) -> ModelOnShape | None:
    """None where the model cannot be cut so, does not fit, or has a number format that the GPU has not."""
    if sized.needs_float8 and not device.float8:
        return None
    if shape.size > 1:
        if not can_be_cut(sized.model.architecture) or (shape.pp > 1 and any(sized.model.windows)):
            return None
        fits = False
        with suppress(ConfigError):
            cut_model(sized.model, 0, shape.tp)
            cut_layers(sized.model, shape.pp)
            fits = True
        if not fits:
            return None
    held, each = held_bytes(sized, shape), request_bytes(sized, shape)
    slots = min(MAX_SLOTS, (usable_bytes(device) - held) // each)
    if slots < 1:
        return None
    prompt, further = sized.prompt_tokens, sized.output_tokens - 1
    counts = StepCounts(1, prompt, 1, prompt, prompt * (prompt + 1) / 2, 1)
    stage, whole = _step(sized, device, shape, counts)
    steps = tuple(_decode(sized, device, shape, 1 + n) for n in range(slots if further else 0))
    lone = whole + (further * steps[0][0] if further else 0.0)
    return ModelOnShape(held + slots * each, stage, further, steps, lone)


def _decode(
    sized: Sized, device: SimulatedDevice, shape: ParallelShape, num_open: int
) -> tuple[float, float]:
    """Of a token for each open request: seconds until all have it, and seconds of one stage."""
    rows = -(-num_open // shape.pp)
    context = rows * (sized.prompt_tokens + sized.output_tokens // 2)
    stage, whole = _step(sized, device, shape, StepCounts(rows, rows, rows, context, context))
    return whole, -(-num_open // rows) * stage


def _step(
    sized: Sized, device: SimulatedDevice, shape: ParallelShape, counts: StepCounts
) -> tuple[float, float]:
    """Of the slowest stage, and of all one after the other."""
    numbers, rates, pp = sized.numbers, device.rates, shape.pp
    whole = CostModel(rates, device.factors, numbers, shape.tp).seconds(counts)
    if pp == 1:
        return whole, whole
    started = device.factors.step
    sent = counts.num_tokens * numbers.hidden_size * numbers.activation_bytes
    hop = started + rates.link_latency + sent / rates.link_bandwidth
    share = -(-numbers.num_layers // pp) / numbers.num_layers
    return hop + share * (whole - started), pp * hop + whole - started

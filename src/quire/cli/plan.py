"""`quire plan`: memory of a model on a device, sequences that fit, a lower bound of the step time, and cost."""

import argparse
import json
import math
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from quire.bench.capacity import (
    GPUS,
    Capacity,
    Device,
    Floor,
    GiB,
    device_of,
    find_gpu,
    floor_of,
    plan_capacity,
)
from quire.bench.machine import cpu_name, cpu_read_rate, describe_gpus
from quire.bench.table import aligned, in_bytes, in_seconds
from quire.cli import plan_sharing
from quire.cli.flags import add_engine_flags, engine_settings, parse_gigabytes
from quire.cli.parser import Parser
from quire.cli.plan_training import plan_training
from quire.cli.start import described_source
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build.resolve import is_simulated, resolve_device
from quire.models.weight_shape import WeightGroup, WeightShape

USUAL_CONTEXT = 2048
EXAMPLE = 64  # tokens of a step, to show how many experts it reads
BATCHES = (1, 8, 32, 128, 256, 512, 1024)
_NOT_PLANNED = (
    *("tokenizer", "chat_template", "served_model_name", "seed", "enforce_eager", "steps_in_flight"),
    *("batching", "batch_size", "batch_window_ms", "schedule", "max_prompt_chunk", "preset", "reservation"),
    *("pin_prefix", "weights_offload_dir"),
)


def add_arguments(parser: Parser) -> None:
    where = parser.exclusive()
    where.add_argument("--gpu", metavar="NAME", help="a GPU of the built-in table, see --list-gpus")
    where.add_argument("--memory", type=parse_gigabytes, metavar="GB", help="a GPU with this much memory")
    where.add_argument("--list-gpus", action="store_true", help="print the table of GPUs and exit")
    parser.add_argument("--bandwidth", type=parse_gigabytes, metavar="GB", help="memory bandwidth of the GPU")
    parser.add_argument("--tflops", type=float, help="dense bf16 TFLOP/s of the GPU")
    parser.add_argument(
        "--price-per-hour", type=float, help="of the device: shows what a million tokens cost"
    )
    parser.add_argument("--context", type=int, help=f"tokens of each sequence (default: {USUAL_CONTEXT})")
    parser.add_argument("--concurrency", type=int, help="sequences at once (default: a table of several)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    plan_sharing.add_arguments(parser)
    group = parser.group("training", "with --train; the model's type, or --parameters of any model")
    group.add_argument(
        "--train", action="store_true", help="memory of training by ZeRO stage, not of serving"
    )
    group.add_argument("--ranks", type=int, default=1, help="GPUs that train together (default: 1)")
    group.add_argument("--parameters", type=float, metavar="N", help="parameters of a model, such as 7.5e9")
    group.add_argument(
        "--lora-rank", type=int, help="LoRA of all linear layers (default: all parameters trained)"
    )
    group.add_argument("--qlora", action="store_true", help="with --lora-rank: base in NF4 or its own blocks")
    add_engine_flags(parser, without=_NOT_PLANNED)


def run(arguments: argparse.Namespace) -> int:
    if arguments.list_gpus:
        print(_gpu_table())
        return 0
    if plan_sharing.is_asked(arguments):
        return plan_sharing.run(arguments)
    _check(arguments)
    if arguments.train:
        return plan_training(arguments)
    config = EngineConfig.of(**engine_settings(arguments))
    device = _device(arguments, config)
    capacity = plan_capacity(config, described_source(config), device)
    context = _context(arguments, capacity)
    floors = _floors(arguments, capacity, device, context)
    if arguments.json:
        print(json.dumps(_record(capacity, device, context, floors, arguments.price_per_hour), indent=2))
    else:
        print(_text(capacity, device, context, floors, arguments.price_per_hour))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    given = "context concurrency price_per_hour bandwidth tflops memory ranks parameters lora_rank"
    for name in given.split():
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: give a number above 0")


def _device(arguments: argparse.Namespace, config: EngineConfig) -> Device:
    rate, flops = arguments.bandwidth or 0.0, (arguments.tflops or 0.0) * 1e12
    if arguments.gpu is not None:
        known = device_of(find_gpu(arguments.gpu))
        return replace(known, read_rate=rate or known.read_rate, flops=flops or known.flops)
    if arguments.memory is not None:
        on_gpu = config.runner.device != "cpu"
        name = f"a {'GPU' if on_gpu else 'machine'} with {in_bytes(arguments.memory)}"
        return Device(name, on_gpu, arguments.memory, rate, flops, "as given")
    if is_simulated(config.runner.device):
        raise ConfigError(f"--device {config.runner.device} is not planned: name a GPU, as in --gpu h200")
    if resolve_device(config.runner.device).type == "cuda":
        return _gpu_here(rate, flops)
    rate = rate or cpu_read_rate()
    return Device(f"this machine, {cpu_name()}", False, None, rate, flops, "measured just now")


def _gpu_here(rate: float, flops: float) -> Device:
    here = describe_gpus()[0]
    source, float8 = "as PyTorch reports it", torch.cuda.get_device_capability() >= (8, 9)
    device = Device(here.name, True, here.memory_bytes, rate, flops, source, float8)
    with suppress(ConfigError):  # not in the table
        known = device_of(find_gpu(here.name))
        rate, flops = rate or known.read_rate, flops or known.flops
        device = replace(device, read_rate=rate, flops=flops, source=known.source)
    return device


def _context(arguments: argparse.Namespace, capacity: Capacity) -> int:
    most = capacity.max_model_len
    context = arguments.context or min(USUAL_CONTEXT, most)
    if context > most:
        raise ConfigError(f"--context {context} is more than the model's {most} tokens: lower it")
    return context


def _floors(arguments: argparse.Namespace, capacity: Capacity, device: Device, context: int) -> list[Floor]:
    if not device.read_rate:
        return []
    fits = capacity.sequences_of(context)
    wanted = [arguments.concurrency] if arguments.concurrency else [n for n in BATCHES if n < fits] + [fits]
    if arguments.concurrency and arguments.concurrency > fits:
        note = f"only {fits} sequences of {context} tokens fit at once; more would wait"
        print(f"quire: note: {note}", file=sys.stderr)
    return [floor_of(capacity, device, context, count) for count in wanted if count > 0]


def _parameters(weights: WeightShape) -> str:
    total = f"{weights.num_parameters / 1e6:,.0f} M parameters"
    if weights.experts is None:
        return total
    active, experts = weights.active_parameters / 1e6, weights.experts
    return f"{total}, {active:,.0f} M active ({experts.top_k} of {experts.num_experts} experts per token)"


def _read(weights: WeightShape) -> str:
    if weights.encoder_bytes:
        return f"{in_bytes(weights.read_bytes)}, and {in_bytes(weights.encoder_bytes)} of the encoder for prompts"
    if weights.experts is None:
        return in_bytes(weights.read_bytes)
    some = in_bytes(weights.bytes_read(EXAMPLE))
    return f"{in_bytes(weights.read_bytes)} for one token, {some} for {EXAMPLE}"


def _cross(capacity: Capacity) -> str:
    if capacity.model.encoder is None:
        return ""
    return ": of the prompt for cross-attention, in whole blocks, and of the answer for its own"


def _text(capacity: Capacity, device: Device, context: int, floors: list[Floor], price: float | None) -> str:
    weights, pool = capacity.weights, capacity.pool
    fits = capacity.sequences_of(context)
    limit = f" (limited by max_num_seqs={capacity.max_num_seqs})" if fits == capacity.max_num_seqs else ""
    lines = [
        ["model", f"{capacity.model_name}: {_parameters(weights)}, {capacity.format_name}"],
        ["device", f"{device.name} ({device.source})"],
        ["weights", f"{in_bytes(weights.num_bytes)}, {8 * weights.num_bytes / weights.num_parameters:.2f} bits for "
         f"each parameter; a step reads {_read(weights)}"],
        *([" ", line] for line in _group_lines(weights.groups)),
        *_expert_rows(capacity, device),
        ["kv cache", f"{in_bytes(capacity.kv_bytes_per_token)} a token in {pool.dtype}{pool.groups_in_words}"
         f"{_cross(capacity)}"],
        ["pool", f"{in_bytes(pool.num_bytes)}: {pool.num_blocks:,} blocks of {pool.block_size} tokens (set by "
         f"{pool.limit})"],
        ["fits", f"{pool.num_tokens:,} tokens: {fits:,} sequences of {context:,}{limit}"],
    ]  # fmt: skip
    if not device.on_gpu and not capacity.is_rank:
        lines.append([
            "memory",
            f"{in_bytes(capacity.server_bytes)} of a server whose pool is full: weights, pool, "
            f"{in_bytes(capacity.engine_bytes)} of the engine process and {in_bytes(capacity.http_bytes)} of HTTP",
        ])  # fmt: skip
    text = aligned(lines)
    if not floors:
        return f"{text}\n\nno floor: the read rate is not known, give --bandwidth"
    header = ["sequences", "a token each", "tokens/s", "bound by", *(["cost of 1M tokens"] if price else [])]
    rows = [_floor_row(floor, price) for floor in floors]
    table = aligned([header, *rows], right=(0, 1, 2, 4))
    return f"{text}\n\nat best, from {in_bytes(device.read_rate)}/s, with {context:,} tokens each:\n{table}"


def _expert_rows(capacity: Capacity, device: Device) -> list[list[str]]:
    experts = capacity.weights.experts
    if experts is None or capacity.num_resident is None:
        return []
    where = "in pinned host memory" if device.on_gpu else "on disk"
    return [[
        "experts",
        f"{capacity.num_resident} of {experts.num_experts} in each of {experts.num_layers} layers stay, the most "
        f"used; {in_bytes(capacity.away_bytes)} of others {where}: reading those is not in the times below",
    ]]  # fmt: skip


def _group_lines(groups: tuple[WeightGroup, ...]) -> list[str]:
    """How each part is stored, and what stayed precise."""
    rows = [[one.part, one.scheme, f"{one.bits:.2f} bits", in_bytes(one.num_bytes)] for one in groups]
    precise = [group for group in groups if group.is_precise]
    if len(precise) == len(groups):
        kept = "everything, nothing is quantized"
    else:
        kept = ", ".join(f"{group.part} ({group.scheme})" for group in precise) or "nothing"
    return [*aligned(rows, right=(2, 3)).splitlines(), f"kept precise: {kept}"]


def _floor_row(floor: Floor, price: float | None) -> list[str]:
    count, rate = f"{floor.num_sequences:,}", f"{floor.tokens_per_second:,.0f}"
    row = [count, in_seconds(floor.step_seconds), rate, floor.bound]
    return [*row, f"{floor.cost_per_million(price):.4f}"] if price else row


def _record(
    capacity: Capacity, device: Device, context: int, floors: list[Floor], price: float | None
) -> dict[str, Any]:
    pool, weights = capacity.pool, capacity.weights
    groups = [
        {**asdict(group), "bits": group.bits, "is_precise": group.is_precise} for group in weights.groups
    ]
    return {
        "model": capacity.model_name,
        "format": capacity.format_name,
        "device": asdict(device),
        "weights": {**asdict(weights), "groups": groups},
        "num_resident_experts": capacity.num_resident,
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "kv_dtype": capacity.kv_dtype,
        "pool": {**asdict(pool), "num_bytes": pool.num_bytes, "num_tokens": pool.num_tokens},
        "server_bytes": None if device.on_gpu or capacity.is_rank else capacity.server_bytes,
        "context": context,
        "sequences": capacity.sequences_of(context),
        "max_model_len": capacity.max_model_len,
        "max_num_seqs": capacity.max_num_seqs,
        "floors": [
            {
                "sequences": floor.num_sequences, "seconds_per_token": floor.step_seconds,
                "tokens_per_second": floor.tokens_per_second, "bound": floor.bound,
                "cost_per_million_tokens": floor.cost_per_million(price) if price else None,
            }
            for floor in floors
        ],
    }  # fmt: skip


def _gpu_table() -> str:
    header = ["gpu", "memory", "bandwidth", "bf16 TFLOP/s", "source"]
    rows = [
        [gpu.name, f"{gpu.memory / GiB:.1f} GiB", f"{in_bytes(gpu.bandwidth)}/s", f"{gpu.flops / 1e12:.0f}", gpu.source]
        for gpu in GPUS
    ]  # fmt: skip
    return aligned([header, *rows], right=(1, 2, 3))

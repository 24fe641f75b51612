"""`quire plan --train`: parameters, gradients and optimizer states of each rank, for every ZeRO stage."""

import argparse
import json
import math
from dataclasses import asdict

import torch

from quire.bench.capacity import GPUS, find_gpu
from quire.bench.table import aligned, in_bytes
from quire.cli.flags import engine_settings
from quire.cli.start import described_source
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.layers.linear import HEAD
from quire.layers.lora import install_sites
from quire.models.registry import describe
from quire.models.weight_shape import META, sized_model
from quire.quant.full import FullPrecision
from quire.train.zero import StageMemory, full_training, lora_training

NF4_BITS = 4.127  # with double quantization: 4 + 8 / 64 + 32 / (64 * 256)
HALF_BITS = 16
WHAT = ("nothing", "optimizer states", "and gradients", "and parameters")


def plan_training(arguments: argparse.Namespace) -> int:
    ranks, rank = arguments.ranks, arguments.lora_rank
    if arguments.qlora and rank is None:
        raise ConfigError("--qlora is the base of a LoRA: add --lora-rank")
    if arguments.parameters is not None:
        if rank is not None:
            raise ConfigError("--lora-rank needs the shapes of a model: name it, and leave out --parameters")
        count, trained, name = int(arguments.parameters), int(arguments.parameters), "a model"
        stages = full_training(count, ranks)
    else:
        count, linear, trained, name = _shapes(arguments, rank or 0)
        bits = NF4_BITS if arguments.qlora else HALF_BITS
        base = (linear * bits + (count - linear) * HALF_BITS) / 8
        stages = full_training(count, ranks) if rank is None else lora_training(base, trained, ranks)
        trained = count if rank is None else trained
    if arguments.json:
        record = {"model": name, "parameters": count, "trained": trained, "ranks": ranks}
        print(json.dumps({**record, "stages": [{**asdict(s), "total": s.total} for s in stages]}, indent=2))
        return 0
    how = f"LoRA of rank {rank}, the base in {'NF4' if arguments.qlora else 'bfloat16'}"
    how = "Adam in mixed precision" if rank is None else how
    print(f"{name}: {count / 1e9:,.2f}B parameters, {trained / 1e6:,.1f}M trained, {how}, {ranks} ranks")
    print(_table(stages))
    print(_fits(stages, arguments))
    print(
        "activations come on top: they grow with the tokens of a batch, less so with --gradient-checkpointing"
    )
    return 0


def _shapes(arguments: argparse.Namespace, rank: int) -> tuple[int, int, int, str]:
    """Numbers of parameters: in all, of linear layers, and trained by LoRA; and the model's name."""
    config = EngineConfig.of(**engine_settings(arguments))
    source = described_source(config)
    model = describe(source.config)
    built = sized_model(model, FullPrecision(torch.float16, META))
    loaders = built.loaders()
    sites = [s for s in install_sites(loaders, None) if not s.is_embedding and s.name != HEAD]  # type: ignore[arg-type]
    trained = sum(rank * (site.num_inputs + site.num_outputs) for site in sites)
    count = sum(math.prod(loader.shape) for loader in loaders.values())
    return count, sum(site.num_inputs * site.num_outputs for site in sites), trained, source.name


def _table(stages: tuple[StageMemory, ...]) -> str:
    header = ["ZeRO stage", "divided", "parameters", "gradients", "optimizer", "a rank", "saved"]
    rows = [
        [
            str(stage.stage), WHAT[stage.stage],
            *(in_bytes(part) for part in (stage.parameters, stage.gradients, stage.optimizer, stage.total)),
            f"{100 * (1 - stage.total / stages[0].total):.1f} %",
        ]
        for stage in stages
    ]  # fmt: skip
    return aligned([header, *rows], right=(2, 3, 4, 5, 6))


def _fits(stages: tuple[StageMemory, ...], arguments: argparse.Namespace) -> str:
    """On the card that was asked for, or on those of the table."""
    cards = [find_gpu(arguments.gpu)] if arguments.gpu else GPUS
    lines = []
    for card in cards:
        fitting = next((stage.stage for stage in stages if stage.total < 0.9 * card.memory), None)
        lines.append([card.name, "does not fit" if fitting is None else f"fits from stage {fitting} on"])
    return aligned(lines)

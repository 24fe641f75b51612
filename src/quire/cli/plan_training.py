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
from quire.train.finetune import QLORA_BITS
from quire.train.zero import StageMemory, full_training, lora_training

NF4_BITS = 4.25  # with double quantization, as a GPU's kernel packs it
HALF_BITS, TABLE_BITS, SCALE_BITS = 16, 8, 32
WHAT = ("nothing", "optimizer states", "and gradients", "and parameters")


def plan_training(arguments: argparse.Namespace) -> int:
    ranks, rank, qlora = arguments.ranks, arguments.lora_rank, False
    if arguments.qlora and rank is None:
        raise ConfigError("--qlora is the base of a LoRA: add --lora-rank")
    if arguments.parameters is not None:
        if rank is not None:
            raise ConfigError("--lora-rank needs the shapes of a model: name it, and leave out --parameters")
        count, trained, name = int(arguments.parameters), int(arguments.parameters), "a model"
        stages = full_training(count, ranks)
    else:
        count, base, kept, trained, name, qlora = _shapes(arguments, rank or 0)
        stages = full_training(count, ranks) if rank is None else lora_training(base, trained, ranks)
        stages = stages[:3] if qlora else stages  # finetune refuses stage 3
        trained = count if rank is None else trained
    if arguments.json:
        record = {"model": name, "parameters": count, "trained": trained, "ranks": ranks}
        print(json.dumps({**record, "stages": [{**asdict(s), "total": s.total} for s in stages]}, indent=2))
        return 0
    how = "Adam in mixed precision" if rank is None else f"LoRA of rank {rank}, the base in {kept}"
    print(f"{name}: {count / 1e9:,.2f}B parameters, {trained / 1e6:,.1f}M trained, {how}, {ranks} ranks")
    print(_table(stages))
    if qlora:
        print("stage 3 is left out: it divides a base in full precision only, not one in few bits")
    print(_fits(stages, arguments))
    print("activations come on top: they grow with a batch's tokens, less so with --gradient-checkpointing")
    return 0


def _shapes(arguments: argparse.Namespace, rank: int) -> tuple[int, float, str, int, str, bool]:
    """Parameters; bytes of a frozen base, and its linear layers' form; parameters trained by LoRA; the model's name;
    whether LoRA is QLoRA, which it is by itself for a checkpoint in few bits.
    """
    config = EngineConfig.of(**engine_settings(arguments))
    source = described_source(config)
    model = describe(source.config)
    built = sized_model(model, FullPrecision(torch.float16, META))
    loaders = built.loaders()
    installed = install_sites(loaders, None)  # type: ignore[arg-type]
    sites = [site for site in installed if not site.is_embedding and site.name != HEAD]
    trained = sum(rank * (site.num_inputs + site.num_outputs) for site in sites)
    count = sum(math.prod(loader.shape) for loader in loaders.values())
    qlora = rank > 0 and (arguments.qlora or source.min_bits < QLORA_BITS)
    encodings = source.encodings if qlora else {}  # finetune keeps a checkpoint's own blocks
    usual = (NF4_BITS, "NF4") if qlora else (float(HALF_BITS), "bfloat16")
    kept = [encodings.get(f"{site.name}.weight") for site in sites]
    forms = [usual if encoded is None else (encoded.bits, encoded.scheme.name) for encoded in kept]
    sizes = [site.num_inputs * site.num_outputs for site in sites]
    bits = (count - sum(sizes)) * HALF_BITS + sum(n * each for n, (each, _) in zip(sizes, forms, strict=True))
    if qlora:  # finetune keeps tables and the head in int8 on a GPU, with a scale for each row
        names = {f"{site.name}.weight" for site in installed} - {f"{site.name}.weight" for site in sites}
        for rows, width in (loaders[name].shape for name in names & loaders.keys()):
            bits -= rows * ((HALF_BITS - TABLE_BITS) * width - SCALE_BITS)
    return count, bits / 8, ", ".join(sorted({form for _, form in forms})), trained, source.name, qlora


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

"""Random adapters on disk for an experiment: a few files, and hard links to them under thousands of names."""

import json
import os
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.engine.engine import Engine

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "c_attn")


def write_adapters(folder: Path, engine: Engine, count: int, ranks: tuple[int, ...], name: str) -> list[str]:
    """Adapters of these ranks in turn on the projections of attention; their names."""
    assert engine.adapters is not None
    sites = [site for site in engine.adapters.library.sites if site.part in ATTENTION]
    names = [f"{name}-{index}" for index in range(count)]
    generator = torch.Generator().manual_seed(0)
    for index, one in enumerate(names):
        rank = ranks[index % len(ranks)]
        target = folder / one
        target.mkdir()
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
        settings["target_modules"] = sorted({site.part for site in sites})
        (target / "adapter_config.json").write_text(json.dumps(settings))
        if index >= len(ranks):
            os.link(
                folder / names[index % len(ranks)] / "adapter_model.safetensors",
                target / "adapter_model.safetensors",
            )
            continue
        tensors = {}
        for site in sites:
            prefix = f"base_model.model.{site.name}"
            a = torch.randn(rank, site.num_in, generator=generator) * site.num_in**-0.5
            tensors[f"{prefix}.lora_A.weight"] = a.to(torch.bfloat16)
            b = torch.randn(site.num_out, rank, generator=generator) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = b.to(torch.bfloat16)
        save_file(tensors, target / "adapter_model.safetensors")
    return names


def draw(names: list[str], count: int, exponent: float, seed: int) -> list[str]:
    """A name for each request: the i-th is drawn in proportion to i ** -exponent."""
    weights = [(place + 1) ** -exponent for place in range(len(names))]
    return random.Random(seed).choices(names, weights, k=count)

"""Bytes that one rank of a large group moves in a step, counted by a group without other ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.kernels import choose
from quire.kernels.lora.records import LoraSegments, LoraTables
from quire.layers.factory import LayerFactory, RankPart
from quire.layers.lora import LoraBatch, install_sites
from quire.layers.parameters import Loader
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.models.registry import describe
from quire.parallel.cut import cut_model, divided
from quire.parallel.group import Group
from quire.weights.cut import CutSource
from quire.weights.source import DummySource
from tests.adapters.making import LLAMA_SHAPE
from tests.models.paging import Pages

SHAPE = {
    **LLAMA_SHAPE,
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 96,
}
HIDDEN, VOCABULARY, LAYERS = 64, 96, 2


def _part(folder: Path, rank: int, size: int) -> tuple[DecoderModel, RankPart]:
    """The model of one rank, and what it is of the whole."""
    (folder / "config.json").write_text(json.dumps(SHAPE))
    source = DummySource(folder)
    whole = describe(source.config)
    part = RankPart(cut_model(whole, rank, size), Group(rank, size))
    factory = LayerFactory(LayerFactory.of(whole, quantization="none").number_format, "cpu", None, part)
    return load(CutSource(source, part.cut), factory, config=part.cut.local), part


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 24])
def test_a_step_moves_what_the_formulas_say(size, tokens, tmp_path):
    for rank in (0, size - 1):
        model, part = _part(tmp_path, rank, size)
        pages = Pages(model, [tokens], 4)
        model.logits(model(pages.batch([(0, 0, list(range(1, tokens + 1)))]), pages.pool))
        joined = 2 * (size - 1) * LAYERS * tokens * HIDDEN * 4 // size
        assert part.group.traffic() == {
            ("all_reduce", "attention"): joined,
            ("all_reduce", "mlp"): joined,
            ("gather", "logits"): (size - 1) * tokens * VOCABULARY * 4 // size,
        }


def _adapters(
    loaders: dict[str, Loader], part: RankPart, lora_ranks: tuple[int, ...], tokens: int
) -> LoraBatch:
    """Adapters of zeros that are divided among the ranks; each has as many rows of the batch."""
    rank, size = part.group.rank, part.group.size
    sites = install_sites(loaders, choose("lora", "cpu"), part.cut, part.group)
    tables = LoraTables.empty(torch.zeros(1 << 12), len(lora_ranks), 2 * len(sites))
    for site in sites:
        if ".layers." not in site.name:
            continue
        joins = site.name.endswith(("o_proj", "down_proj"))
        for slot, lora_rank in enumerate(lora_ranks):
            first, last = list(divided(lora_rank, size))[rank]
            tables.ranks[slot, 2 * site.index] = lora_rank if joins else last - first
            tables.ranks[slot, 2 * site.index + 1] = lora_rank
    tables.tile_ranks.fill_(16)
    each = tokens // len(lora_ranks)
    starts = torch.arange(len(lora_ranks) + 1, dtype=torch.int32) * each
    slots = torch.arange(len(lora_ranks), dtype=torch.int32)
    segments = LoraSegments(torch.arange(tokens, dtype=torch.int32), slots, starts, each)
    return LoraBatch(tables, segments, -1)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_adapters_that_are_divided_among_ranks_move_the_bytes_of_the_paper(size, tmp_path):
    tokens, lora_ranks = 24, (8, 5)  # rows are shared equally
    total = tokens // 2 * sum(lora_ranks) * LAYERS * 4  # B·r of all layers, in bytes
    for rank in (0, size - 1):
        model, part = _part(tmp_path, rank, size)
        lora = _adapters(model.loaders(), part, lora_ranks, tokens)
        pages = Pages(model, [tokens], 4)
        model(
            replace(pages.batch([(0, 0, list(range(1, tokens + 1)))]), lora=lora, wanted_lora=lora),
            pages.pool,
        )
        moved = part.group.traffic()
        assert moved["all_gather", "lora attention"] == 3 * (size - 1) * total // size
        assert moved["all_reduce", "lora attention"] == 2 * (size - 1) * total // size
        assert moved["all_gather", "lora mlp"] == 2 * (size - 1) * total // size
        assert moved["all_reduce", "lora mlp"] == 2 * (size - 1) * total // size

"""Adapters in layers: every architecture's sites, mixes in one batch, and nothing for lines that have none."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels import choose
from quire.kernels.lora.records import LoraSegments, LoraTables
from quire.kernels.lora.reference import matrices
from quire.kernels.native import Tape
from quire.layers.batch import Batch
from quire.layers.factory import LayerFactory
from quire.layers.lora import LoraBatch, LoraSite, group_by_adapter, install_sites, max_segments
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.models.registry import describe
from quire.weights.folder import FolderSource
from tests.models.checkpoints import VARIANTS, llama, prompts, reference_logits, save
from tests.models.paging import Pages, only_native

Slots = Sequence[int]
MLP = ("gate_proj", "up_proj", "down_proj")


def open_adaptable(
    folder: Path, quantization: str, dtype: str = "auto"
) -> tuple[DecoderModel, tuple[LoraSite, ...]]:
    source = FolderSource(folder)
    factory = LayerFactory.of(describe(source.config), dtype=dtype, quantization=quantization)
    model = load(source, factory)
    return model, install_sites(model.loaders(), factory.kernel("lora"))


def random_adapters(
    sites: Sequence[LoraSite], ranks: Sequence[int], without: Sequence[str] = ()
) -> LoraTables:
    """One adapter per rank, on every site but those whose name ends like one of `without`."""
    generator = torch.Generator().manual_seed(3)
    tables = LoraTables.empty(torch.empty(0), len(ranks), len(sites), 3)
    pieces, used = [], 0
    for slot, rank in enumerate(ranks):
        for site in sites:
            if site.name.endswith(tuple(without)):
                continue
            tables.ranks[slot, site.index], tables.tile_ranks[slot, site.index] = rank, 16
            tables.scales[slot, site.index] = 2.0
            for starts, width in ((tables.tile_a, site.num_inputs), (tables.tile_b, site.num_outputs)):
                for tile, first in enumerate(range(0, rank, 16)):
                    size = min(16, rank - first) * width
                    starts[slot, site.index, tile] = used
                    pieces.append(torch.randn(size, generator=generator).mul_(0.15))
                    used += size
    return replace(tables, weights=torch.cat(pieces))


def lora_batch(tables: LoraTables, line_slots: Slots, sites: Sequence[LoraSite]) -> LoraBatch:
    grouped = group_by_adapter(np.array(line_slots, np.int32), 16)
    segments = LoraSegments(*map(torch.from_numpy, (grouped.order, grouped.slots, grouped.starts)), 16)
    present = (tables.ranks > 0).any(0).tolist()
    return LoraBatch(tables, segments, sum({1 << site.kind for site in sites if present[site.index]}))


def with_lora(batch: Batch, line_slots: Slots, tables: LoraTables, sites: Sequence[LoraSite]) -> Batch:
    lora = lora_batch(tables, line_slots, sites)
    return replace(batch, lora=lora, wanted_lora=lora)


def run(
    model: DecoderModel, texts: list[list[int]], slots: Slots, tables: LoraTables, sites: Sequence[LoraSite]
) -> list[Tensor]:
    """Logits of every token: all texts in one batch, then their last tokens once more as decodes."""
    pages = Pages(model, [len(text) for text in texts], 4)
    prompt = pages.batch([(i, 0, text[:-1]) for i, text in enumerate(texts)])
    decode = pages.batch([(i, len(text) - 1, text[-1:]) for i, text in enumerate(texts)])
    with torch.inference_mode():
        lines = [slot for slot, text in zip(slots, texts, strict=True) for _ in text[:-1]]
        first = with_lora(prompt, lines, tables, sites)
        last = with_lora(decode, slots, tables, sites)
        logits = model.logits(model(first, pages.pool), first.lora)
        ends = model.logits(model(last, pages.pool), last.lora)
    parts = logits.split([len(text) - 1 for text in texts])
    return [torch.cat((part, end)) for part, end in zip(parts, ends.unsqueeze(1), strict=True)]


def merge(model: Any, tables: LoraTables, slot: int, sites: Sequence[LoraSite]) -> None:
    """Adds one adapter to the weights of a transformers model."""
    weights = dict(model.named_parameters())
    for site in sites:
        a, b = matrices(tables, slot, site.index, site.num_inputs, site.num_outputs)
        delta = float(tables.scales[slot, site.index]) * b.t() @ a
        weight = weights.get(f"{site.name}.weight")
        if len(a) and weight is not None:
            fits = weight.shape == delta.shape and not site.is_embedding and "c_" not in site.name
            weight.data += delta if fits else delta.t()


@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "llama-tied",
        "llama-gelu-tanh",
        "mistral-window",
        "qwen2",
        "qwen3",
        "opt-gelu-untied",
        "opt-350m",
        "gpt2",
    ],
)
def test_a_mix_of_adapters_equals_each_merged(variant: str, tmp_path: Path) -> None:
    config = VARIANTS[variant]()
    save(tmp_path, config)
    model, sites = open_adaptable(tmp_path, "none")
    # where head and embedding are one weight, merging into one would change the other
    without = ("lm_head", "embed_tokens", "wte") if config.tie_word_embeddings else ()
    tables = random_adapters(sites, [5, 33], without)
    texts, slots = prompts(19, 7, 12, 9), [0, -1, 1, 0]
    found = run(model, texts, slots, tables, sites)
    for slot in (-1, 0, 1):
        merged = save(tmp_path / f"{slot}", config)
        if slot >= 0:
            merge(merged, tables, slot, sites)
        for text, wanted, logits in zip(texts, slots, found, strict=True):
            if wanted == slot:
                torch.testing.assert_close(logits, reference_logits(merged, text), rtol=1e-3, atol=1e-3)


def test_tied_embeddings_have_two_sites(tmp_path: Path) -> None:
    save(tmp_path, llama(tie_word_embeddings=True))
    _, sites = open_adaptable(tmp_path, "none")
    names = {site.name: site for site in sites}
    assert names["lm_head"].kind != names["model.embed_tokens"].kind
    assert names["model.embed_tokens"].is_embedding
    assert not names["lm_head"].is_embedding
    assert [site.index for site in sites] == list(range(len(sites)))


def test_parts_of_a_fused_projection_are_one_kind(tmp_path: Path) -> None:
    save(tmp_path, llama())
    _, sites = open_adaptable(tmp_path, "none")
    kinds = {site.name.rpartition(".")[2]: site.kind for site in sites}
    assert kinds["q_proj"] == kinds["k_proj"] == kinds["v_proj"]
    assert kinds["gate_proj"] == kinds["up_proj"]
    assert len(set(kinds.values())) == 6


@only_native
@pytest.mark.parametrize("quantized", ["awq", "bnb-nf4-nested", "ct-fp8-block"])
def test_adapters_add_to_quantized_weights(quantized: str) -> None:
    """As they add to the same weights decoded."""
    folder = Path(__file__).parents[1] / "data" / "quantized" / quantized
    texts, slots = prompts(19, 7, 12), [0, -1, 1]
    (kept, sites), (decoded, same) = (open_adaptable(folder, q, "float32") for q in ("auto", "none"))
    tables = random_adapters(sites, [5, 33])
    right = run(decoded, texts, slots, tables, same)
    for found, expected in zip(run(kept, texts, slots, tables, sites), right, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("without", [(), MLP], ids=["everywhere", "attention"])
def test_a_lines_bits_do_not_depend_on_its_neighbours(without: tuple[str, ...], tmp_path: Path) -> None:
    save(tmp_path, llama())
    model, sites = open_adaptable(tmp_path, "int8")
    tables = random_adapters(sites, [5, 33, 16], without)
    texts, slots = prompts(19, 7, 23, 9, 30), [0, -1, 1, 0, 2]
    together = run(model, texts, slots, tables, sites)
    for text, slot, logits in zip(texts, slots, together, strict=True):
        assert torch.equal(run(model, [text], [slot], tables, sites)[0], logits)


@only_native
def test_a_recorded_pass_reads_adapters_anew(tmp_path: Path) -> None:
    save(tmp_path, llama())
    model, sites = open_adaptable(tmp_path, "int8")
    tables = random_adapters(sites, [5, 20])
    pages = Pages(model, [9, 9], 4)
    with torch.inference_mode():
        model(pages.batch([(0, 0, [1, 2, 3]), (1, 0, [4, 5, 6])]), pages.pool)
        batch = with_lora(pages.batch([(0, 3, [7]), (1, 3, [8])]), [0, 1], tables, sites)
        with Tape() as tape:
            first = model.logits(model(batch, pages.pool), batch.lora).clone()
            logits = model.logits(model(batch, pages.pool), batch.lora)
        assert batch.lora is not None
        batch.lora.segments.slots.copy_(torch.tensor([1, 0], dtype=torch.int32))
        tape.replay()
        swapped = with_lora(batch, [1, 0], tables, sites)
        expected = model.logits(model(swapped, pages.pool), swapped.lora)
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, first)


def test_grouping_keeps_order_and_cuts_long_runs() -> None:
    slots = np.array([2, -1, 0, 2, 2, -1, 2, 0], np.int32)
    grouped = group_by_adapter(slots, 3)
    assert grouped.slots.tolist() == [0, 2, 2]
    assert grouped.starts.tolist() == [0, 2, 5, 6]
    assert grouped.order.tolist()[:6] == [2, 7, 0, 3, 4, 6]
    assert sorted(grouped.order.tolist()) == list(range(8))
    nobody = group_by_adapter(np.full(3, -1, np.int32), 16)
    assert (nobody.slots.tolist(), nobody.starts.tolist()) == ([], [0])


@pytest.mark.parametrize("seed", range(5))
def test_no_batch_has_more_segments_than_promised(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for num_lines in (1, 5, 40, 130):
        slots = draw.integers(-1, 7, num_lines).astype(np.int32)
        assert len(group_by_adapter(slots, 16).slots) <= max_segments(num_lines, 7, 16)


def test_the_kernel_is_chosen_by_device() -> None:
    assert choose("lora", "cpu").__name__.rpartition(".")[2] in ("cpu", "reference")

"""Steps of a llama in int8 can be recorded once and replayed with other tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.kernels.native import Tape
from quire.layers.batch import Batch
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.registry import describe
from quire.runner.cpu import MAX_PROMPT_TOKENS, Tapes
from quire.weights.folder import FolderSource
from tests.models.checkpoints import VARIANTS, prompts, save
from tests.models.paging import Pages, only_native


@only_native
@pytest.mark.parametrize(
    "variant",
    [
        "llama-tied", "llama-with-biases", "llama-gelu", "llama-gelu-tanh", "mistral-window", "qwen2", "qwen3",
        "phi3", "granite", "olmo2", "smollm3", "gemma3", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe",
    ],
)  # fmt: skip
def test_a_replayed_step_gives_the_bits_of_an_eager_one(
    variant: str, tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", VARIANTS[variant]())
    source = FolderSource(tmp_path / "model")
    model = load(source, LayerFactory.of(describe(source.config)))
    assert model.recordable
    one, other = prompts(14, 14)
    eager, taped = Pages(model, [14, 14], 4), Pages(model, [14, 14], 4)
    for pages in (eager, taped):
        model(pages.batch([(0, 0, one[:9]), (1, 0, other[:9])]), pages.pool)
    step = taped.batch([(0, 9, one[9:10]), (1, 9, other[9:10])])
    with Tape() as tape:
        replayed = model.logits(model(step, taped.pool))
    for position in range(9, 14):
        batch = eager.batch([(0, position, [one[position]]), (1, position, [other[position]])])
        expected = model.logits(model(batch, eager.pool))
        for name in ("token_ids", "positions", "slots", "context_lens"):
            getattr(step, name).copy_(getattr(batch, name))
        tape.replay()
        assert torch.equal(replayed, expected)


@only_native
def test_a_chunk_of_a_prompt_beside_a_decode_is_recorded_when_its_shape_comes_again(
    tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", VARIANTS["llama-tied"]())
    source = FolderSource(tmp_path / "model")
    model = load(source, LayerFactory.of(describe(source.config)))
    one, other = prompts(40, 40)
    eager, taped = Pages(model, [40, 40], 4), Pages(model, [40, 40], 4)
    for pages in (eager, taped):
        model(pages.batch([(0, 0, one[:30])]), pages.pool)
    tapes = Tapes(model, taped.pool)
    recorded: Batch | None = None
    for turn in range(4):
        steps = [(0, 30 + turn, [one[30 + turn]]), (1, 8 * turn, other[8 * turn : 8 * turn + 8])]
        expected_batch, batch = (
            replace(pages.batch(steps), logits_indices=torch.tensor([0])) for pages in (eager, taped)
        )
        expected = model.logits(model(expected_batch, eager.pool))
        if turn == 0:
            assert tapes.logits(batch, all_sampled=False) is None, "it has not come before"
            model(batch, taped.pool)
            continue
        if recorded is None:
            recorded = batch
        for name in ("token_ids", "positions", "slots", "context_lens", "query_starts", "logits_indices"):
            getattr(recorded, name).copy_(getattr(batch, name))
        logits = tapes.logits(recorded, all_sampled=False)
        assert logits is not None
        assert torch.equal(logits, expected)


@only_native
@pytest.mark.parametrize(("num_tokens", "wanted"), [(MAX_PROMPT_TOKENS + 1, [0]), (8, [])])
def test_long_chunks_and_chunks_without_a_sample_are_not_recorded(
    num_tokens: int, wanted: list[int], tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", VARIANTS["llama-tied"]())
    source = FolderSource(tmp_path / "model")
    model = load(source, LayerFactory.of(describe(source.config)))
    pages = Pages(model, [num_tokens], 4)
    batch = pages.batch([(0, 0, [5] * num_tokens)])
    batch = replace(batch, logits_indices=torch.tensor(wanted, dtype=torch.int64))
    tapes = Tapes(model, pages.pool)
    assert [tapes.logits(batch, all_sampled=False) for _ in range(3)] == [None] * 3

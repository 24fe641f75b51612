"""A decode step of a llama in int8 can be recorded once and replayed with other tokens."""

from pathlib import Path

import pytest
import torch

from quire.kernels.native import Tape
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.registry import describe
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

"""Bytes that one rank of a large group moves in a step, counted by a group without other ranks."""

import json

import pytest

from quire.layers.factory import LayerFactory, RankPart
from quire.models.loading import load
from quire.models.registry import describe
from quire.parallel.cut import cut_model
from quire.parallel.group import FakeGroup
from quire.weights.source import CutSource, DummySource
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


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 24])
def test_a_step_moves_what_the_formulas_say(size, tokens, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    source = DummySource(tmp_path)
    whole = describe(source.config)
    base = LayerFactory.of(whole, quantization="none")
    for rank in (0, size - 1):
        part = RankPart(cut_model(whole, rank, size), FakeGroup(rank, size))
        factory = LayerFactory(base.number_format, "cpu", None, part)
        model = load(CutSource(source, part.cut), factory, config=part.cut.local)
        pages = Pages(model, [tokens], 4)
        model.logits(model(pages.batch([(0, 0, list(range(1, tokens + 1)))]), pages.pool))
        joined = 2 * (size - 1) * LAYERS * tokens * HIDDEN * 4 // size
        assert part.group.traffic() == {
            ("all_reduce", "attention"): joined,
            ("all_reduce", "mlp"): joined,
            ("gather", "logits"): (size - 1) * tokens * VOCABULARY * 4 // size,
        }

"""The rotary table has transformers' values, bit for bit, for every rope type that we serve."""

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.core.errors import ModelError
from quire.layers.rope import position_limit, rotary_table

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}


@pytest.mark.parametrize("theta", [10000.0, 500000])
@pytest.mark.parametrize("rope_type", ROPES)
def test_the_table_is_that_of_transformers(rope_type: str, theta: float) -> None:
    parameters = {"rope_type": rope_type, "rope_theta": theta, **ROPES[rope_type]}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=dict(parameters)
    )
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(2048)[None])
    table = rotary_table({"rope_parameters": parameters, "max_position_embeddings": 2048}, 64, 2048)
    assert table.dtype is torch.float32
    assert torch.equal(table[:, :32], cosines[0, :, :32])
    assert torch.equal(table[:, 32:], sines[0, :, :32])


def test_a_partial_rotation_makes_a_narrower_table() -> None:
    hf = {"rope_theta": 100.0, "partial_rotary_factor": 0.5, "max_position_embeddings": 8}
    assert rotary_table(hf, 64, 8).shape == (8, 32)


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ModelError, match=r"'linear'.*factor"):
        rotary_table({"rope_scaling": {"type": "linear"}, "max_position_embeddings": 8}, 64, 8)


def test_yarn_reaches_as_far_as_its_factor_says() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert position_limit({"rope_scaling": rope, "max_position_embeddings": 32768}) == 131072
    assert position_limit({"rope_scaling": rope, "max_position_embeddings": 131072}) == 131072
    assert position_limit({"max_position_embeddings": 2048}) == 2048

"""Encoder-decoder models as files: what is counted, kept and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire.core.errors import ModelError, WeightsError
from quire.kernels import native
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.registry import describe
from quire.models.weight_shape import weight_shape
from quire.quant.choice import choose_format
from quire.weights.architectures import SHAPES
from quire.weights.folder import FolderSource
from tests.models.seq2seq import BART, T5, VARIANTS, save

native.available()  # compiled before a test moves the cache


@pytest.mark.parametrize(
    ("name", "total"),
    [("flan-t5-small", 76_961_152), ("flan-t5-xl", 2_849_757_184), ("flan-t5-xxl", 11_135_332_352)],
)
def test_published_models_have_the_parameters_they_are_known_by(name: str, total: int) -> None:
    weights = weight_shape(describe(SHAPES[name]), choose_format("meta", "bfloat16", "none"))
    assert weights.num_parameters == total
    embedding = SHAPES[name]["d_model"] * 32128
    # the table of embeddings is read row by row; all else belongs to one of the two halves
    assert weights.read_parameters + weights.encoder_parameters == total - embedding
    assert 0.25 < weights.encoder_parameters / total < 0.5


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("variant", ["t5", "flan-untied", "bart"])
def test_what_is_counted_is_what_is_kept(
    variant: str, quantization: str, tmp_path: Path, empty_cache: Path
) -> None:
    save(tmp_path / "model", VARIANTS[variant](), untied="untied" in variant)
    source = FolderSource(tmp_path / "model")
    config = describe(source.config)
    assert config.tie_word_embeddings == ("untied" not in variant)
    factory = LayerFactory.of(config, quantization=quantization)
    model = load(source, factory)
    kept = model.parameters()
    weights = weight_shape(config, factory.number_format)
    assert weights.num_bytes == sum(tensor.nbytes for tensor in kept.values())
    tables = {name for name in kept if name.endswith("/table") and "positions" in name}
    encoder = sum(kept[name].nbytes for name in model.encoder_parameters() if name not in tables)
    assert weights.encoder_bytes == encoder > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"feed_forward_proj": "gated-swish"}, "feed_forward_proj='gated-swish'"),
        ({"relative_attention_max_distance": 3}, "relative_attention_max_distance=3"),
        ({"d_kv": 0}, "d_kv=0"),
        ({"num_layers": None}, "no num_layers"),
    ],
)
def test_a_config_of_t5_that_makes_no_sense_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        describe({"architectures": ["T5ForConditionalGeneration"], **T5, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"activation_function": "swish"}, "activation_function='swish'"),
        ({"normalize_before": True}, "normalize_before=True"),
        ({"encoder_attention_heads": 2}, "encoder_attention_heads=2"),
    ],
)
def test_a_config_of_bart_that_is_not_known_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        describe({"architectures": ["BartForConditionalGeneration"], **BART, **changes})


def test_kin_of_bart_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="MBartForConditionalGeneration is not known: the nearest is Bart"):
        describe({"architectures": ["MBartForConditionalGeneration"], **BART})


def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    save(tmp_path, VARIANTS["flan-untied"](), untied=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "decoder.block.1.layer.1.EncDecAttention.k.weight"
    config = json.loads((tmp_path / "config.json").read_text())

    def loaded() -> Any:
        source = FolderSource(tmp_path)
        return load(source, LayerFactory.of(describe(source.config), quantization="none"))

    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(WeightsError, match=f"tensors are missing from the weights: {name}"):
        loaded()
    save_file({**tensors, name: tensors[name][:-1].clone()}, path)
    with pytest.raises(WeightsError, match=f"tensor {name} cannot be loaded: its shape is"):
        loaded()
    save_file(tensors, path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_decoder_layers": 2}))
    with pytest.raises(WeightsError, match=r"has no place: by config\.json the model has fewer layers"):
        loaded()

"""Every encoder gives transformers' hidden states in ragged batches; a vector depends on its own text alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire.core.errors import ModelError
from quire.layers.encoder import KINDS, Pooling, assemble_encoder_batch
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.model import Encoder
from quire.models.registry import describe
from quire.weights.folder import FolderSource
from tests.models.paging import only_native

SIZES = {"vocab_size": 97, "max_position_embeddings": 70, "initializer_range": 0.3}
BERT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, **SIZES}
DISTIL = {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4, **SIZES}
VARIANTS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
    "bert-relu": lambda: transformers.BertModel(
        transformers.BertConfig(**BERT, hidden_act="relu", layer_norm_eps=1e-5)
    ),
    "bert-masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**BERT, type_vocab_size=1)),
    "xlm-roberta": lambda: transformers.XLMRobertaModel(
        transformers.XLMRobertaConfig(**BERT, type_vocab_size=1, pad_token_id=1)
    ),
    "distilbert": lambda: transformers.DistilBertModel(transformers.DistilBertConfig(**DISTIL)),
}
LENGTHS = (19, 1, 64, 33)


def saved(folder: Path, variant: str) -> Any:
    """A random model, its norms and biases random too."""
    torch.manual_seed(0)
    model = VARIANTS[variant]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder)
    return getattr(model, "bert", model)


def loaded(folder: Path, quantization: str = "none") -> Encoder:
    source = FolderSource(folder)
    return load(
        source, LayerFactory.of(describe(source.config, "embed"), quantization=quantization), task="embed"
    )


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]


def hidden_states(encoder: Encoder, token_ids: list[list[int]]) -> list[Tensor]:
    batch = assemble_encoder_batch(token_ids, torch.device("cpu"))
    return list(encoder(batch).split([len(one) for one in token_ids]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_ragged_batch_gives_the_hidden_states_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = saved(tmp_path, variant)
    found = hidden_states(loaded(tmp_path), texts())
    for one, token_ids in zip(found, texts(), strict=True):
        with torch.inference_mode():
            right = reference(torch.tensor([token_ids])).last_hidden_state[0]
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4)


@only_native
def test_int8_stays_near_and_has_the_same_bits_alone_and_in_any_batch(
    tmp_path: Path, empty_cache: Path
) -> None:
    saved(tmp_path / "model", "bert")
    full, int8 = loaded(tmp_path / "model"), loaded(tmp_path / "model", "int8")
    together = hidden_states(int8, texts())
    for one, exact, token_ids in zip(together, hidden_states(full, texts()), texts(), strict=True):
        assert (one - exact).norm() < 0.1 * exact.norm()
        (alone,) = hidden_states(int8, [token_ids])
        assert torch.equal(one, alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_takes_each_text_by_itself(kind: str, normalize: bool) -> None:
    batch = assemble_encoder_batch(texts(), torch.device("cpu"))
    hidden = torch.randn(sum(LENGTHS), 16)
    take = {
        "mean": lambda one: one.mean(0),
        "cls": lambda one: one[0],
        "last": lambda one: one[-1],
        "max": lambda one: one.amax(0),
    }[kind]
    expected = torch.stack([take(one) for one in hidden.split(LENGTHS)])
    if normalize:
        expected /= expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(Pooling(kind, normalize)(hidden, batch), expected)


def test_an_encoder_does_not_generate_and_a_decoder_does_not_embed() -> None:
    with pytest.raises(ModelError, match=r"BertModel is an encoder.*Embedder"):
        describe({"architectures": ["BertModel"]})
    with pytest.raises(ModelError, match=r"LlamaForCausalLM makes no embeddings.*BertModel"):
        describe({"architectures": ["LlamaForCausalLM"]}, "embed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"is_decoder": True}, "as a decoder"),
        ({"num_attention_heads": 5}, "48 is not a multiple of 5"),
        ({"hidden_act": "swish2"}, "swish2"),
    ],
)
def test_what_makes_no_sense_is_named(change: dict[str, object], message: str) -> None:
    config = json.loads(transformers.BertConfig(**BERT).to_json_string()) | change
    with pytest.raises(ModelError, match=message):
        describe({**config, "architectures": ["BertModel"]}, "embed")

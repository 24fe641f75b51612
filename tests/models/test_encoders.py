"""Every encoder gives transformers' hidden states in ragged batches; a vector depends on its own text alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from quire.core.errors import ModelError, WeightsError
from quire.layers.encoder import KINDS, Pooling, assemble_encoder_batch
from quire.layers.factory import LayerFactory
from quire.models.encoder_heads import ClassificationHead, MaskHead
from quire.models.loading import load
from quire.models.model import Encoder
from quire.models.registry import describe
from quire.weights.folder import FolderSource
from tests.models.checkpoints import gpt2, mistral, opt, qwen3
from tests.models.paging import only_native

SIZES = {"vocab_size": 97, "max_position_embeddings": 70, "initializer_range": 0.3}
BERT = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, **SIZES}
DISTIL = {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4, **SIZES}
MODERN = {
    **BERT,
    "local_attention": 10,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
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
    "modernbert": lambda: transformers.ModernBertModel(transformers.ModernBertConfig(**MODERN)),
    "modernbert-biases": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(
            **MODERN,
            attention_bias=True,
            mlp_bias=True,
            norm_bias=True,
            hidden_activation="gelu_pytorch_tanh",
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "qwen3-tied": lambda: transformers.Qwen3ForCausalLM(qwen3(tie_word_embeddings=True)),
    "qwen3-bare": lambda: transformers.Qwen3Model(qwen3()),
    "mistral-window": lambda: transformers.MistralForCausalLM(mistral(sliding_window=9)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(gpt2()),
    "opt": lambda: transformers.OPTForCausalLM(opt()),
}
CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**BERT, num_labels=3)),
    "roberta": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(**BERT, type_vocab_size=1, num_labels=1)
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaForSequenceClassification(
        transformers.XLMRobertaConfig(**BERT, type_vocab_size=1)
    ),
    "distilbert": lambda: transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(**DISTIL, num_labels=5)
    ),
    "modernbert": lambda: transformers.ModernBertForSequenceClassification(
        transformers.ModernBertConfig(**MODERN, num_labels=3)
    ),
    "modernbert-mean": lambda: transformers.ModernBertForSequenceClassification(
        transformers.ModernBertConfig(
            **MODERN, num_labels=3, classifier_pooling="mean", classifier_bias=True, norm_bias=True
        )
    ),
}
MASKED: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**BERT, type_vocab_size=1)),
    "distilbert": lambda: transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**DISTIL)),
    "modernbert": lambda: transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**MODERN)),
}
LENGTHS = (19, 1, 64, 33)


def saved(folder: Path, make: Callable[[], Any]) -> Any:
    """A random model, its norms and biases random too."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder)
    return model


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
    with torch.inference_mode():
        return list(encoder(batch).split([len(one) for one in token_ids]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_ragged_batch_gives_the_hidden_states_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = saved(tmp_path, VARIANTS[variant])
    reference = getattr(reference, "bert", reference.base_model)
    encoder = loaded(tmp_path)
    found = hidden_states(encoder, texts())
    for one, token_ids in zip(found, texts(), strict=True):
        with torch.inference_mode():
            right = reference(torch.tensor([token_ids])).last_hidden_state[0]
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4)
        (alone,) = hidden_states(encoder, [token_ids])
        torch.testing.assert_close(alone, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", CLASSIFIERS)
def test_a_ragged_batch_gives_the_class_scores_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = saved(tmp_path, CLASSIFIERS[variant])
    encoder = loaded(tmp_path)
    assert isinstance(encoder.head, ClassificationHead)
    seconds = [7, 1, 64, 20]  # where the second text of a pair begins; the third sequence has none
    batch = assemble_encoder_batch(texts(), torch.device("cpu"), seconds)
    with torch.inference_mode():
        logits = encoder.head(encoder(batch), batch)
        for row, (token_ids, second) in enumerate(zip(texts(), seconds, strict=True)):
            types = (torch.arange(len(token_ids)) >= second).long()[None]
            more = {"token_type_ids": types} if variant == "bert" else {}
            right = reference(torch.tensor([token_ids]), **more).logits[0]
            torch.testing.assert_close(logits[row], right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", MASKED)
def test_masked_tokens_get_the_scores_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = saved(tmp_path, MASKED[variant])
    encoder = loaded(tmp_path)
    assert isinstance(encoder.head, MaskHead)
    for hidden, token_ids in zip(hidden_states(encoder, texts()), texts(), strict=True):
        with torch.inference_mode():
            logits, right = encoder.head(hidden), reference(torch.tensor([token_ids])).logits[0]
        torch.testing.assert_close(logits, right, rtol=1e-4, atol=1e-4)


def test_norms_of_old_checkpoints_are_called_gamma_and_beta(tmp_path: Path) -> None:
    reference = saved(tmp_path, MASKED["bert"])
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    assert old.keys() != tensors.keys()
    safetensors.torch.save_file(old, path)
    (hidden,) = hidden_states(loaded(tmp_path), [[5, 6, 7]])
    with torch.inference_mode():
        right = reference.bert(torch.tensor([[5, 6, 7]])).last_hidden_state[0]
    torch.testing.assert_close(hidden, right, rtol=1e-4, atol=1e-4)


@only_native
@pytest.mark.parametrize("variant", ["bert", "modernbert", "qwen3-tied"])
def test_int8_stays_near_and_has_the_same_bits_alone_and_in_any_batch(
    variant: str, tmp_path: Path, empty_cache: Path
) -> None:
    saved(tmp_path / "model", VARIANTS[variant])
    full, int8 = loaded(tmp_path / "model"), loaded(tmp_path / "model", "int8")
    together = hidden_states(int8, texts())
    for one, exact, token_ids in zip(together, hidden_states(full, texts()), texts(), strict=True):
        assert (one - exact).norm() < 0.1 * exact.norm()
        (alone,) = hidden_states(int8, [token_ids])
        assert torch.equal(one, alone)
    again = hidden_states(loaded(tmp_path / "model", "int8"), texts())  # from the converted weights
    assert all(map(torch.equal, together, again))


@only_native
def test_int8_heads_stay_near_and_load_from_converted_weights(tmp_path: Path, empty_cache: Path) -> None:
    for name, make in (("class", CLASSIFIERS["bert"]), ("mask", MASKED["bert"])):
        saved(tmp_path / name, make)
        batch = assemble_encoder_batch(texts(), torch.device("cpu"))
        scores = []
        for kind in ("none", "int8", "int8"):
            encoder = loaded(tmp_path / name, kind)
            with torch.inference_mode():
                hidden = encoder(batch)
                more = (batch,) if name == "class" else ()
                assert encoder.head is not None
                scores.append(encoder.head(hidden, *more))
        full, int8, again = scores
        assert (int8 - full).norm() < 0.15 * full.norm()
        assert torch.equal(int8, again)


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


def test_an_encoder_does_not_generate_and_an_unknown_one_is_named_beside_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"BertModel is an encoder.*Embedder"):
        describe({"architectures": ["BertModel"]})
    with pytest.raises(ModelError, match=r"Qwen3Model is an encoder.*Embedder"):
        describe({"architectures": ["Qwen3Model"]})
    with pytest.raises(
        ModelError, match=r"DebertaModel is no encoder.*nearest is BertModel.*ModernBertModel"
    ):
        describe({"architectures": ["DebertaModel"]}, "embed")


def test_a_tensor_that_does_not_fit_config_json_is_named(tmp_path: Path) -> None:
    saved(tmp_path, CLASSIFIERS["bert"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"id2label": {"0": "a", "1": "b"}}))
    with pytest.raises(WeightsError, match=r"classifier\.(weight|bias).*\[3.*\[2"):
        loaded(tmp_path)
    path.write_text(json.dumps(config | {"id2label": {"0": "a", "2": "b"}}))
    with pytest.raises(ModelError, match="id2label of 2 names without 1"):
        loaded(tmp_path)


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

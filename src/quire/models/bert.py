"""The BERT family of encoders: BERT, RoBERTa, XLM-RoBERTa, DistilBERT, with the heads of classifiers and of masked
tokens. A BertVariant holds the differences."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.layers.encoder import EncoderBatch
from quire.layers.factory import KNOWN, LayerFactory
from quire.layers.lora import LoraBatch
from quire.layers.parameters import Composite, LayerStack, Loader
from quire.models.encoder_heads import ClassificationHead, HeadNames, MaskHead
from quire.weights.hyperparameters import model_config, number, positive, read_labels, whole


@dataclass(frozen=True, slots=True)
class BertVariant:
    """A member of the family: its names in config.json and in the checkpoint."""

    sizes: Mapping[str, str]  # their names in config.json, where these are not the usual ones
    activation: str  # its name there
    first_position: bool  # positions begin after the padding token's id, as RoBERTa counts
    token_types: bool
    layer: str  # prefix of a layer's tensors
    parts: Mapping[str, str]  # part of a layer -> its name below that prefix
    classifier: HeadNames
    masked: HeadNames  # its activation is the model's own if it is empty


_PARTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_DISTIL_SIZES = {
    "hidden_size": "dim",
    "num_heads": "n_heads",
    "num_layers": "n_layers",
    "intermediate_size": "hidden_dim",
}
_DISTIL_PARTS = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "output": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_norm": "output_layer_norm",
}
_TRANSFORM = "cls.predictions.transform."
_BERT = BertVariant(
    {},
    "hidden_act",
    False,
    True,
    "encoder.layer.",
    _PARTS,
    HeadNames("pooler.dense", "tanh", "classifier"),
    HeadNames(
        f"{_TRANSFORM}dense",
        "",
        "cls.predictions.decoder.weight",
        f"{_TRANSFORM}LayerNorm",
        "cls.predictions.bias",
    ),
)
_ROBERTA = replace(
    _BERT,
    first_position=True,
    classifier=HeadNames("classifier.dense", "tanh", "classifier.out_proj"),
    masked=HeadNames("lm_head.dense", "gelu", "lm_head.decoder.weight", "lm_head.layer_norm", "lm_head.bias"),
)
_DISTIL = BertVariant(
    _DISTIL_SIZES,
    "activation",
    False,
    False,
    "transformer.layer.",
    _DISTIL_PARTS,
    HeadNames("pre_classifier", "relu", "classifier"),
    HeadNames("vocab_transform", "", "vocab_projector.weight", "vocab_layer_norm", "vocab_projector.bias"),
)
_TABLE = "embeddings.word_embeddings.weight"


def describe(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    kind = hf.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ModelError(
            f"position_embedding_type={kind!r} is not known for {architecture}: only absolute is"
        )
    if hf.get("is_decoder") or hf.get("add_cross_attention"):
        raise ModelError(f"{architecture} as a decoder is not known: only encoders are")
    activation = _activation(architecture, hf)
    if activation not in KNOWN:  # before anything is loaded
        raise ModelError(f"activation {activation!r} is not known: choose one of {', '.join(KNOWN)}")
    max_position = positive(hf, "max_position_embeddings") - _first_position(architecture, hf)
    if max_position < 1:
        raise ModelError(
            f"max_position_embeddings={hf['max_position_embeddings']} leaves no position for a token"
        )
    return model_config(architecture, hf, _variant(architecture).sizes, max_position=max_position)


def _variant(architecture: str) -> BertVariant:
    if architecture.startswith("DistilBert"):
        return _DISTIL
    return _ROBERTA if "Roberta" in architecture else _BERT


def _activation(architecture: str, hf: Mapping[str, Any]) -> str:
    return str(hf.get(_variant(architecture).activation, "gelu"))


def _first_position(architecture: str, hf: Mapping[str, Any]) -> int:
    """Rows of the checkpoint's position table before position 0."""
    return (
        whole(hf, "pad_token_id", 0 if "pad_token_id" in hf else 1) + 1
        if _variant(architecture).first_position
        else 0
    )


class BertLayer(Composite):
    """qkv → attention → output, up → activation → down, a norm after each sum."""

    def __init__(
        self, factory: LayerFactory, hidden: int, inner: int, attention: Any, activation: str, eps: float
    ) -> None:
        """`attention` is between qkv and its output projection."""
        self._hidden = hidden
        self.qkv = factory.linear(3 * hidden, hidden, bias=True)
        self.attention = attention
        self.output = factory.linear(hidden, hidden, bias=True)
        self.attention_norm = factory.layer_norm(hidden, eps)
        self.up = factory.linear(inner, hidden, bias=True)
        self.activation = factory.activation(activation)
        self.down = factory.linear(hidden, inner, bias=True)
        self.mlp_norm = factory.layer_norm(hidden, eps)

    def __call__(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]."""
        attended = self.attention(self.qkv(hidden, lora=batch.lora), batch)
        return self._feed_forward(self.attention_norm(self.output(attended, hidden, batch.lora)), batch.lora)

    def _feed_forward(self, hidden: Tensor, lora: LoraBatch | None) -> Tensor:
        return self.mlp_norm(self.down(self.activation(self.up(hidden, lora=lora)), hidden, lora))

    def loaders(self, prefix: str, names: Mapping[str, str]) -> dict[str, Loader]:
        qkv = {prefix + names[part]: self._hidden for part in ("query", "key", "value")}
        loaders = self.qkv.part_loaders(qkv)
        for part, linear in (("output", self.output), ("up", self.up), ("down", self.down)):
            loaders |= linear.loaders(prefix + names[part])
        loaders |= self.attention_norm.loaders(prefix + names["attention_norm"])
        loaders |= self.mlp_norm.loaders(prefix + names["mlp_norm"])
        return loaders


class Bert(LayerStack):
    """Token, position and token type embeddings, summed and normalised, then layers."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        self.config = config
        self._variant = _variant(config.architecture)
        hf, hidden = config.hf, config.hidden_size
        eps = number(hf, "layer_norm_eps", 1e-12)
        activation = _activation(config.architecture, hf)
        self.tokens = factory.embedding(config.vocab_size, hidden)
        first_row = _first_position(config.architecture, hf)
        self.positions = factory.embedding(config.max_position, hidden, first_row)
        num_types = positive(hf, "type_vocab_size", 2)
        self.types = factory.embedding(num_types, hidden) if self._variant.token_types else None
        self.norm = factory.layer_norm(hidden, eps)
        attention = factory.full_attention(config.num_heads, config.head_dim)
        self.blocks: list[BertLayer] = [
            BertLayer(factory, hidden, config.intermediate_size, attention, activation, eps)
            for _ in range(config.num_layers)
        ]
        self._num_types = num_types
        self.head: ClassificationHead | MaskHead | None = None
        if config.architecture.endswith("ForSequenceClassification"):
            labels = read_labels(hf)
            self.head = ClassificationHead(config, self._variant.classifier, eps, factory, len(labels))
        elif config.architecture.endswith("ForMaskedLM"):
            masked = self._variant.masked
            masked = replace(masked, activation=masked.activation or activation)
            self.head = MaskHead(config, masked, eps, factory, self.tokens, _TABLE)

    def __call__(self, batch: EncoderBatch) -> Tensor:
        hidden = self.tokens(batch.token_ids) + self.positions(batch.positions)
        if self.types is not None:
            if batch.token_types is None or self._num_types == 1:  # a single text is of type 0
                hidden += self.types.table[0].to(hidden.dtype)
            else:
                hidden += self.types(batch.token_types)
        hidden = self.norm(hidden)
        for block in self.blocks:
            hidden = block(hidden, batch)
        return hidden

    def loaders(self) -> dict[str, Loader]:
        loaders = {
            _TABLE: self.tokens.loader(),
            "embeddings.position_embeddings.weight": self.positions.loader(),
            **self.norm.loaders("embeddings.LayerNorm"),
        }
        if self.types is not None:
            loaders["embeddings.token_type_embeddings.weight"] = self.types.loader()
        for i, block in enumerate(self.blocks):
            loaders |= block.loaders(f"{self._variant.layer}{i}.", self._variant.parts)
        return loaders | self.head.loaders() if self.head is not None else loaders


build = Bert

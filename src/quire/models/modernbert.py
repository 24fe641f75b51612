"""ModernBERT: rotary positions, layers that see all of a text or a window, gated feed-forward layers, norms first."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.layers.encoder import EncoderBatch
from quire.layers.factory import GATES, KNOWN, LayerFactory
from quire.layers.parameters import Composite, LayerStack, Loader
from quire.layers.rope import rope_parameters
from quire.models.encoder_heads import ClassificationHead, HeadNames, MaskHead
from quire.weights.hyperparameters import model_config, number, positive, read_labels

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_THETA = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}
_TABLE = "model.embeddings.tok_embeddings.weight"


def describe(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    for name, known in (("hidden_activation", GATES), ("classifier_activation", KNOWN)):
        if hf.get(name, "gelu") not in known:
            raise ModelError(
                f"{name}={hf[name]!r} is not known for {architecture}: only {', '.join(known)} are"
            )
    if hf.get("classifier_pooling", "cls") not in ("cls", "mean"):
        raise ModelError(
            f"classifier_pooling={hf['classifier_pooling']!r} is not known: only cls and mean are"
        )
    config = model_config(architecture, hf)
    for kind in set(_kinds(config)):
        rope_parameters(_rope(hf, kind))  # an unknown rope type is refused before anything is loaded
    return config


def _kinds(config: ModelConfig) -> list[str]:
    """Of each layer: full_attention or sliding_attention."""
    kinds = config.hf.get("layer_types")
    if kinds is None:
        every = positive(config.hf, "global_attn_every_n_layers", 3)
        return [_LOCAL if i % every else _GLOBAL for i in range(config.num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != config.num_layers
        or any(kind not in (_GLOBAL, _LOCAL) for kind in kinds)
    ):
        raise ModelError(
            f"config.json has layer_types={kinds!r:.80}: it must list {config.num_layers} layers, each {_GLOBAL} or "
            f"{_LOCAL}"
        )
    return kinds


def _rope(hf: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """config.json with the rope settings of one kind of layer, which newer files nest by kind."""
    nested = hf.get("rope_parameters") or {}
    if not isinstance(nested, Mapping) or not isinstance(nested.get(kind) or {}, Mapping):
        raise ModelError(
            f"config.json has rope_parameters={nested!r:.80}, which must be objects: correct them"
        )
    name, theta = _THETA[kind]
    own = {"rope_theta": number(hf, name, theta), **(nested.get(kind) or {})}
    return {**hf, "rope_parameters": own}


class ModernBertLayer(Composite):
    """norm → qkv → attention → output, norm → input, gate → output; both sums are made by the last projection."""

    def __init__(
        self, config: ModelConfig, factory: LayerFactory, index: int, reach: int, cos_sin: Tensor
    ) -> None:
        hf, hidden, inner = config.hf, config.hidden_size, config.intermediate_size
        eps = number(hf, "norm_eps", 1e-5)
        attention_bias, mlp_bias = bool(hf.get("attention_bias", False)), bool(hf.get("mlp_bias", False))
        self._norm_bias = bool(hf.get("norm_bias", False))
        # the embeddings are normalised already
        self.attention_norm = factory.layer_norm(hidden, eps) if index > 0 else None
        self.qkv = factory.linear(3 * hidden, hidden, attention_bias)
        self.attention = factory.full_attention(config.num_heads, config.head_dim, reach, cos_sin)
        self.output = factory.linear(hidden, hidden, attention_bias)
        self.mlp_norm = factory.layer_norm(hidden, eps)
        self.gate_up = factory.linear(2 * inner, hidden, mlp_bias)
        self.down = factory.linear(hidden, inner, mlp_bias)
        self._gelu_gate = factory.gelu_gate(str(hf.get("hidden_activation", "gelu")))  # None: silu

    def __call__(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]."""
        normed = hidden if self.attention_norm is None else self.attention_norm(hidden)
        hidden = self.output(self.attention(self.qkv(normed), batch), residual=hidden)
        normed = self.mlp_norm(hidden)
        gate = self._gelu_gate
        gated = self.gate_up.silu_mul(normed) if gate is None else gate(self.gate_up(normed))
        return self.down(gated, residual=hidden)

    def loaders(self, prefix: str) -> dict[str, Loader]:
        loaders = self.mlp_norm.loaders(f"{prefix}mlp_norm", self._norm_bias)
        if self.attention_norm is not None:
            loaders |= self.attention_norm.loaders(f"{prefix}attn_norm", self._norm_bias)
        parts = (
            ("attn.Wqkv", self.qkv),
            ("attn.Wo", self.output),
            ("mlp.Wi", self.gate_up),
            ("mlp.Wo", self.down),
        )
        for name, linear in parts:
            loaders |= linear.loaders(prefix + name)
        return loaders


class ModernBert(LayerStack):
    """Token embeddings, normalised, then layers, then a norm."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        self.config = config
        hf, hidden = config.hf, config.hidden_size
        eps = number(hf, "norm_eps", 1e-5)
        self._norm_bias = bool(hf.get("norm_bias", False))
        kinds = _kinds(config)
        tables = {
            kind: factory.rotary(_rope(hf, kind), config.head_dim, config.max_position) for kind in set(kinds)
        }
        reaches = {_GLOBAL: 0, _LOCAL: positive(hf, "local_attention", 128) // 2}
        if reaches[_LOCAL] == 0:
            raise ModelError(f"config.json has local_attention={hf['local_attention']}: give at least 2")
        self.tokens = factory.embedding(config.vocab_size, hidden)
        self.norm = factory.layer_norm(hidden, eps)
        self.blocks: list[ModernBertLayer] = [
            ModernBertLayer(config, factory, i, reaches[kind], tables[kind]) for i, kind in enumerate(kinds)
        ]
        self.final_norm = factory.layer_norm(hidden, eps)
        self.head = self._head(eps, factory)

    def _head(self, eps: float, factory: LayerFactory) -> ClassificationHead | MaskHead | None:
        hf = self.config.hf
        masked = self.config.architecture.endswith("ForMaskedLM")
        names = HeadNames(
            "head.dense",
            str(hf.get("classifier_activation", "gelu")),
            "decoder.weight" if masked else "classifier",
            "head.norm",
            "decoder.bias" if hf.get("decoder_bias", True) else "",
            bool(hf.get("classifier_bias", False)),
            self._norm_bias,
        )
        if masked:
            return MaskHead(self.config, names, eps, factory, self.tokens, _TABLE)
        if self.config.architecture.endswith("ForSequenceClassification"):
            pooling = str(hf.get("classifier_pooling", "cls"))
            return ClassificationHead(self.config, names, eps, factory, len(read_labels(hf)), pooling)
        return None

    def __call__(self, batch: EncoderBatch) -> Tensor:
        hidden = self.norm(self.tokens(batch.token_ids))
        for block in self.blocks:
            hidden = block(hidden, batch)
        return self.final_norm(hidden)

    def loaders(self) -> dict[str, Loader]:
        loaders = {
            _TABLE: self.tokens.loader(),
            **self.norm.loaders("model.embeddings.norm", self._norm_bias),
            **self.final_norm.loaders("model.final_norm", self._norm_bias),
        }
        for i, block in enumerate(self.blocks):
            loaders |= block.loaders(f"model.layers.{i}.")
        return loaders | self.head.loaders() if self.head is not None else loaders


build = ModernBert

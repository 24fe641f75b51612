"""T5, Flan-T5 and mT5: RMS norms before each part, scores by distance, no scaling of scores."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.encoder_input import EncoderInput
from quire.core.errors import ModelError
from quire.layers.attention import Pool
from quire.layers.cross import CrossBatch
from quire.layers.encoder import EncoderBatch
from quire.layers.factory import GATES, KNOWN, LayerFactory
from quire.layers.linear import Linear
from quire.layers.lora import LoraBatch
from quire.layers.parameters import Composite, Loader
from quire.models.encoder_decoder import EncoderDecoder
from quire.weights.hyperparameters import (
    MAX_LAYERS,
    first_token_id,
    model_config,
    number,
    positive,
    token_ids,
    whole,
)

TRAINED_POSITIONS = 512  # where config.json has no n_positions
# Distances have no end: a prompt and its answer may be this many times longer than in training.
TIMES_TRAINED = 4


def describe(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    kind = _feed_forward_kind(hf)
    known = GATES if kind[1] else KNOWN
    if kind[0] not in known:
        raise ModelError(
            f"config.json has feed_forward_proj={hf.get('feed_forward_proj')!r}: the activation must be one of "
            f"{', '.join(known)}"
        )
    num_buckets, max_distance = _buckets(hf)
    if not num_buckets >= 4 or max_distance <= num_buckets // 2:
        raise ModelError(
            f"config.json has relative_attention_num_buckets={num_buckets} and relative_attention_max_distance="
            f"{max_distance}: there must be 4 buckets or more, and a distance beyond half of them"
        )
    max_position = TIMES_TRAINED * positive(hf, "n_positions", TRAINED_POSITIONS, 2**20)
    start = first_token_id(hf, "decoder_start_token_id")
    padding = whole(hf, "pad_token_id", 0)
    num_layers = positive(hf, "num_layers", high=MAX_LAYERS)
    return model_config(
        architecture,
        hf,
        {"hidden_size": "d_model", "num_heads": "num_heads", "intermediate_size": "d_ff"},
        num_layers=positive(hf, "num_decoder_layers", num_layers, MAX_LAYERS),
        head_dim=positive(hf, "d_kv"),
        max_position=max_position,
        tie_word_embeddings=_is_tied(hf),
        eos_token_ids=token_ids(hf, "eos_token_id"),
        encoder=EncoderInput((padding if start is None else start,), padding, max_position, max_position),
    )


def _feed_forward_kind(hf: Mapping[str, Any]) -> tuple[str, bool]:
    """The activation, and whether it is a gate: "gated-gelu" is T5's, which is the one of tanh."""
    name = str(hf.get("feed_forward_proj") or "relu")
    gated = name.startswith("gated-")
    name = name.removeprefix("gated-")
    return ("gelu_new" if gated and name == "gelu" else name), gated


def _buckets(hf: Mapping[str, Any]) -> tuple[int, int]:
    return (
        positive(hf, "relative_attention_num_buckets", 32, 2**16),
        positive(hf, "relative_attention_max_distance", 128, 2**20),
    )


def _scales_output(architecture: str, hf: Mapping[str, Any]) -> bool:
    """The first T5 multiplies the decoder's output by hidden_size ** -0.5, where it says that the head is tied."""
    if architecture.startswith("MT5"):
        return False
    return bool(hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings") is not False))


def _is_tied(hf: Mapping[str, Any]) -> bool:
    """By the file's tensors where they are known: what config.json says has changed its meaning."""
    tied = hf.get("tie_word_embeddings") is not False and hf.get("scale_decoder_outputs", True)
    return bool(hf.get("has_tied_head", tied))


class T5Layer(Composite):
    """norm → qkv → attention → output, norm → feed-forward; every sum is made by the last projection."""

    def __init__(self, config: ModelConfig, factory: LayerFactory, attention: Any) -> None:
        """`attention` is between qkv and its output projection."""
        hidden, inner = config.hidden_size, config.intermediate_size
        width, eps = config.num_heads * config.head_dim, number(config.hf, "layer_norm_epsilon", 1e-6)
        activation, gated = _feed_forward_kind(config.hf)
        self._width, self._inner, self._gated = width, inner, gated
        self.attention_norm = factory.rms_norm(hidden, eps)
        self.qkv = factory.linear(3 * width, hidden)
        self.attention = attention
        self.output = factory.linear(hidden, width)
        self.mlp_norm = factory.rms_norm(hidden, eps)
        self.gate_up: Linear | None = None
        self.up: Linear | None = None
        if gated:
            self.gate_up = factory.linear(2 * inner, hidden)
            self._gate = factory.gelu_gate(activation)  # None: silu
        else:
            self.up = factory.linear(inner, hidden)
            # relu is part of the GEMM's epilogue
            self._activation = None if activation == "relu" else factory.activation(activation)
        self.down = factory.linear(hidden, inner)

    def _feed_forward(self, hidden: Tensor, lora: LoraBatch | None) -> Tensor:
        if self.gate_up is not None:
            if self._gate is None:
                inner = self.gate_up.normed_silu_mul(hidden, self.mlp_norm, lora)
            else:
                inner = self._gate(self.gate_up.normed(hidden, self.mlp_norm, lora))
        else:
            assert self.up is not None
            x, activation = self.mlp_norm(hidden), self._activation
            inner = self.up.relu(x, lora) if activation is None else activation(self.up(x, lora=lora))
        return self.down(inner, hidden, lora)

    def loaders(self, prefix: str) -> dict[str, Loader]:
        """Of a layer named `prefix`, whose last sublayer is the feed-forward."""
        mlp = f"{prefix}layer.{1 if not hasattr(self, 'cross') else 2}."
        loaders = {
            f"{prefix}layer.0.layer_norm.weight": self.attention_norm.loader(),
            f"{mlp}layer_norm.weight": self.mlp_norm.loader(),
        }
        rows = {f"{prefix}layer.0.SelfAttention.{name}": self._width for name in "qkv"}
        loaders |= self.qkv.part_loaders(rows)
        loaders |= self.output.loaders(f"{prefix}layer.0.SelfAttention.o")
        if self.gate_up is not None:
            rows = {f"{mlp}DenseReluDense.{name}": self._inner for name in ("wi_0", "wi_1")}
            loaders |= self.gate_up.part_loaders(rows)
        if self.up is not None:
            loaders |= self.up.loaders(f"{mlp}DenseReluDense.wi")
        return loaders | self.down.loaders(f"{mlp}DenseReluDense.wo")


class T5EncoderLayer(T5Layer):
    def __call__(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        attended = self.attention(self.qkv.normed(hidden, self.attention_norm, batch.lora), batch)
        return self._feed_forward(self.output(attended, hidden, batch.lora), batch.lora)


class T5DecoderLayer(T5Layer):
    """The same with cross-attention in between."""

    def __init__(self, config: ModelConfig, factory: LayerFactory, attention: Any, index: int) -> None:
        super().__init__(config, factory, attention)
        eps = number(config.hf, "layer_norm_epsilon", 1e-6)
        self.cross_norm = factory.rms_norm(config.hidden_size, eps)
        self.cross_query = factory.linear(self._width, config.hidden_size)
        self.cross_kv = factory.linear(2 * self._width, config.hidden_size)
        self.cross = factory.cross_attention(index, config.num_heads, config.head_dim, scale=1.0)
        self.cross_output = factory.linear(config.hidden_size, self._width)

    def __call__(self, hidden: Tensor, batch: CrossBatch, pool: Pool) -> Tensor:
        lora = batch.lora
        attended = self.attention(self.qkv.normed(hidden, self.attention_norm, lora), batch, pool)
        hidden = self.output(attended, hidden, lora)
        attended = self.cross(self.cross_query.normed(hidden, self.cross_norm, lora), batch, pool)
        return self._feed_forward(self.cross_output(attended, hidden, lora), lora)

    def loaders(self, prefix: str) -> dict[str, Loader]:
        name = f"{prefix}layer.1.EncDecAttention."
        loaders = super().loaders(prefix)
        loaders[f"{prefix}layer.1.layer_norm.weight"] = self.cross_norm.loader()
        loaders |= self.cross_query.loaders(f"{name}q")
        loaders |= self.cross_kv.part_loaders({f"{name}k": self._width, f"{name}v": self._width})
        return loaders | self.cross_output.loaders(f"{name}o")


class T5(EncoderDecoder):
    """One table of embeddings, and one of scores by distance for each of the two halves."""

    encoder_names = ("encoder.", ".EncDecAttention.k.", ".EncDecAttention.v.")

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        super().__init__(config, factory)
        self._factory = factory
        hf, hidden = config.hf, config.hidden_size
        heads, head_dim, eps = config.num_heads, config.head_dim, number(hf, "layer_norm_epsilon", 1e-6)
        self.embedding = factory.embedding(config.vocab_size, hidden)
        self.encoder_distances = factory.distance_table(heads, *_buckets(hf), both_sides=True)
        self.decoder_distances = factory.distance_table(heads, *_buckets(hf), both_sides=False)
        of_encoder = factory.full_attention(heads, head_dim, scale=1.0, slopes=self.encoder_distances.table)
        num_encoder_layers = positive(hf, "num_layers", high=MAX_LAYERS)
        self.encoder_blocks = [T5EncoderLayer(config, factory, of_encoder) for _ in range(num_encoder_layers)]
        self.encoder_norm = factory.rms_norm(hidden, eps)
        self.decoder_blocks = []
        for i in range(config.num_layers):
            slopes = self.decoder_distances.table
            attention = factory.attention(i, heads, heads, head_dim, 1.0, slopes=slopes)
            self.decoder_blocks.append(T5DecoderLayer(config, factory, attention, i))
        scale = hidden**-0.5 if _scales_output(config.architecture, hf) else 1.0
        self.decoder_norm = factory.rms_norm(hidden, eps, scale)
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head = factory.output_head(config.vocab_size, hidden, tied_to)

    @property
    def recordable(self) -> bool:
        activation, gated = _feed_forward_kind(self.config.hf)
        is_native = gated or activation == "gelu"  # others are torch's
        return self._factory.recordable and self.embedding.recordable and is_native

    def _embed_prompt(self, batch: EncoderBatch) -> Tensor:
        return self.embedding(batch.token_ids, batch.lora)

    def _embed(self, batch: CrossBatch) -> Tensor:
        return self.embedding(batch.token_ids, batch.lora)

    def _encoded(self, hidden: Tensor) -> Tensor:
        return self.encoder_norm(hidden)

    def _decoded(self, hidden: Tensor) -> Tensor:
        return self.decoder_norm(hidden)

    def loaders(self) -> dict[str, Loader]:
        loaders = self.head.loaders(self.embedding, "shared.weight", "lm_head.weight")
        halves = (
            ("encoder.", self.encoder_blocks, self.encoder_norm, self.encoder_distances),
            ("decoder.", self.decoder_blocks, self.decoder_norm, self.decoder_distances),
        )
        for half, blocks, norm, distances in halves:
            table = f"{half}block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            loaders |= {f"{half}final_layer_norm.weight": norm.loader(), table: distances.loader()}
            for i, block in enumerate(blocks):
                loaders |= block.loaders(f"{half}block.{i}.")
        return loaders


build = T5

"""BART: learned positions, biases, a layer norm after each sum. Its final_logits_bias is zeros, and is not read."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.core.config import ModelConfig
from quire.core.encoder_input import EncoderInput
from quire.core.errors import ModelError
from quire.layers.attention import Pool
from quire.layers.cross import CrossBatch
from quire.layers.encoder import EncoderBatch
from quire.layers.factory import KNOWN, LayerFactory
from quire.layers.linear import Linear
from quire.layers.lora import LoraBatch
from quire.layers.parameters import Composite, Loader
from quire.models.encoder_decoder import EncoderDecoder
from quire.weights.hyperparameters import (
    MAX_LAYERS,
    first_token_id,
    generates,
    model_config,
    positive,
    whole,
)

SKIPPED_POSITIONS = 2  # rows of the checkpoint's position tables before position 0
EPS = 1e-5  # torch's
_SIZES = {
    "hidden_size": "d_model",
    "num_heads": "decoder_attention_heads",
    "num_layers": "decoder_layers",
    "intermediate_size": "decoder_ffn_dim",
}


def describe(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    activation = _activation(hf)
    if activation not in KNOWN:
        raise ModelError(
            f"config.json has activation_function={activation!r}: choose one of {', '.join(KNOWN)}"
        )
    for name in (
        "normalize_before",
        "normalize_embedding",
        "add_final_layer_norm",
        "static_position_embeddings",
    ):
        if hf.get(name, name == "normalize_embedding") is not (name == "normalize_embedding"):
            raise ModelError(f"config.json has {name}={hf[name]!r}, which is not known for {architecture}")
    heads = positive(hf, "decoder_attention_heads")
    if positive(hf, "encoder_attention_heads") != heads:
        raise ModelError(
            f"config.json has encoder_attention_heads={hf['encoder_attention_heads']} and decoder_attention_heads="
            f"{heads}: only models with as many of both are known"
        )
    longest = positive(hf, "max_position_embeddings")
    start = first_token_id(hf, "decoder_start_token_id")
    tied = {"tie_word_embeddings": hf.get("has_tied_head", hf.get("tie_word_embeddings") is not False)}
    encoder = EncoderInput((2 if start is None else start,), whole(hf, "pad_token_id", 1), longest, longest)
    return model_config(
        architecture, hf, _SIZES, max_position=2 * longest, encoder=encoder, **generates({**hf, **tied})
    )


def _activation(hf: Mapping[str, Any]) -> str:
    return str(hf.get("activation_function") or "gelu")


def build(config: ModelConfig, factory: LayerFactory) -> "Bart":
    return Bart(config, factory)


class BartLayer(Composite):
    """qkv → attention → output, up → activation → down, a norm after each sum."""

    def __init__(self, config: ModelConfig, factory: LayerFactory, attention: Any, inner: int) -> None:
        hidden = config.hidden_size
        self._hidden = hidden
        self.qkv = factory.linear(3 * hidden, hidden, bias=True)
        self.attention = attention
        self.output = factory.linear(hidden, hidden, bias=True)
        self.attention_norm = factory.layer_norm(hidden, EPS)
        self.up = factory.linear(inner, hidden, bias=True)
        self.activation = factory.activation(_activation(config.hf))
        self.down = factory.linear(hidden, inner, bias=True)
        self.mlp_norm = factory.layer_norm(hidden, EPS)

    def _feed_forward(self, hidden: Tensor, lora: LoraBatch | None) -> Tensor:
        return self.mlp_norm(self.down(self.activation(self.up(hidden, lora=lora)), hidden, lora))

    def loaders(self, prefix: str) -> dict[str, Loader]:
        loaders = self._projections(f"{prefix}self_attn.", self.qkv, ("q", "k", "v"), self.output)
        loaders |= self.attention_norm.loaders(f"{prefix}self_attn_layer_norm")
        loaders |= self.up.loaders(f"{prefix}fc1") | self.down.loaders(f"{prefix}fc2")
        return loaders | self.mlp_norm.loaders(f"{prefix}final_layer_norm")

    def _projections(
        self, prefix: str, fused: Linear, names: tuple[str, ...], output: Linear
    ) -> dict[str, Loader]:
        parts = {f"{prefix}{name}_proj": self._hidden for name in names}
        return output.loaders(f"{prefix}out_proj") | fused.part_loaders(parts)


class BartEncoderLayer(BartLayer):
    def __call__(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        attended = self.attention(self.qkv(hidden, lora=batch.lora), batch)
        return self._feed_forward(self.attention_norm(self.output(attended, hidden, batch.lora)), batch.lora)


class BartDecoderLayer(BartLayer):
    """The same with cross-attention in between."""

    def __init__(
        self, config: ModelConfig, factory: LayerFactory, attention: Any, inner: int, index: int
    ) -> None:
        super().__init__(config, factory, attention, inner)
        hidden = config.hidden_size
        self.cross_query = factory.linear(hidden, hidden, bias=True)
        self.cross_kv = factory.linear(2 * hidden, hidden, bias=True)
        self.cross = factory.cross_attention(index, config.num_heads, config.head_dim)
        self.cross_output = factory.linear(hidden, hidden, bias=True)
        self.cross_norm = factory.layer_norm(hidden, EPS)

    def __call__(self, hidden: Tensor, batch: CrossBatch, pool: Pool) -> Tensor:
        lora = batch.lora
        attended = self.attention(self.qkv(hidden, lora=lora), batch, pool)
        hidden = self.attention_norm(self.output(attended, hidden, lora))
        attended = self.cross(self.cross_query(hidden, lora=lora), batch, pool)
        return self._feed_forward(self.cross_norm(self.cross_output(attended, hidden, lora)), lora)

    def loaders(self, prefix: str) -> dict[str, Loader]:
        name = f"{prefix}encoder_attn."
        loaders = super().loaders(prefix) | self.cross_query.loaders(f"{name}q_proj")
        loaders |= self._projections(name, self.cross_kv, ("k", "v"), self.cross_output)
        return loaders | self.cross_norm.loaders(f"{prefix}encoder_attn_layer_norm")


class Bart(EncoderDecoder):
    """One table of embeddings; positions and a norm of embeddings for each half."""

    encoder_names = ("model.encoder.", ".encoder_attn.k_proj.", ".encoder_attn.v_proj.")

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        super().__init__(config, factory)
        hf, hidden, heads, head_dim = config.hf, config.hidden_size, config.num_heads, config.head_dim
        longest = positive(hf, "max_position_embeddings")
        scale = math.sqrt(hidden) if hf.get("scale_embedding") else 1.0
        self.embedding = factory.embedding(config.vocab_size, hidden, scale=scale)
        self.encoder_positions = factory.embedding(longest, hidden, SKIPPED_POSITIONS)
        self.decoder_positions = factory.embedding(longest, hidden, SKIPPED_POSITIONS)
        self.encoder_norm = factory.layer_norm(hidden, EPS)
        self.decoder_norm = factory.layer_norm(hidden, EPS)
        of_encoder, inner = factory.full_attention(heads, head_dim), positive(hf, "encoder_ffn_dim")
        self.encoder_blocks = [
            BartEncoderLayer(config, factory, of_encoder, inner)
            for _ in range(positive(hf, "encoder_layers", high=MAX_LAYERS))
        ]
        self.decoder_blocks = [
            BartDecoderLayer(
                config, factory, factory.attention(i, heads, heads, head_dim), config.intermediate_size, i
            )
            for i in range(config.num_layers)
        ]
        tied_to = self.embedding if config.tie_word_embeddings else None
        self.head = factory.output_head(config.vocab_size, hidden, tied_to)

    def _embed_prompt(self, batch: EncoderBatch) -> Tensor:
        tokens = self.embedding(batch.token_ids, batch.lora)
        return self.encoder_norm(tokens + self.encoder_positions(batch.positions, batch.lora))

    def _embed(self, batch: CrossBatch) -> Tensor:
        tokens = self.embedding(batch.token_ids, batch.lora)
        return self.decoder_norm(tokens + self.decoder_positions(batch.positions, batch.lora))

    def loaders(self) -> dict[str, Loader]:
        loaders = self.head.loaders(self.embedding, "model.shared.weight", "lm_head.weight")
        halves = (
            ("model.encoder.", self.encoder_blocks, self.encoder_norm, self.encoder_positions),
            ("model.decoder.", self.decoder_blocks, self.decoder_norm, self.decoder_positions),
        )
        for half, blocks, norm, positions in halves:
            loaders[f"{half}embed_positions.weight"] = positions.loader()
            loaders |= norm.loaders(f"{half}layernorm_embedding")
            for i, block in enumerate(blocks):
                loaders |= block.loaders(f"{half}layers.{i}.")
        return loaders

"""BART: BERT's layers, with cross-attention in the decoder's, and learned positions.

Its final_logits_bias is zeros, and is not read.
"""

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
from quire.layers.parameters import Loader
from quire.models.bert import BertLayer
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
_PARTS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "up": "fc1",
    "down": "fc2",
    "mlp_norm": "final_layer_norm",
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


class BartDecoderLayer(BertLayer):
    """The same with cross-attention in between."""

    def __init__(self, config: ModelConfig, factory: LayerFactory, index: int) -> None:
        hidden, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        attention = factory.attention(index, heads, heads, head_dim)
        inner, activation = config.intermediate_size, _activation(config.hf)
        super().__init__(factory, hidden, inner, attention, activation, EPS)
        self.cross_query = factory.linear(hidden, hidden, bias=True)
        self.cross_kv = factory.linear(2 * hidden, hidden, bias=True)
        self.cross = factory.cross_attention(index, heads, head_dim)
        self.cross_output = factory.linear(hidden, hidden, bias=True)
        self.cross_norm = factory.layer_norm(hidden, EPS)

    def __call__(self, hidden: Tensor, batch: CrossBatch, pool: Pool) -> Tensor:  # type: ignore[override]
        lora = batch.lora
        attended = self.attention(self.qkv(hidden, lora=lora), batch, pool)
        hidden = self.attention_norm(self.output(attended, hidden, lora))
        attended = self.cross(self.cross_query(hidden, lora=lora), batch, pool)
        return self._feed_forward(self.cross_norm(self.cross_output(attended, hidden, lora)), lora)

    def loaders(self, prefix: str, names: Mapping[str, str]) -> dict[str, Loader]:
        cross = f"{prefix}encoder_attn."
        loaders = super().loaders(prefix, names) | self.cross_query.loaders(f"{cross}q_proj")
        loaders |= self.cross_kv.part_loaders({f"{cross}{name}_proj": self._hidden for name in "kv"})
        loaders |= self.cross_output.loaders(f"{cross}out_proj")
        return loaders | self.cross_norm.loaders(f"{prefix}encoder_attn_layer_norm")


class Bart(EncoderDecoder):
    """One table of embeddings; positions and a norm of embeddings for each half."""

    encoder_names = ("model.encoder.", ".encoder_attn.k_proj.", ".encoder_attn.v_proj.")

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        super().__init__(config, factory)
        hf, hidden = config.hf, config.hidden_size
        longest = positive(hf, "max_position_embeddings")
        scale = math.sqrt(hidden) if hf.get("scale_embedding") else 1.0
        self.embedding = factory.embedding(config.vocab_size, hidden, scale=scale)
        self.encoder_positions = factory.embedding(longest, hidden, SKIPPED_POSITIONS)
        self.decoder_positions = factory.embedding(longest, hidden, SKIPPED_POSITIONS)
        self.encoder_norm = factory.layer_norm(hidden, EPS)
        self.decoder_norm = factory.layer_norm(hidden, EPS)
        attention = factory.full_attention(config.num_heads, config.head_dim)
        inner, activation = positive(hf, "encoder_ffn_dim"), _activation(hf)
        self.encoder_blocks = [
            BertLayer(factory, hidden, inner, attention, activation, EPS)
            for _ in range(positive(hf, "encoder_layers", high=MAX_LAYERS))
        ]
        self.decoder_blocks = [BartDecoderLayer(config, factory, i) for i in range(config.num_layers)]
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
                loaders |= block.loaders(f"{half}layers.{i}.", _PARTS)
        return loaders


build = Bart

"""GPT-NeoX, Falcon, BLOOM and StarCoder2: what their config.json means for GptDecoder, and their names of tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.layers.factory import LayerFactory
from quire.layers.linear import Linear
from quire.layers.parameters import Loader
from quire.layers.rope import position_limit
from quire.models.gpt_decoder import GptConfig, GptDecoder, describe_gpt
from quire.models.model import DecoderModel
from quire.weights.hyperparameters import MAX_LAYERS, number, positive, whole

BLOOM, FALCON = "BloomForCausalLM", "FalconForCausalLM"
NEOX, STARCODER2 = "GPTNeoXForCausalLM", "Starcoder2ForCausalLM"

# What a config.json of this architecture may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    BLOOM: {"tie_word_embeddings": True},
    FALCON: {"max_position_embeddings": 2048, "tie_word_embeddings": True},
    NEOX: {"partial_rotary_factor": 0.25, "tie_word_embeddings": False},
    STARCODER2: {"tie_word_embeddings": True},
}
# Other spellings of one thing.
_SPELLINGS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}


@dataclass(frozen=True, slots=True)
class Names:
    """Of an architecture's modules. Those of a layer follow `layer` and its number."""

    tokens: str
    norm: str
    head: str
    layer: str
    output: str
    up: str
    down: str
    qkv: tuple[str, ...]  # one fused module, or q, k and v
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    embedding_norm: str = ""


_MEGATRON = {
    "output": "dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}  # as NeoX, Falcon and BLOOM


def _megatron(tokens: str, norm: str, head: str, layer: str, attention: str, **other: str) -> Names:
    parts = {**_MEGATRON, "output": f"{attention}.dense"}
    return Names(tokens, norm, head, layer, **parts, qkv=(f"{attention}.query_key_value",), **other)


def _names(config: ModelConfig) -> Names:
    outer = "transformer."
    if config.architecture == NEOX:
        outer = "gpt_neox."
        norm = f"{outer}final_layer_norm"
        return _megatron(f"{outer}embed_in", norm, "embed_out", f"{outer}layers.", "attention")
    if config.architecture == STARCODER2:
        return Names(
            "model.embed_tokens",
            "model.norm",
            "lm_head",
            "model.layers.",
            output="self_attn.o_proj",
            up="mlp.c_fc",
            down="mlp.c_proj",
            qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        )
    names = (f"{outer}word_embeddings", f"{outer}ln_f", "lm_head", f"{outer}h.", "self_attention")
    if config.architecture == BLOOM:
        return _megatron(*names, embedding_norm=f"{outer}word_embeddings_layernorm")
    two = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"} if _norms_in_parallel(config.hf) == 2 else {}
    return _megatron(*names, **two)


def describe(architecture: str, given: Mapping[str, Any]) -> ModelConfig:
    present = {_SPELLINGS.get(name, name): value for name, value in given.items() if value is not None}
    hf = {**_DEFAULTS[architecture], **present}
    hidden_size, num_heads = positive(hf, "hidden_size"), positive(hf, "num_attention_heads")
    if hf.get("apply_residual_connection_post_layernorm"):
        raise ModelError(
            "config.json has apply_residual_connection_post_layernorm=true, which is not supported: published BLOOM "
            "models have false"
        )
    inner = {FALCON: "ffn_hidden_size", BLOOM: "n_inner"}.get(architecture, "intermediate_size")
    config = describe_gpt(
        architecture,
        hf,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(architecture, hf, num_heads),
        num_layers=positive(hf, "num_hidden_layers", high=MAX_LAYERS),
        intermediate_size=positive(hf, inner, 4 * hidden_size if architecture in (FALCON, BLOOM) else None),
        max_position=positive(hf, "seq_length", 2048) if architecture == BLOOM else position_limit(hf),
    )
    return replace(config, windows=(whole(hf, "sliding_window", 0),) * config.num_layers)


def _kv_heads(architecture: str, hf: Mapping[str, Any], num_heads: int) -> int:
    if architecture == STARCODER2:
        return positive(hf, "num_key_value_heads", 2)
    if architecture != FALCON:
        return num_heads
    if hf.get("new_decoder_architecture"):
        return positive(hf, "num_kv_heads", num_heads)
    return 1 if hf.get("multi_query", True) else num_heads


def _norms_in_parallel(hf: Mapping[str, Any]) -> int:
    """Of a Falcon: how many norms the two halves of a layer have, 0 where one follows the other."""
    if hf.get("new_decoder_architecture"):
        return positive(hf, "num_ln_in_parallel_attn", 2)
    return 1 if hf.get("parallel_attn", True) else 0


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """A geometric series; beyond a power of two, every other value of the next finer series follows."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    return (*slopes, *(2.0 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)))


def _gpt_config(config: ModelConfig) -> GptConfig:
    hf, scales = config.hf, (config.head_dim**-0.5,) * config.num_layers
    if config.architecture == NEOX:
        return GptConfig(
            str(hf.get("hidden_act") or "gelu"),
            number(hf, "layer_norm_eps", 1e-5),
            scales,
            attention_bias=bool(hf.get("attention_bias", True)),
            positions=False,
            rope=hf,
            parallel=bool(hf.get("use_parallel_residual", True)),
            grouped=True,
        )
    if config.architecture == STARCODER2:
        return GptConfig(
            str(hf.get("hidden_act") or "gelu_pytorch_tanh"),
            number(hf, "norm_epsilon", 1e-5),
            scales,
            bias=bool(hf.get("use_bias", True)),
            positions=False,
            rope=hf,
            window=whole(hf, "sliding_window", 0),
        )
    slopes = alibi_slopes(config.num_heads)
    eps = number(hf, "layer_norm_epsilon", 1e-5)
    if config.architecture == BLOOM:
        return GptConfig(
            "gelu_pytorch_tanh",
            eps,
            scales,
            positions=False,
            slopes=slopes,
            embedding_norm=True,
            grouped=True,
        )
    norms, alibi = _norms_in_parallel(hf), bool(hf.get("alibi", False))
    return GptConfig(
        str(hf.get("activation") or "gelu"),
        eps,
        scales,
        bias=bool(hf.get("bias", False)),
        positions=False,
        rope=None if alibi else hf,
        slopes=tuple(slope * scales[0] for slope in slopes) if alibi else (),  # scaled as the scores are
        parallel=norms > 0,
        shared_norm=norms == 1,
        grouped=True,
    )


def build(config: ModelConfig, factory: LayerFactory) -> DecoderModel:
    return GptVariant(config, factory)


class GptVariant(GptDecoder):
    """GptDecoder under the names of its architecture."""

    def __init__(self, config: ModelConfig, factory: LayerFactory) -> None:
        self._names = _names(config)
        super().__init__(config, _gpt_config(config), factory)

    def loaders(self) -> dict[str, Loader]:
        names = self._names
        loaders = self.head.loaders(self.tokens, f"{names.tokens}.weight", f"{names.head}.weight")
        if self.norm is not None:
            loaders |= self.norm.loaders(names.norm)
        if self.embedding_norm is not None:
            loaders |= self.embedding_norm.loaders(names.embedding_norm)
        for i in range(self.config.num_layers):
            loaders |= self._layer_loaders(f"{names.layer}{i}.", i)
        return loaders

    def _layer_loaders(self, prefix: str, index: int) -> dict[str, Loader]:
        block, names, config = self.blocks[index], self._names, self.config
        loaders = block.attention_norm.loaders(f"{prefix}{names.attention_norm}")
        if block.mlp_norm is not None:
            loaders |= block.mlp_norm.loaders(f"{prefix}{names.mlp_norm}")
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        fused: list[tuple[str, Linear, int, int | None]] = [(names.qkv[0], block.qkv, 0, None)]
        if len(names.qkv) == 3:
            rows = ((0, query), (query, key), (query + key, key))
            fused = [(name, block.qkv, *span) for name, span in zip(names.qkv, rows, strict=True)]
        single = ((names.output, block.output), (names.up, block.up), (names.down, block.down))
        for name, linear, first_row, num_rows in (*fused, *((*part, 0, None) for part in single)):
            loaders |= linear.loaders(f"{prefix}{name}", first_row, num_rows)
        return loaders

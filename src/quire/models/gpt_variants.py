"""GPT-2, GPT-NeoX, OPT, Falcon, BLOOM and StarCoder2: what their config.json means for GptDecoder, and their names of
tensors."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.layers.factory import LayerFactory
from quire.layers.rope import position_limit
from quire.models.gpt_decoder import GptConfig, GptDecoder, Names
from quire.models.model import DecoderModel
from quire.weights.hyperparameters import SIZES, generates, model_config, number, positive, whole

BLOOM, FALCON, GPT2 = "BloomForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel"
NEOX, OPT, STARCODER2 = "GPTNeoXForCausalLM", "OPTForCausalLM", "Starcoder2ForCausalLM"
OPT_SKIPPED = 2  # the first rows of OPT's position table belong to padding

# What a config.json of this architecture may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    BLOOM: {"seq_length": 2048},
    FALCON: {"max_position_embeddings": 2048},
    GPT2: {"n_positions": 1024},
    NEOX: {"partial_rotary_factor": 0.25},
    OPT: {},
    STARCODER2: {},
}
_SIZES = {
    BLOOM: {"intermediate_size": "n_inner", "max_position": "seq_length"},
    FALCON: {"intermediate_size": "ffn_hidden_size"},
    GPT2: {
        "hidden_size": "n_embd",
        "num_heads": "n_head",
        "num_layers": "n_layer",
        "intermediate_size": "n_inner",
        "max_position": "n_positions",
    },
    OPT: {"intermediate_size": "ffn_dim"},
}
# Other spellings of one thing.
_SPELLINGS = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}


def _megatron(outer: str, attention: str, **other: str) -> Names:
    """As BLOOM and Falcon name modules; NeoX has other names outside the layers."""
    names: dict[str, Any] = {
        "tokens": f"{outer}word_embeddings",
        "norm": f"{outer}ln_f",
        "layer": f"{outer}h.",
        "qkv": (f"{attention}.query_key_value",),
        "output": f"{attention}.dense",
        **other,
    }
    return Names(**names, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")


_NAMES = {
    BLOOM: _megatron(
        "transformer.", "self_attention", embedding_norm="transformer.word_embeddings_layernorm"
    ),
    FALCON: _megatron("transformer.", "self_attention"),
    GPT2: Names(
        "transformer.wte",
        "transformer.ln_f",
        "transformer.h.",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        up="mlp.c_fc",
        down="mlp.c_proj",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        positions="transformer.wpe",
        transposed=True,
    ),
    NEOX: _megatron(
        "gpt_neox.",
        "attention",
        tokens="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        layer="gpt_neox.layers.",
        head="embed_out",
    ),
    OPT: Names(
        "model.decoder.embed_tokens",
        "model.decoder.final_layer_norm",
        "model.decoder.layers.",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.out_proj",
        up="fc1",
        down="fc2",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        positions="model.decoder.embed_positions",
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
    ),
    STARCODER2: Names(
        "model.embed_tokens",
        "model.norm",
        "model.layers.",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.o_proj",
        up="mlp.c_fc",
        down="mlp.c_proj",
    ),
}


def describe(architecture: str, given: Mapping[str, Any]) -> ModelConfig:
    spellings = {} if architecture == GPT2 else _SPELLINGS
    present = {spellings.get(name, name): value for name, value in given.items() if value is not None}
    hf = {**_DEFAULTS[architecture], **present}
    names = SIZES | _SIZES.get(architecture, {})
    hidden_size, num_heads = positive(hf, names["hidden_size"]), positive(hf, names["num_heads"])
    if hf.get("apply_residual_connection_post_layernorm"):
        raise ModelError(
            "config.json has apply_residual_connection_post_layernorm=true, which is not supported: published BLOOM "
            "models have false"
        )
    inner = 4 * hidden_size if architecture in (BLOOM, FALCON, GPT2) else None
    rotates = architecture not in (BLOOM, GPT2, OPT)
    config = model_config(
        architecture,
        hf,
        names,
        num_kv_heads=_kv_heads(architecture, hf, num_heads),
        intermediate_size=positive(hf, names["intermediate_size"], inner),
        max_position=position_limit(hf) if rotates else positive(hf, names["max_position"]),
        **generates(hf, tied=architecture != NEOX),
    )
    window = whole(hf, "sliding_window", 0) if architecture == STARCODER2 else 0
    return replace(config, windows=(window,) * config.num_layers)


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
    if config.architecture == GPT2:
        by_layer = bool(hf.get("scale_attn_by_inverse_layer_idx", False))
        scale = scales[0] if hf.get("scale_attn_weights", True) else 1.0
        return GptConfig(
            str(hf.get("activation_function", "gelu_new")),
            number(hf, "layer_norm_epsilon", 1e-5),
            tuple(scale / (layer + 1 if by_layer else 1) for layer in range(config.num_layers)),
        )
    if config.architecture == OPT:
        norm_first = bool(hf.get("do_layer_norm_before", True))  # OPT-350m has norms after
        return GptConfig(
            str(hf.get("activation_function", "relu")),
            1e-5,
            scales,
            bias=bool(hf.get("enable_bias", True)),
            affine=bool(hf.get("layer_norm_elementwise_affine", True)),
            norm_first=norm_first,
            final_norm=norm_first and not hf.get("_remove_final_layer_norm", False),
            embedding_width=positive(hf, "word_embed_proj_dim", config.hidden_size),
            skipped_positions=OPT_SKIPPED,
        )
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
    names = _NAMES[config.architecture]
    if config.architecture == FALCON and _norms_in_parallel(config.hf) == 2:
        names = replace(names, attention_norm="ln_attn", mlp_norm="ln_mlp")
    return GptDecoder(config, _gpt_config(config), names, factory)

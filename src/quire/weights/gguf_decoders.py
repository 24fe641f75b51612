"""Families of models in GGUF files: hyperparameters, names of tensors and orders of rows, as Hugging Face has them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.weights.experts import GPT_OSS, MIXTRAL, OLMOE, gguf_mixture
from quire.weights.gguf_file import GgufKeys, StringArray
from quire.weights.hyperparameters import MAX_LABELS

Config = dict[str, Any]


def partial_rotation(rotated: int, head_dim: int) -> float:
    """The share of a head that is rotated, such that int(head_dim * share) is `rotated` again."""
    return 1.0 if rotated >= head_dim else math.nextafter(rotated / head_dim, 1.0)


def _phi3(keys: GgufKeys, basic: Config) -> Config:
    original = keys.number("rope.scaling.original_context_length", basic["max_position_embeddings"])
    config = {"original_max_position_embeddings": original}
    if window := keys.get("attention.sliding_window"):
        config["sliding_window"] = window
    long, short = keys.floats("rope_factors_long.weight"), keys.floats("rope_factors_short.weight")
    if long is not None and short is not None:
        scaling = {"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}
        if keys.get("rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
        config["rope_scaling"] = scaling
    return config


def _granite(keys: GgufKeys, basic: Config) -> Config:
    return {
        **_biased(keys, basic),
        "attention_multiplier": keys.number("attention.scale", basic["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _biased(keys: GgufKeys, basic: Config) -> Config:
    return {"attention_bias": keys.has("attn_q.bias"), "mlp_bias": keys.has("ffn_up.bias")}


def _llama(keys: GgufKeys, basic: Config) -> Config:
    """Of the models that call themselves llama, Mixtral has experts, and among the others only Mistral a window."""
    window = keys.get("attention.sliding_window")
    if keys.get("expert_count"):
        mixture = gguf_mixture(keys, MIXTRAL, True)
        return {"model_type": "mixtral", **mixture, "sliding_window": window or None}
    config = _biased(keys, basic)
    if window:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config


def _qwen2(keys: GgufKeys, basic: Config) -> Config:
    return {}


def _qwen2moe(keys: GgufKeys, basic: Config) -> Config:
    return {**gguf_mixture(keys, "Qwen2MoeForCausalLM", False), "qkv_bias": keys.has("attn_q.bias")}


def _qwen3moe(keys: GgufKeys, basic: Config) -> Config:
    return {**gguf_mixture(keys, "Qwen3MoeForCausalLM", True), "attention_bias": keys.has("attn_q.bias")}


def _olmoe(keys: GgufKeys, basic: Config) -> Config:
    return {**gguf_mixture(keys, OLMOE, False), "clip_qkv": keys.get("attention.clamp_kqv")}


def _gpt_oss(keys: GgufKeys, basic: Config) -> Config:
    scaling, window = basic["rope_scaling"], keys.number("attention.sliding_window", 128)
    return {
        **gguf_mixture(keys, GPT_OSS, True),
        "rope_scaling": scaling and {**scaling, "truncate": False},  # which files do not say
        "sliding_window": window,
        "gguf_experts": True,
    }


def _olmo2(keys: GgufKeys, basic: Config) -> Config:
    """OLMo 3 is an OLMo 2 with windows; unlike elsewhere, its attention factor is config.json's own."""
    config, window = _biased(keys, basic), keys.get("attention.sliding_window")
    if not window:
        return config
    config |= {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": window}
    if (pattern := keys.get("attention.sliding_window_pattern")) is not None:
        config["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    if basic["rope_scaling"] and keys.get("rope.scaling.attn_factor") is not None:
        factor = keys.number("rope.scaling.attn_factor")
        config["rope_scaling"] = {**basic["rope_scaling"], "attention_factor": factor}
    return config


def _gemma(keys: GgufKeys, basic: Config) -> Config:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(keys: GgufKeys, basic: Config) -> Config:
    """The files do not say by what scores are divided: the largest models have another value than the head's size."""
    largest = {"gemma2": 46, "gemma3": 62}[keys.architecture]  # layers of the 27B models
    by_hidden = basic["num_hidden_layers"] == largest
    scalar = basic["hidden_size"] / basic["num_attention_heads"] if by_hidden else basic["head_dim"]
    if keys.get("attention.scale") is not None:
        scalar = keys.number("attention.scale") ** -2
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.number("attention.sliding_window", 0),
        **{
            name: None if keys.get(name) is None else keys.number(name)
            for name in ("attn_logit_softcapping", "final_logit_softcapping")
        },
    }


def _gemma3(keys: GgufKeys, basic: Config) -> Config:
    pattern = keys.get("attention.sliding_window_pattern")
    config = {**_gemma2(keys, basic), "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0)}
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        config["sliding_window_pattern"] = pattern
    elif pattern is not None:
        config["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    return config


def _starcoder2(keys: GgufKeys, basic: Config) -> Config:
    return {
        "norm_epsilon": basic["rms_norm_eps"],
        "use_bias": keys.has("attn_q.bias"),
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": keys.number("attention.sliding_window", 0),
    }


def _neox(keys: GgufKeys, basic: Config) -> Config:
    return {
        "layer_norm_eps": basic["rms_norm_eps"],
        "use_parallel_residual": bool(keys.get("use_parallel_residual")),
        "attention_bias": keys.has("attn_qkv.bias"),
        "hidden_act": "gelu",
    }


def _falcon(keys: GgufKeys, basic: Config) -> Config:
    kv_heads = basic["num_key_value_heads"]
    return {
        "layer_norm_epsilon": basic["rms_norm_eps"],
        "ffn_hidden_size": basic["intermediate_size"],
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": kv_heads != 1,
        "num_ln_in_parallel_attn": 2 if keys.has("attn_norm_2.weight") else 1,
        "multi_query": kv_heads == 1,
        "bias": keys.has("attn_qkv.bias"),
    }


def _bloom(keys: GgufKeys, basic: Config) -> Config:
    return {
        "layer_norm_epsilon": basic["rms_norm_eps"],
        "n_inner": basic["intermediate_size"],
        "seq_length": basic["max_position_embeddings"],
    }


def _gpt2(keys: GgufKeys) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": keys.number("embedding_length"),
        "n_inner": keys.number("feed_forward_length"),
        "n_layer": keys.number("block_count"),
        "n_head": keys.number("attention.head_count"),
        "n_positions": keys.number("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _t5(keys: GgufKeys) -> Config:
    """The files do not name the activation: by llama.cpp a gate has GELU and a plain matrix ReLU."""
    if keys.has("attn_rel_b.weight", "enc.blk.1."):
        raise keys.error(
            "every layer has its own table of distances, as in UMT5: not known here, only T5 and mT5"
        )
    layers = keys.number("block_count")
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": keys.number("embedding_length"),
        "d_ff": keys.number("feed_forward_length"),
        "d_kv": keys.number("attention.key_length"),
        "num_heads": keys.number("attention.head_count"),
        "num_layers": layers,
        "num_decoder_layers": keys.number("decoder_block_count", layers),
        "n_positions": keys.number("context_length"),
        "relative_attention_num_buckets": keys.number("attention.relative_buckets_count"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "feed_forward_proj": "gated-gelu" if keys.has("ffn_gate.weight", "enc.blk.0.") else "relu",
        "decoder_start_token_id": keys.number("decoder_start_token_id", 0),
    }


def _encoder(keys: GgufKeys) -> Config:
    """BERT; RoBERTa too, whose table of positions begins with the first token's in GGUF, and whose classifier is BERT's
    by other names; DistilBERT, which has no token types; or ModernBERT."""
    hidden, inner = keys.number("embedding_length"), keys.number("feed_forward_length")
    layers, heads = keys.number("block_count"), keys.number("attention.head_count")
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "max_position_embeddings": keys.number("context_length")}
    kind, head = _classifier(keys)
    eps = keys.number("attention.layer_norm_epsilon")
    if keys.architecture == "bert" and not keys.has("token_types.weight", ""):
        distil = {"dim": hidden, "hidden_dim": inner, "n_layers": layers, "n_heads": heads}
        config = {**sizes, **distil, "architectures": [f"DistilBert{kind}"], "model_type": "distilbert"}
        return {**config, **head, "layer_norm_eps": eps}
    if keys.architecture == "bert":
        return {
            "architectures": [f"Bert{kind}"],
            "model_type": "bert",
            **sizes,
            **head,
            "layer_norm_eps": eps,
            "type_vocab_size": keys.rows("token_types.weight"),
            "hidden_act": "gelu",
        }
    return {
        "architectures": [f"ModernBert{kind}"],
        "model_type": "modernbert",
        **sizes,
        **head,
        "norm_eps": eps,
        "norm_bias": keys.has("output_norm.bias", ""),
        "attention_bias": keys.has("attn_qkv.bias"),
        "mlp_bias": keys.has("ffn_up.bias"),
        "local_attention": keys.number("attention.sliding_window"),
        "global_attn_every_n_layers": keys.number("attention.sliding_window_pattern", 3),
        "global_rope_theta": keys.number("rope.freq_base", 160000.0),
        "local_rope_theta": keys.number("rope.freq_base_swa", 10000.0),
        "hidden_activation": "gelu",
    }


def _classifier(keys: GgufKeys) -> tuple[str, Config]:
    """The end of the architecture's name, and what config.json has of the classes."""
    parts = [name for name in ("cls.weight", "cls.output.weight") if keys.has(name, "")]
    if not parts:
        return "Model", {}
    if len(parts) == 1:
        raise keys.error(
            f"{parts[0]} is one of the two matrices of a classifier: the conversion of BERT leaves out the other, "
            "the pooler's, without which scores are not the model's: use the Hugging Face folder"
        )
    count, names = keys.rows("cls.output.weight"), keys.get("classifier.output_labels")
    if not 1 <= count <= MAX_LABELS:
        raise keys.error(
            f"cls.output.weight has {count} classes, where 1 to {MAX_LABELS} can be: convert it again"
        )
    labels = [f"LABEL_{i}" for i in range(count)] if names is None else names
    if not isinstance(labels, list | StringArray) or len(labels) != count:
        raise keys.error(
            f"classifier.output_labels={names!r:.80} are not the names of {count} classes: convert the model again"
        )
    # Of ModernBERT; its files do not say which tokens are pooled, and llama.cpp takes all.
    pooling = "cls" if keys.get("pooling_type") == 2 else "mean"
    head = {"classifier_pooling": pooling, "classifier_bias": keys.has("cls.bias", "")}
    return "ForSequenceClassification", {"id2label": dict(enumerate(labels)), **head}


# By GGUF's name: the architecture, its model_type, and what its config.json has beside the usual sizes.
DECODERS: dict[str, tuple[str, str, Callable[[GgufKeys, Config], Config]]] = {
    "bloom": ("BloomForCausalLM", "bloom", _bloom),
    "falcon": ("FalconForCausalLM", "falcon", _falcon),
    "gemma": ("GemmaForCausalLM", "gemma", _gemma),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "gpt-oss": (GPT_OSS, "gpt_oss", _gpt_oss),
    "gptneox": ("GPTNeoXForCausalLM", "gpt_neox", _neox),
    "granite": ("GraniteForCausalLM", "granite", _granite),
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _olmo2),
    "olmoe": (OLMOE, "olmoe", _olmoe),
    "phi3": ("Phi3ForCausalLM", "phi3", _phi3),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _qwen2),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2moe),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _biased),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3moe),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", _biased),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2", _starcoder2),
}

OTHERS: dict[str, Callable[[GgufKeys], Config]] = {
    "bert": _encoder,
    "gpt2": _gpt2,
    "modern-bert": _encoder,
    "t5": _t5,
}
MIXTURES = ("gpt-oss", "llama", "olmoe", "qwen2moe", "qwen3moe")  # may have experts
ROTATED_WHOLE = (*MIXTURES, "qwen2", "qwen3")  # whose heads are never rotated in part

LLAMA_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MEGATRON = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_FALCON = _MEGATRON | {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"}
_NEOX = _MEGATRON | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"}
_TRANSFORMER = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "cls.output": "classifier",
}
# Names of the modules outside the layers, and of those in them, where these are not Llama's.
TOPS: Mapping[str, Mapping[str, str]] = {
    "bert": {**_BERT, "cls": "pooler.dense"},
    "distilbert": {**_BERT, "cls": "pre_classifier"},
    "modern-bert": {
        "token_embd": "model.embeddings.tok_embeddings",
        "token_embd_norm": "model.embeddings.norm",
        "output_norm": "model.final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    },
    "bloom": {**_TRANSFORMER, "token_embd_norm": "transformer.word_embeddings_layernorm"},
    "falcon": _TRANSFORMER,
    "gpt2": {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "gptneox": {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    "t5": {
        "token_embd": "shared",
        "output": "lm_head",
        "enc.output_norm": "encoder.final_layer_norm",
        "dec.output_norm": "decoder.final_layer_norm",
    },
}
BLOCKS: Mapping[str, Mapping[str, str]] = {
    "bert": {
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
    "distilbert": {
        "attn_q": "attention.q_lin",
        "attn_k": "attention.k_lin",
        "attn_v": "attention.v_lin",
        "attn_output": "attention.out_lin",
        "attn_output_norm": "sa_layer_norm",
        "ffn_up": "ffn.lin1",
        "ffn_down": "ffn.lin2",
        "layer_output_norm": "output_layer_norm",
    },
    "modern-bert": {
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
    },
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    },
    "bloom": _FALCON,
    "falcon": _FALCON,
    "gemma2": {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"},
    "gpt2": {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    "gptneox": _NEOX,
    "olmo2": _AFTER,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
PREFIXES = {
    "bert": "encoder.layer",
    "distilbert": "transformer.layer",
    "bloom": "transformer.h",
    "falcon": "transformer.h",
    "gpt2": "transformer.h",
    "gptneox": "gpt_neox.layers",
    "enc.": "encoder.block",  # T5's two halves
    "dec.": "decoder.block",
}
PAIRED = ("llama", "granite", "smollm3")  # rows of q and k are ordered for rotation over neighbours
# Part of the config, or, the last, of T5's first checkpoints, which do not use it either.
DERIVED = ("rope_freqs", "attn_rot_embd", "rope_factors_long", "rope_factors_short", "cross_attn_rel_b")


def block_names(architecture: str, config: Mapping[str, Any]) -> Mapping[str, str]:
    """A Falcon with two norms has them under other names, with attention's second."""
    if architecture == "falcon" and config.get("num_ln_in_parallel_attn") == 2:
        return {**_FALCON, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
    if architecture == "t5":
        return _t5_block("wi_1" if str(config["feed_forward_proj"]).startswith("gated") else "wi")
    return BLOCKS.get(architecture, {})


def _t5_block(up: str) -> dict[str, str]:
    """Names in both halves; the decoder has cross-attention before its feed-forward."""
    names = {"dec.cross_attn_norm": "layer.1.layer_norm"}
    for half, mlp in (("enc.", "layer.1."), ("dec.", "layer.2.")):
        names |= {
            f"{half}attn_norm": "layer.0.layer_norm",
            f"{half}attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
            f"{half}ffn_norm": f"{mlp}layer_norm",
            f"{half}ffn_gate": f"{mlp}DenseReluDense.wi_0",
            f"{half}ffn_up": f"{mlp}DenseReluDense.{up}",
            f"{half}ffn_down": f"{mlp}DenseReluDense.wo",
        }
        names |= {f"{half}attn_{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"}
    return names | {f"dec.cross_attn_{part}": f"layer.1.EncDecAttention.{part}" for part in "qkvo"}


def family_layout(
    architecture: str, config: Mapping[str, Any], part: str, name: str, tensor: Tensor
) -> Tensor:
    """Undoes what the conversion did to a tensor: fused projections are in groups again, norms without their one."""
    if part == "attn_qkv" and architecture in ("bloom", "falcon", "gptneox"):
        return _grouped(tensor, config["num_attention_heads"], config["num_key_value_heads"])
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor - 1
    if name in ("token_types.weight", "cls.output.weight"):
        return tensor.reshape(-1, tensor.shape[-1])  # older conversions dropped a dimension of size one
    return tensor


def _grouped(tensor: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Rows of all queries, all keys, all values become groups: the queries of a KV head, its key, its value."""
    heads = tensor.unflatten(0, (num_heads + 2 * num_kv_heads, -1))
    queries = heads[:num_heads].unflatten(0, (num_kv_heads, -1))
    keys, values = heads[num_heads:].unflatten(0, (2, num_kv_heads, 1)).unbind(0)
    return torch.cat((queries, keys, values), 1).reshape(tensor.shape)

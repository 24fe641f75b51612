"""Tiny random checkpoints of every architecture and variant, made by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 97
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # large, so that logits differ
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}


def llama(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**{**LLAMA, **changes})


def rope(**parameters: Any) -> transformers.PreTrainedConfig:
    return llama(rope_parameters=parameters)


def mistral(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.MistralConfig(**{**LLAMA, **changes})


def qwen2(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.Qwen2Config(**{**LLAMA, **changes})


def qwen3(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.Qwen3Config(**{**LLAMA, "head_dim": 16, **changes})


MIXTURE = {**LLAMA, "num_experts_per_tok": 2, "norm_topk_prob": False}


def mixtral(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.MixtralConfig(
        **{**LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2, **changes}
    )


def qwen2_moe(**changes: Any) -> transformers.PreTrainedConfig:
    basic = {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    return transformers.Qwen2MoeConfig(**{**MIXTURE, **basic, **changes})


def qwen3_moe(**changes: Any) -> transformers.PreTrainedConfig:
    basic = {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16}
    return transformers.Qwen3MoeConfig(**{**MIXTURE, **basic, **changes})


def olmoe(**changes: Any) -> transformers.PreTrainedConfig:
    basic = {"num_experts": 8, "intermediate_size": 32, "eos_token_id": 2}
    return transformers.OlmoeConfig(**{**MIXTURE, **basic, **changes})


def opt(**changes: Any) -> transformers.PreTrainedConfig:
    basic = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "ffn_dim": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "init_std": 0.3,
    }
    return transformers.OPTConfig(**{**basic, **changes})


def gpt2(**changes: Any) -> transformers.PreTrainedConfig:
    basic = {
        "vocab_size": VOCAB,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.GPT2Config(**{**basic, **changes})


PHI3_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.0, 2.5, 4.0, 7.0],
}


def phi3(**changes: Any) -> transformers.PreTrainedConfig:
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.Phi3Config(**{**LLAMA, **ends, **changes})


def longrope(original: int, **parameters: Any) -> transformers.PreTrainedConfig:
    rope = {**PHI3_ROPE, "original_max_position_embeddings": original, **parameters}
    return phi3(rope_parameters=rope, original_max_position_embeddings=original)


def granite(**changes: Any) -> transformers.PreTrainedConfig:
    scales = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
    return transformers.GraniteConfig(**{**LLAMA, **scales, "logits_scaling": 3.0, **changes})


def olmo2(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.Olmo2Config(**{**LLAMA, **changes})


def olmo3(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.Olmo3Config(**{**LLAMA, "num_hidden_layers": 4, "sliding_window": 7, **changes})


def two_ropes(**changes: float) -> dict[str, dict[str, Any]]:
    """Of OLMo 3: yarn where a layer sees everything."""
    inside = {"rope_type": "default", "rope_theta": 100.0}
    return {"full_attention": {**YARN_ROPE, **changes}, "sliding_attention": inside}


def gpt_oss(**changes: Any) -> transformers.PreTrainedConfig:
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
    basic = {
        "num_hidden_layers": 4, "sliding_window": 7, "head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2,
        "rope_parameters": {**rope, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False}, "swiglu_limit": 0.8,
    }  # fmt: skip
    return transformers.GptOssConfig(**{**LLAMA, **basic, **changes})


def smollm3(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.SmolLM3Config(**{**LLAMA, "pad_token_id": 0, "no_rope_layer_interval": 2, **changes})


def gemma(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.GemmaConfig(**{**LLAMA, "head_dim": 16, **changes})


def gemma2(**changes: Any) -> transformers.PreTrainedConfig:
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}
    return transformers.Gemma2Config(
        **{**LLAMA, "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 8, **caps, **changes}
    )


def gemma3(**changes: Any) -> transformers.PreTrainedConfig:
    basic = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 20, "sliding_window_pattern": 3}
    return transformers.Gemma3TextConfig(**{**LLAMA, **basic, **changes})


def gemma3_ropes(**parameters: Any) -> transformers.PreTrainedConfig:
    local = {"rope_type": "default", "rope_theta": 30.0}
    return gemma3(rope_parameters={"full_attention": parameters, "sliding_attention": local})


GPT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def starcoder2(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.Starcoder2Config(
        **{**GPT, "intermediate_size": 80, "num_key_value_heads": 2, **changes}
    )


def neox(**changes: Any) -> transformers.PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    return transformers.GPTNeoXConfig(**{**GPT, "intermediate_size": 80, "rope_parameters": rope, **changes})


def falcon(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.FalconConfig(**{**GPT, **changes})


def bloom(**changes: Any) -> transformers.PreTrainedConfig:
    basic = {**GPT, "n_layer": 3, "n_head": 4, **changes}
    return transformers.BloomConfig(**{k: v for k, v in basic.items() if not k.startswith("num_")})


VARIANTS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": llama,
    "llama-one-layer": lambda: llama(num_hidden_layers=1),
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-without-groups": lambda: llama(num_key_value_heads=6),
    "llama-with-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama-with-head-dim": lambda: llama(head_dim=16),
    "llama-gelu": lambda: llama(hidden_act="gelu"),
    "llama-gelu-tanh": lambda: llama(hidden_act="gelu_pytorch_tanh", mlp_bias=True),
    "llama-rope-theta": lambda: rope(rope_type="default", rope_theta=500.0),
    "llama-rope-linear": lambda: rope(rope_type="linear", rope_theta=100.0, factor=3.0),
    "llama-rope-dynamic": lambda: rope(rope_type="dynamic", rope_theta=100.0, factor=2.0),
    "llama-rope-llama3": lambda: rope(**LLAMA3_ROPE),
    "llama-rope-yarn": lambda: rope(**YARN_ROPE),
    "llama-rope-yarn-tuned": lambda: rope(
        **YARN_ROPE, mscale=0.8, mscale_all_dim=0.5, beta_fast=16, truncate=False
    ),
    "mistral-window": lambda: mistral(sliding_window=7),
    "mistral-without-window": lambda: mistral(sliding_window=None),
    "qwen2": lambda: qwen2(tie_word_embeddings=True),
    "qwen2-window-in-last-layers": lambda: qwen2(
        use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": qwen3,
    "qwen3-with-biases-and-window": lambda: qwen3(
        attention_bias=True, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "phi3": phi3,
    "phi3-window-multi-query": lambda: phi3(sliding_window=6, num_key_value_heads=1),
    "phi3-longrope-short": lambda: longrope(64),
    "phi3-partial-tied": lambda: phi3(
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "mistral-small": lambda: mistral(head_dim=12, sliding_window=None),
    "granite": granite,
    "granite-tied-with-biases": lambda: granite(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, num_key_value_heads=1
    ),
    "olmo2": olmo2,
    "olmo2-without-groups-with-biases": lambda: olmo2(
        num_key_value_heads=6, attention_bias=True, tie_word_embeddings=True
    ),
    "smollm3": smollm3,
    "smollm3-window-untied": lambda: smollm3(
        use_sliding_window=True, sliding_window=5, tie_word_embeddings=False, no_rope_layers=[0, 1, 0]
    ),
    "gemma": gemma,
    "gemma-multi-query-wide": lambda: gemma(num_key_value_heads=1, head_dim=256, initializer_range=0.15),
    "gemma2": gemma2,
    "gemma2-without-caps-untied": lambda: gemma2(
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
        num_key_value_heads=6,
    ),
    "gemma3": gemma3,
    "gemma3-wide-linear": lambda: gemma3_ropes(rope_type="linear", rope_theta=500.0, factor=8.0),
    "gemma3-untied-256": lambda: gemma3(
        head_dim=256, tie_word_embeddings=False, num_key_value_heads=1, initializer_range=0.15
    ),
    "starcoder2": starcoder2,
    "starcoder2-window-multi-query-plain": lambda: starcoder2(
        sliding_window=6, num_key_value_heads=1, use_bias=False, tie_word_embeddings=False
    ),
    "neox": neox,
    "neox-one-after-another-tied": lambda: neox(
        use_parallel_residual=False, attention_bias=False, hidden_act="gelu_fast", tie_word_embeddings=True
    ),
    "falcon-7b": falcon,
    "falcon-40b": lambda: falcon(
        new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=72, tie_word_embeddings=False
    ),
    "falcon-11b": lambda: falcon(
        new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=True
    ),
    "falcon-rw": lambda: falcon(alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "bloom": bloom,
    "bloom-six-heads-untied": lambda: bloom(n_head=6, tie_word_embeddings=False),
    "mixtral": mixtral,
    "mixtral-one-expert-tied": lambda: mixtral(num_experts_per_tok=1, tie_word_embeddings=True),
    "mixtral-window-without-groups": lambda: mixtral(
        sliding_window=7, num_key_value_heads=6, num_experts_per_tok=4
    ),
    "qwen2-moe": qwen2_moe,
    "qwen2-moe-dense-layers": lambda: qwen2_moe(
        decoder_sparse_step=2, norm_topk_prob=True, qkv_bias=False, num_experts_per_tok=4
    ),
    "qwen2-moe-window": lambda: qwen2_moe(use_sliding_window=True, sliding_window=5, mlp_only_layers=[1]),
    "qwen3-moe": lambda: qwen3_moe(norm_topk_prob=True),
    "qwen3-moe-mixed": lambda: qwen3_moe(
        num_experts_per_tok=4, attention_bias=True, mlp_only_layers=[0], tie_word_embeddings=True
    ),
    "qwen3-moe-window": lambda: qwen3_moe(
        use_sliding_window=True, sliding_window=6, num_experts_per_tok=1, moe_intermediate_size=20
    ),
    "olmoe": olmoe,
    "olmoe-clipped-four": lambda: olmoe(
        num_experts_per_tok=4, norm_topk_prob=True, clip_qkv=0.8, attention_bias=True
    ),
    "olmo3": olmo3,
    "olmo3-two-ropes-without-groups": lambda: olmo3(
        num_key_value_heads=6, attention_bias=True, rope_parameters=two_ropes()
    ),
    "gpt-oss": gpt_oss,
    "gpt-oss-multi-query": lambda: gpt_oss(
        num_key_value_heads=1,
        num_experts_per_tok=1,
        layer_types=["full_attention", *["sliding_attention"] * 3],
    ),
    "opt": opt,
    "opt-350m": lambda: opt(word_embed_proj_dim=32, do_layer_norm_before=False),
    "opt-gelu-untied": lambda: opt(activation_function="gelu", tie_word_embeddings=False),
    "opt-plain": lambda: opt(enable_bias=False, layer_norm_elementwise_affine=False),
    "opt-without-final-norm": lambda: opt(_remove_final_layer_norm=True),
    "gpt2": gpt2,
    "gpt2-scales-by-layer": lambda: gpt2(scale_attn_by_inverse_layer_idx=True, n_inner=72),
    "gpt2-unscaled-untied": lambda: gpt2(scale_attn_weights=False, tie_word_embeddings=False),
}


def save(folder: Path, config: transformers.PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Saves a random model of this config and returns it; biases and norms are random too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    model.save_pretrained(folder)
    return model


def prompts(*lengths: int) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    """[length, vocab], one full forward pass without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()

"""Workloads that every engine is measured on: seeded lengths, random token ids, no end of sequence.

Shapes are published architectures with random weights: speed does not depend on what the weights say. The
lengths of `sharegpt` and `alpaca` have the means of the PagedAttention paper.
"""

import math
import random
from typing import Any

from quire.weights.architectures import SHAPES as PUBLISHED

Lengths = list[tuple[int, int]]  # (prompt tokens, output tokens)

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16", "dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "llama1b": _LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "smol135m": _LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": _LLAMA | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "opt13b": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 5120, "ffn_dim": 20480,
        "num_hidden_layers": 40, "num_attention_heads": 40, "vocab_size": 50272,
        "max_position_embeddings": 2048, "word_embed_proj_dim": 5120, "do_layer_norm_before": True,
        "activation_function": "relu", "torch_dtype": "float16", "dtype": "float16",
        "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    },
}  # fmt: skip
SHAPES["gemma-3-4b"] = PUBLISHED["gemma-3-4b"] | {"max_position_embeddings": 8192, "torch_dtype": "bfloat16"}

CASES = {  # name -> (lengths, requests)
    "b1": ("fixed:128/256", 1),
    "b16": ("fixed:128/256", 16),
    "b64": ("fixed:128/256", 64),
    "b256": ("fixed:128/256", 256),
    "sharegpt": ("sharegpt", 1024),
    "sharegpt512": ("sharegpt", 512),  # batching policies are compared on it: static batches take their time
    "alpaca": ("alpaca", 2048),
    "prefill": ("fixed:4096/1", 64),
}
ROWS = {  # the comparisons that are recorded
    "llama8b": ("b1", "b64", "b256", "sharegpt", "prefill"),
    "llama1b": ("b1", "b64", "b256", "sharegpt", "alpaca"),
    "smol135m": ("b1", "b64", "b256", "sharegpt", "alpaca"),
    "qwen3-30b-a3b": ("b1", "b64"),
    "opt13b": ("b1", "b64", "sharegpt", "alpaca"),
    "gemma-3-4b": ("b64", "sharegpt"),
}


def lengths(name: str, count: int, seed: int = 0) -> Lengths:
    rng = random.Random(seed)
    if name == "sharegpt":
        return [
            (_lognormal(rng, 161, 1.0, 4, 1024), _lognormal(rng, 338, 0.9, 4, 1024)) for _ in range(count)
        ]
    if name == "alpaca":
        return [(_lognormal(rng, 19, 0.5, 4, 256), _lognormal(rng, 58, 1.0, 4, 512)) for _ in range(count)]
    if name.startswith("fixed:"):
        prompt, output = map(int, name[6:].split("/"))
        return [(prompt, output)] * count
    raise ValueError(f"lengths {name!r} are not known: sharegpt, alpaca or fixed:IN/OUT")


def prompts(sizes: Lengths, vocabulary: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, vocabulary - 10) for _ in range(prompt)] for prompt, _ in sizes]


def _lognormal(rng: random.Random, mean: float, sigma: float, low: int, high: int) -> int:
    mu = math.log(mean) - sigma * sigma / 2
    return max(low, min(high, round(rng.lognormvariate(mu, sigma))))

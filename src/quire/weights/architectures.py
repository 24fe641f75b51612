"""Architectures by name: what is served, and the config.json of published ones. No weights, no torch.

The published ones are for `--load-format dummy` and `--device simulated`, where only a model's shape matters.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.config import Task
from quire.core.errors import ModelError, WeightsError
from quire.weights.builtin import is_builtin, is_builtin_encoder
from quire.weights.gguf_file import GgufFile
from quire.weights.hub import snapshot_folder

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int, **other: Any
) -> dict[str, Any]:
    return _LLAMA | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **other,
    }


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return _OPT | {
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


_MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_FLAN_T5: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": 32128,
    "n_positions": 512,
    "d_kv": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def _flan_t5(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return _FLAN_T5 | {"d_model": hidden, "d_ff": inner, "num_layers": layers, "num_heads": heads}


_GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
}
_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": None,
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "flan-t5-small": _flan_t5(512, 1024, 8, 6),
    "flan-t5-base": _flan_t5(768, 2048, 12, 12),
    "flan-t5-large": _flan_t5(1024, 2816, 24, 16),
    "flan-t5-xl": _flan_t5(2048, 5120, 24, 32),
    "flan-t5-xxl": _flan_t5(4096, 10240, 24, 64),
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "llama-7b": _llama(4096, 11008, 32, 32, 32, 32000, 2048, torch_dtype="float16"),
    "llama-13b": _llama(5120, 13824, 40, 40, 40, 32000, 2048, torch_dtype="float16"),
    "llama-1b": _llama(2048, 8192, 16, 32, 8, 128256, 8192, rope_theta=5e5, tie_word_embeddings=True),
    "llama-8b": _llama(4096, 14336, 32, 32, 8, 128256, 8192, rope_theta=5e5),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256, 131072, rope_theta=5e5),
    "llama-70b": _llama(8192, 28672, 80, 64, 8, 128256, 8192, rope_theta=5e5),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32000, 32768, rope_theta=1e6, **_MISTRAL),
    "mixtral-8x7b": _llama(4096, 14336, 32, 32, 8, 32000, 32768, rope_theta=1e6, **_MIXTRAL),
    "qwen3-30b-a3b": _llama(2048, 6144, 48, 32, 4, 151936, 40960, rope_theta=1e6, **_QWEN3_MOE),
    "gemma-3-4b": _llama(2560, 10240, 34, 8, 4, 262208, 131072, **_GEMMA3),
    "gpt-oss-20b": _llama(2880, 2880, 24, 64, 8, 201088, 131072, **_GPT_OSS),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49152, 8192, rope_theta=1e5, tie_word_embeddings=True),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One that is served, by its name in config.json."""

    file: str  # in models/
    models: str  # published ones, for people
    gguf: str = ""  # its name in GGUF files; empty: these are not read
    windows: bool = False  # sliding windows of attention, where config.json has any
    task: Task = "generate"
    encoder_decoder: bool = False  # the prompt goes through an encoder

    @property
    def lora(self) -> bool:
        """Adapters add to every matrix of a model that generates, those of its encoder included."""
        return self.task == "generate"


# Encoders take whole texts: for a vector, masked tokens, or classes.
_KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification")
_GGUF_ENCODERS = {"bert": "bert", "modernbert": "modern-bert"}  # by the file in models/
_ENCODERS = {
    f"{family}{kind}": Architecture(
        file,
        "embeddings, masked words, classes",
        "" if kind == "ForMaskedLM" else _GGUF_ENCODERS[file],
        task="embed",
    )
    for family in ("Bert", "DistilBert", "ModernBert", "Roberta", "XLMRoberta")
    for file in ("modernbert" if family == "ModernBert" else "bert",)
    for kind in _KINDS
}
KNOWN: Mapping[str, Architecture] = {
    "BartForConditionalGeneration": Architecture("bart", "BART, DistilBART", encoder_decoder=True),
    "BloomForCausalLM": Architecture("gpt_variants", "BLOOM, BLOOMZ", "bloom"),
    "FalconForCausalLM": Architecture("gpt_variants", "Falcon 7B, 40B, 11B, RW", "falcon"),
    "GPT2LMHeadModel": Architecture("gpt_variants", "GPT-2", "gpt2"),
    "GPTNeoXForCausalLM": Architecture("gpt_variants", "GPT-NeoX, Pythia", "gptneox"),
    "GemmaForCausalLM": Architecture("llama", "Gemma 1", "gemma"),
    "Gemma2ForCausalLM": Architecture("llama", "Gemma 2", "gemma2", windows=True),
    "Gemma3ForCausalLM": Architecture("llama", "Gemma 3 270M and 1B", "gemma3", windows=True),
    "GptOssForCausalLM": Architecture("gpt_oss", "gpt-oss-20b, gpt-oss-120b", "gpt-oss", windows=True),
    "GraniteForCausalLM": Architecture("llama", "Granite 3", "granite"),
    "LlamaForCausalLM": Architecture("llama", "Llama 1, 2 and 3, SmolLM 1 and 2, Yi, Falcon 3", "llama"),
    "MT5ForConditionalGeneration": Architecture("t5", "mT5", "t5", encoder_decoder=True),
    "MistralForCausalLM": Architecture("llama", "Mistral 7B, Nemo, Small", "llama", windows=True),
    "MixtralForCausalLM": Architecture("mixture", "Mixtral", "llama", windows=True),
    "OPTForCausalLM": Architecture("gpt_variants", "OPT"),
    "Olmo2ForCausalLM": Architecture("llama", "OLMo 2", "olmo2"),
    "Olmo3ForCausalLM": Architecture("llama", "OLMo 3", "olmo2", windows=True),
    "OlmoeForCausalLM": Architecture("mixture", "OLMoE", "olmoe"),
    "Phi3ForCausalLM": Architecture("llama", "Phi-3, Phi-3.5, Phi-4", "phi3", windows=True),
    "Qwen2ForCausalLM": Architecture("llama", "Qwen 2 and 2.5, QwQ", "qwen2", windows=True),
    "Qwen3ForCausalLM": Architecture("llama", "Qwen 3", "qwen3", windows=True),
    "Qwen2MoeForCausalLM": Architecture("mixture", "Qwen1.5-MoE, Qwen2-MoE", "qwen2moe", windows=True),
    "Qwen3MoeForCausalLM": Architecture(
        "mixture", "Qwen3-30B-A3B, Qwen3-235B-A22B", "qwen3moe", windows=True
    ),
    "SmolLM3ForCausalLM": Architecture("llama", "SmolLM3", "smollm3", windows=True),
    "Starcoder2ForCausalLM": Architecture("gpt_variants", "StarCoder2", "starcoder2", windows=True),
    "T5ForConditionalGeneration": Architecture("t5", "T5, T5 1.1, Flan-T5", "t5", encoder_decoder=True),
    **_ENCODERS,
}
ENCODERS = frozenset(_ENCODERS)

# Architectures with images whose text part is one that is served: its config is `text_config`, of this model_type.
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": ("gemma3_text", "Gemma3ForCausalLM"),
    "Mistral3ForConditionalGeneration": ("mistral", "MistralForCausalLM"),
}


def task_of(model: str | None, revision: str | None = None) -> Task:
    """What this model is for. "generate" for an unreadable folder: opening it gives the error.

    The small files of a hub model are downloaded for this. Raises WeightsError if the hub has no such model.
    """
    if model is None or is_builtin(model) or model in SHAPES:
        return "generate"
    if model.lower().endswith(".gguf"):
        with suppress(ModelError, WeightsError, OSError):
            architecture = GgufFile(Path(model).expanduser()).metadata.get("general.architecture")
            return "embed" if architecture in _GGUF_ENCODERS.values() else "generate"
        return "generate"
    if is_builtin_encoder(model, revision):
        return "embed"
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
            return "generate"
        folder = snapshot_folder(model, revision=revision, with_weights=False)
    if (folder / "modules.json").exists():  # of sentence-transformers, whose models may be decoders
        return "embed"
    names = _architectures(folder / "config.json")
    embeds = any(name.endswith(_KINDS) and not name.endswith("LMHeadModel") for name in names)
    return "embed" if embeds else "generate"


def _architectures(path: Path) -> list[Any]:
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError):
        return []
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []

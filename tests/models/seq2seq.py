"""Tiny random encoder-decoder checkpoints, made by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 97
T5 = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "d_kv": 12,
    "d_ff": 80,
    "num_layers": 3,
    "num_heads": 6,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "forced_eos_token_id": None,
}
SMALL = {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6}


def t5(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.T5Config(**{**T5, **changes})


def flan(**changes: Any) -> transformers.PreTrainedConfig:
    return t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **changes)


def mt5(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.MT5Config(**{**T5, **changes})


def bart(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.BartConfig(**{**BART, **changes})


VARIANTS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "t5": lambda: t5(
        num_decoder_layers=2, relative_attention_num_buckets=8, relative_attention_max_distance=20
    ),
    "t5-gelu": lambda: t5(feed_forward_proj="gelu", d_kv=16),
    "flan-untied": flan,
    "flan-silu": lambda: t5(feed_forward_proj="gated-silu", d_kv=16),
    "mt5-untied": mt5,
    "mt5": lambda: mt5(num_decoder_layers=2),
    "bart": bart,
    "bart-scaled-untied-relu": lambda: bart(
        scale_embedding=True, activation_function="relu", decoder_layers=1
    ),
}


def save(folder: Path, config: transformers.PreTrainedConfig, untied: bool = False) -> Any:
    """Saves a random model of this config and returns it. Weights of tiny ones are large, so that logits differ."""
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters() if config.vocab_size == VOCAB else ():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
            else:
                parameter.normal_(0.0, _deviation(config, name))
    if untied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(config.vocab_size, config.d_model) * 0.3)
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None  # `generate` is told the ends
    return model


def _deviation(config: transformers.PreTrainedConfig, name: str) -> float:
    """Of a matrix. Sums that are normalised afterwards, as BART's, forget what came before."""
    if config.model_type == "bart":
        return 1.0 if "shared" in name or "positions" in name else 0.3 if "encoder_attn" in name else 0.1
    return 2.0 if "relative" in name else 0.09 if "shared" in name else 0.3


def prompts(*lengths: int) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def generate(model: Any, prompt: list[int], max_tokens: int, **settings: Any) -> list[list[int]]:
    """The outputs of transformers, best first, each up to its end."""
    ends = settings.pop("ends", ())
    config = transformers.GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        decoder_start_token_id=model.config.decoder_start_token_id,
        **settings,
    )
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config
        )
    outputs = []
    for tokens in found[:, 1:].tolist():
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        outputs.append(tokens[:end])
    return outputs

"""Which file serves which architecture. Files are imported when they are needed."""

import importlib
from collections.abc import Mapping
from typing import Any

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.layers.factory import LayerFactory
from quire.models.model import DecoderModel, Encoder
from quire.weights.architectures import ENCODERS

# Each file has describe(architecture, hf) -> ModelConfig and build(config, factory) -> DecoderModel.
_FILES = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "OPTForCausalLM": "opt",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
}


# The same for encoders, whose build gives an Encoder.
_ENCODER_FILES = dict.fromkeys(sorted(ENCODERS), "bert")


def architectures() -> tuple[str, ...]:
    """Every architecture that can generate."""
    return tuple(sorted(_FILES))


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    """The hyperparameters in a config.json. An unknown architecture is refused with the list of known ones."""
    names = _names(hf)
    for name in names:
        if name in _FILES:
            config: ModelConfig = _module(name).describe(name, hf)
            return config
        if name in _ENCODER_FILES:
            raise ModelError(
                f"{name} is an encoder, which makes embeddings and generates nothing: use quire.Embedder or "
                "/v1/embeddings"
            )
    asked = ", ".join(names) or f"model_type {hf.get('model_type')!r} without architectures"
    raise ModelError(f"architecture {asked} is not known: Quire serves {', '.join(architectures())}")


def _names(hf: Mapping[str, Any]) -> list[str]:
    names = hf.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(
            f"config.json has architectures={names!r}, which must be a list of names: correct it"
        )
    return [str(name) for name in names]


def describe_encoder(hf: Mapping[str, Any]) -> ModelConfig:
    """As `describe`, for a model that makes embeddings."""
    names = _names(hf)
    for name in names:
        if name in _ENCODER_FILES:
            config: ModelConfig = _module(name).describe(name, hf)
            return config
    asked = ", ".join(names) or f"model_type {hf.get('model_type')!r}"
    raise ModelError(f"{asked} makes no embeddings here: Quire's encoders are {', '.join(_ENCODER_FILES)}")


def build_encoder(config: ModelConfig, factory: LayerFactory) -> Encoder:
    """As `build`, for what `describe_encoder` gave."""
    encoder: Encoder = _module(config.architecture).build(config, factory)
    return encoder


def build(config: ModelConfig, factory: LayerFactory) -> DecoderModel:
    """An empty model: load it or adopt parameters before it is called."""
    model: DecoderModel = _module(config.architecture).build(config, factory)
    return model


def _module(architecture: str) -> Any:
    files = _FILES | _ENCODER_FILES
    if architecture not in files:
        raise ModelError(
            f"architecture {architecture} is not known: Quire serves {', '.join(architectures())}"
        )
    return importlib.import_module(f"quire.models.{files[architecture]}")

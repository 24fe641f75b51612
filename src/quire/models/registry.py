"""Which file serves which architecture. Files are imported when they are needed."""

import importlib
from collections.abc import Mapping
from typing import Any

from quire.core.config import ModelConfig
from quire.core.errors import ModelError
from quire.layers.factory import LayerFactory
from quire.models.model import Model

# Each file has describe(architecture, hf) -> ModelConfig and build(config, factory) -> Model.
_FILES = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "OPTForCausalLM": "opt",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
}


def architectures() -> tuple[str, ...]:
    """Every architecture that can be served."""
    return tuple(sorted(_FILES))


def describe(hf: Mapping[str, Any]) -> ModelConfig:
    """The hyperparameters in a config.json. An unknown architecture is refused with the list of known ones."""
    names = hf.get("architectures") or ()
    for name in names:
        if name in _FILES:
            config: ModelConfig = _module(name).describe(name, hf)
            return config
    asked = ", ".join(map(str, names)) or f"model_type {hf.get('model_type')!r} without architectures"
    raise ModelError(f"architecture {asked} is not known: Quire serves {', '.join(architectures())}")


def build(config: ModelConfig, factory: LayerFactory) -> Model:
    """An empty model: load it or adopt parameters before it is called."""
    model: Model = _module(config.architecture).build(config, factory)
    return model


def _module(architecture: str) -> Any:
    if architecture not in _FILES:
        raise ModelError(
            f"architecture {architecture} is not known: Quire serves {', '.join(architectures())}"
        )
    return importlib.import_module(f"quire.models.{_FILES[architecture]}")

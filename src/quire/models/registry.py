"""Which file serves which architecture. Files are imported when they are needed."""

import importlib
from collections.abc import Mapping
from typing import Any

from quire.core.config import ModelConfig, Task
from quire.core.errors import ModelError
from quire.layers.factory import LayerFactory
from quire.weights.architectures import ENCODERS

# Each file has describe(architecture, hf) -> ModelConfig and build(config, factory) -> DecoderModel, or Encoder.
_FILES = {
    "GPT2LMHeadModel": "gpt2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "mixture",
    "OPTForCausalLM": "opt",
    "OlmoeForCausalLM": "mixture",
    "Qwen2ForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "mixture",
    "Qwen3ForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "mixture",
    **dict.fromkeys(ENCODERS, "bert"),
}


def architectures(task: Task = "generate") -> tuple[str, ...]:
    """Every architecture that is served for `task`."""
    return tuple(sorted(name for name in _FILES if (name in ENCODERS) == (task == "embed")))


def describe(hf: Mapping[str, Any], task: Task = "generate") -> ModelConfig:
    """The hyperparameters in a config.json. Refuses an architecture that cannot do `task`, and lists the known ones."""
    names = _names(hf)
    for name in names:
        if name in architectures(task):
            config: ModelConfig = _module(name).describe(name, hf)
            return config
    asked = ", ".join(names) or f"model_type {hf.get('model_type')!r} without architectures"
    known = ", ".join(architectures(task))
    if task == "embed":
        raise ModelError(f"{asked} makes no embeddings here: Quire's encoders are {known}")
    if not ENCODERS.isdisjoint(names):
        raise ModelError(
            f"{asked} is an encoder, which makes embeddings and generates nothing: use quire.Embedder or "
            "/v1/embeddings"
        )
    raise ModelError(f"architecture {asked} is not known: Quire serves {known}")


def _names(hf: Mapping[str, Any]) -> list[str]:
    names = hf.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(
            f"config.json has architectures={names!r}, which must be a list of names: correct it"
        )
    return [str(name) for name in names]


def build(config: ModelConfig, factory: LayerFactory) -> Any:
    """An empty DecoderModel, or Encoder: load it or adopt parameters before it is called."""
    return _module(config.architecture).build(config, factory)


def _module(architecture: str) -> Any:
    if architecture not in _FILES:
        raise ModelError(
            f"architecture {architecture} is not known: Quire serves {', '.join(architectures())}"
        )
    return importlib.import_module(f"quire.models.{_FILES[architecture]}")

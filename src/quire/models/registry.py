"""From a config.json to the file in this room that serves its architecture. Files are imported when they are needed."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from quire.core.config import ModelConfig, Task
from quire.core.errors import ModelError
from quire.layers.factory import LayerFactory
from quire.weights.architectures import ENCODERS, KNOWN, TEXT_PARTS

# Each file has describe(architecture, hf) -> ModelConfig and build(config, factory) -> DecoderModel, or Encoder.

# What is nearest to architectures that people ask for, where names do not tell.
_INSTEAD = {
    "MllamaForConditionalGeneration": "its text layers read images through cross-attention: take a Llama 3.1 or 3.2 "
    "text model (LlamaForCausalLM)",
    "Llama4ForConditionalGeneration": "take a Llama 3.x text model (LlamaForCausalLM)",
    "PhiForCausalLM": "take Phi-3 or Phi-4 (Phi3ForCausalLM)",
    "Phi4MMForCausalLM": "take Phi-4 or Phi-4-mini (Phi3ForCausalLM)",
    "GraniteMoeForCausalLM": "take a dense Granite 3 (GraniteForCausalLM)",
    "Olmo3ForCausalLM": "take OLMo 2 (Olmo2ForCausalLM)",
    "Gemma3nForConditionalGeneration": "take Gemma 3 (Gemma3ForCausalLM)",
    "Qwen2VLForConditionalGeneration": "take a Qwen 2 text model (Qwen2ForCausalLM)",
    "Qwen2_5_VLForConditionalGeneration": "take a Qwen 2.5 text model (Qwen2ForCausalLM)",
}


def architectures(task: Task = "generate") -> tuple[str, ...]:
    """Every architecture that is served for `task`."""
    return tuple(sorted(name for name, known in KNOWN.items() if known.task == task))


def describe(hf: Mapping[str, Any], task: Task = "generate") -> ModelConfig:
    """The hyperparameters in a config.json. Refuses an architecture that cannot do `task`, and lists the known ones."""
    names = _names(hf)
    for name in names:
        if name in TEXT_PARTS and task == "generate":
            name, hf = _text_part(name, hf)
        if name in KNOWN and KNOWN[name].task == task:
            config: ModelConfig = _module(name).describe(name, hf)
            return config
    asked = ", ".join(names) or f"model_type {hf.get('model_type')!r} without architectures"
    if task == "embed":
        raise ModelError(
            f"{asked} makes no embeddings here: Quire's encoders are {', '.join(architectures(task))}"
        )
    if not ENCODERS.isdisjoint(names):
        raise ModelError(
            f"{asked} is an encoder, which makes embeddings and generates nothing: use quire.Embedder or "
            "/v1/embeddings"
        )
    raise _unknown(asked)


def _unknown(asked: str) -> ModelError:
    known = architectures()
    close = difflib.get_close_matches(asked, known, 1)
    nearest = _INSTEAD.get(asked) or (f"the nearest is {close[0]}" if close else "none is near")
    return ModelError(f"architecture {asked} is not known: {nearest}; Quire serves {', '.join(known)}")


def _text_part(name: str, hf: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The decoder inside a model that also reads images, and its config; without images it is a model of its own."""
    kind, architecture = TEXT_PARTS[name]
    text = hf.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", kind) != kind:
        given = text.get("model_type") if isinstance(text, Mapping) else text
        raise ModelError(f"{name} has a text_config of {given!r}: only that of a {kind} model is known")
    outer = {key: value for key, value in hf.items() if key not in ("text_config", "vision_config")}
    return architecture, {**outer, **{key: value for key, value in text.items() if value is not None}}


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
    if architecture not in KNOWN:
        raise _unknown(architecture)
    return importlib.import_module(f"quire.models.{KNOWN[architecture].file}")

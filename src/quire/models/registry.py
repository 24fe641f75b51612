"""Which file serves which architecture. Files are imported when they are needed."""

import difflib
import importlib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
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
    "OPTForCausalLM": "opt",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
    **{name: "modernbert" if name.startswith("ModernBert") else "bert" for name in ENCODERS},
}


def _bare(name: str) -> str:
    """A decoder's name without its output head: Qwen3Model of Qwen3ForCausalLM."""
    return re.sub("(ForCausalLM|LMHeadModel)$", "Model", name)


# Decoders that embed, by their names without the head: causal_encoder.py pools their hidden states.
_DECODERS = {_bare(name): name for name in _FILES if _bare(name) != name}


def architectures(task: Task = "generate") -> tuple[str, ...]:
    """Every architecture that is served for `task`."""
    if task == "embed":
        return tuple(sorted({*ENCODERS, *_DECODERS}))
    return tuple(sorted(_FILES.keys() - ENCODERS))


def describe(hf: Mapping[str, Any], task: Task = "generate") -> ModelConfig:
    """The hyperparameters in a config.json. Refuses an architecture that cannot do `task`, and lists the known ones."""
    names = _names(hf)
    for name in [_bare(name) for name in names] if task == "embed" else names:
        if name in architectures(task):
            decoder = _DECODERS.get(name, name)
            config: ModelConfig = _module(decoder).describe(decoder, hf)
            return replace(config, architecture=name)
    asked = ", ".join(names) or f"model_type {hf.get('model_type')!r} without architectures"
    known = ", ".join(architectures(task))
    if near := difflib.get_close_matches(_bare(asked) if task == "embed" else asked, architectures(task), 1):
        known += f"; the nearest is {near[0]}"
    if task == "embed":
        raise ModelError(f"{asked} is no encoder that is known here: Quire's encoders are {known}")
    if not ENCODERS.isdisjoint(names) or not _DECODERS.keys().isdisjoint(names):
        raise ModelError(
            f"{asked} is an encoder, which takes whole texts and generates none: use quire.Embedder, or quire serve "
            "with /v1/embeddings, /v1/classify or /v1/fill-mask"
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
    decoder = _DECODERS.get(config.architecture)
    if decoder is not None:
        make = partial(_module(decoder).build, replace(config, architecture=decoder))
        return importlib.import_module("quire.models.causal_encoder").CausalEncoder(config, factory, make)
    return _module(config.architecture).build(config, factory)


def _module(architecture: str) -> Any:
    if architecture not in _FILES:
        raise ModelError(
            f"architecture {architecture} is not known: Quire serves {', '.join(architectures())}"
        )
    return importlib.import_module(f"quire.models.{_FILES[architecture]}")

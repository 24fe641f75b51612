"""From a config.json to the file in this room that serves its architecture. Files are imported when they are needed."""

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
from quire.weights.architectures import ENCODERS, KNOWN, TEXT_PARTS

# Each file has describe(architecture, hf) -> ModelConfig, and build(config, factory), which makes a DecoderModel or
# an Encoder.

# What is nearest to architectures that people ask for, where names do not tell.
_INSTEAD = {
    "MllamaForConditionalGeneration": "its text layers read images through cross-attention: take a Llama 3.1 or 3.2 "
    "text model (LlamaForCausalLM)",
    "Llama4ForConditionalGeneration": "take a Llama 3.x text model (LlamaForCausalLM)",
    "PhiForCausalLM": "take Phi-3 or Phi-4 (Phi3ForCausalLM)",
    "Phi4MMForCausalLM": "take Phi-4 or Phi-4-mini (Phi3ForCausalLM)",
    "GraniteMoeForCausalLM": "take a dense Granite 3 (GraniteForCausalLM)",
    "Gemma3nForConditionalGeneration": "take Gemma 3 (Gemma3ForCausalLM)",
    "Qwen2VLForConditionalGeneration": "take a Qwen 2 text model (Qwen2ForCausalLM)",
    "Qwen2_5_VLForConditionalGeneration": "take a Qwen 2.5 text model (Qwen2ForCausalLM)",
}
# Kinds of models that no file here computes, by the beginning of the name: why, and what to take.
_OTHER_KINDS = (
    (
        "Deepseek|Kimi|LongcatFlash",
        "its attention is over latent vectors (MLA): take a distilled model such as DeepSeek-R1-Distill-Qwen-7B "
        "(Qwen2ForCausalLM)",
    ),
    (
        "(Falcon|Codestral)?Mamba|Rwkv|Jamba|Zamba|RecurrentGemma|Qwen3Next|NemotronH",
        "its layers keep a recurrent state, not K and V: take a model with attention in every layer "
        "(LlamaForCausalLM)",
    ),
    ("Whisper|Wav2Vec|Hubert|Speech|Moonshine", "it reads audio, and Quire serves text"),
    ("CLIP|Siglip|ViT|Dinov|Blip|Vision", "it reads images, and Quire serves text"),
)


def _bare(name: str) -> str:
    """A decoder's name without its output head: Qwen3Model of Qwen3ForCausalLM."""
    return re.sub("(ForCausalLM|LMHeadModel)$", "Model", name)


# Decoders that embed, by their names without the head: causal_encoder.py pools their hidden states.
_DECODERS = {
    _bare(name): name for name, known in KNOWN.items() if known.task == "generate" and _bare(name) != name
}


def architectures(task: Task = "generate") -> tuple[str, ...]:
    """Every architecture that is served for `task`."""
    if task == "embed":
        return tuple(sorted({*ENCODERS, *_DECODERS}))
    return tuple(sorted(name for name, known in KNOWN.items() if known.task == task))


def describe(hf: Mapping[str, Any], task: Task = "generate") -> ModelConfig:
    """The hyperparameters in a config.json. Refuses an architecture that cannot do `task`, and lists the known ones."""
    names = _names(hf)
    for name in [_bare(name) for name in names] if task == "embed" else names:
        if name in TEXT_PARTS and task == "generate":
            name, hf = _text_part(name, hf)
        if name in architectures(task):
            decoder = _DECODERS.get(name, name)
            config: ModelConfig = _module(decoder).describe(decoder, hf)
            return replace(config, architecture=name)
    asked = ", ".join(names)
    if not names:
        nearest = _nearest(str(hf.get("model_type")).replace("_", ""), architectures(task))
        raise ModelError(
            f"config.json has no architectures (model_type {hf.get('model_type')!r}): {nearest}; add "
            f'"architectures": ["NAME"], one of {", ".join(architectures(task))}'
        )
    if task == "embed":
        known = ", ".join(architectures(task))
        nearest = _nearest(_bare(names[0]), architectures(task))
        raise ModelError(f"{asked} is no encoder that is known here: {nearest}; Quire's encoders are {known}")
    if not ENCODERS.isdisjoint(names) or not _DECODERS.keys().isdisjoint(names):
        raise ModelError(
            f"{asked} is an encoder, which takes whole texts and generates none: use quire.Embedder, or quire serve "
            "with /v1/embeddings, /v1/classify or /v1/fill-mask"
        )
    raise _unknown(asked)


def _unknown(asked: str) -> ModelError:
    known = architectures()
    return ModelError(
        f"architecture {asked} is not known: {_nearest(asked, known)}; Quire serves {', '.join(known)}"
    )


def _nearest(asked: str, known: tuple[str, ...]) -> str:
    """Why there is none, or what to take, by the family's name: what follows it is the same for most."""
    if asked in _INSTEAD:
        return _INSTEAD[asked]
    for kind, why in _OTHER_KINDS:
        if re.match(kind, asked):
            return why
    families: dict[str, list[str]] = {}
    for name in known:
        families.setdefault(_family(name).lower(), []).append(name)
    close = difflib.get_close_matches(_family(asked).lower(), families, 1)
    if not close:
        return "none is near"
    names = families[close[0]]
    return f"the nearest is {next((n for n in names if n.endswith(asked[len(_family(asked)) :])), names[0])}"


def _family(name: str) -> str:
    """Qwen3 of Qwen3ForCausalLM, and of Qwen3VLForConditionalGeneration."""
    return re.sub(r"(VL)?(For[A-Z]\w*|(LMHead|Encoder)?Model)$", "", name)


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
    decoder = _DECODERS.get(config.architecture)
    if decoder is not None:
        make = partial(_module(decoder).build, replace(config, architecture=decoder))
        return importlib.import_module("quire.models.causal_encoder").CausalEncoder(config, factory, make)
    return _module(config.architecture).build(config, factory)


def _module(architecture: str) -> Any:
    if architecture not in KNOWN:
        raise _unknown(architecture)
    return importlib.import_module(f"quire.models.{KNOWN[architecture].file}")

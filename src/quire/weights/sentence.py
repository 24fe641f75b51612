"""Pooling, normalisation and length of an encoder, from the files that sentence-transformers writes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError, WeightsError
from quire.weights.text_files import damaged, read_any_json, read_json

_KINDS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last", "max": "max"}  # in newer versions


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """Defaults, for a folder without these files: mean pooling, normalised, over the model's context."""

    pooling: str = "mean"  # mean | cls | last | max
    normalize: bool = True
    max_length: int | None = None  # tokens; None: as the model has positions
    prompts: dict[str, str] = field(default_factory=dict)  # what a text begins with, by name
    default_prompt: str | None = None  # its name


def has_sentence_files(folder: Path) -> bool:
    return (folder / "modules.json").exists()


def read_sentence_files(folder: Path) -> SentenceFiles:
    """ModelError for a module between tokens and vector that is not supported."""
    modules = _modules(folder)
    max_length = (read_json(folder / "sentence_bert_config.json") or {}).get("max_seq_length")
    if not isinstance(max_length, int) or max_length < 1:
        max_length = None
    if modules is None:
        return SentenceFiles(max_length=max_length)
    prompts, default = _prompts(folder)
    pooling, normalize = "mean", False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(folder / str(module.get("path", "")))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelError(
                f"{folder / 'modules.json'} asks for a {kind} module, which is not known: "
                "choose a model that pools, and normalises at most"
            )
    return SentenceFiles(pooling, normalize, max_length, prompts, default)


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / "config_sentence_transformers.json"
    config = read_json(path) or {}
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise damaged(path, "has prompts that are no texts by name")
    if default is not None and default not in prompts:
        raise damaged(path, f"has no prompt {default!r}, which is its default")
    return prompts, default


def _modules(folder: Path) -> list[dict[str, Any]] | None:
    path = folder / "modules.json"
    modules = read_any_json(path)
    if modules is None:
        return None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise damaged(path, "is no list of modules")
    return modules


def _pooling(folder: Path) -> str:
    path = folder / "config.json"
    config = read_json(path)
    if config is None:
        raise WeightsError(f"{path} is missing, which modules.json names: fetch the model again")
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(config.get("pooling_mode"), str):
        if config["pooling_mode"] in _NAMES:
            return _NAMES[config["pooling_mode"]]
        modes = [f"pooling_mode_{config['pooling_mode']}"]
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise ModelError(
            f"{path} asks for {' and '.join(modes) or 'no pooling'}: one of {', '.join(_KINDS)} can be served"
        )
    return _KINDS[modes[0]]

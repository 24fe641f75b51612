"""The kind of a model by its config.json alone: no weights, no torch."""

import json
from pathlib import Path
from typing import Any

from quire.weights.builtin import is_builtin_encoder
from quire.weights.hub import snapshot_folder
from quire.weights.shapes import SHAPES

# Architectures that turn a text into one vector. models/registry.py has a file for each.
ENCODERS = frozenset(
    f"{family}{kind}"
    for family in ("Bert", "DistilBert", "Roberta", "XLMRoberta")
    for kind in ("Model", "ForMaskedLM")
)


def is_encoder(model: str | None, revision: str | None = None) -> bool:
    """Whether this model makes embeddings, not text. False for an unreadable folder: opening it gives the error.

    The small files of a hub model are downloaded for this. Raises WeightsError if the hub has no such model.
    """
    if model is None or model.lower().endswith(".gguf") or model in SHAPES:
        return False
    if is_builtin_encoder(model, revision):
        return True
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
            return False
        folder = snapshot_folder(model, revision=revision, with_weights=False)
    return not ENCODERS.isdisjoint(_architectures(folder / "config.json"))


def _architectures(path: Path) -> list[Any]:
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError):
        return []
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []

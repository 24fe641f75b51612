"""open_source: from a model's name or path to its Source."""

import os
from pathlib import Path

from quire.core.errors import WeightsError
from quire.weights.architectures import SHAPES
from quire.weights.builtin import (
    BUILTIN,
    BUILTIN_ENCODER_NAME,
    BUILTIN_NAME,
    builtin_encoder_folder,
    builtin_path,
    is_builtin_encoder,
)
from quire.weights.folder import FolderSource
from quire.weights.gguf import GgufSource
from quire.weights.hub import gguf_file, hub_name, snapshot_folder
from quire.weights.source import DummySource, Source
from quire.weights.wheel import Progress


def open_source(
    model: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    progress: Progress | None = None,
) -> Source:
    """None is the built-in model; otherwise a folder, a .gguf file, a name of the built-in embedding model or a hub id,
    looked for in this order; a hub id may have `hf.co/` in front and `:QUANT` behind (see hub.py).
    With `dummy` the name of a published architecture will do as well (see architectures.py).

    Reads no weights, but checks that files are present and complete: WeightsError or ModelError in one line if not.
    `progress` reports the download of the built-in models; the hub's library draws its own bars.
    """
    if model is None:
        _refuse_dummy(load_format, "the built-in model")
        return GgufSource(builtin_path(progress), name=BUILTIN_NAME, fingerprint=BUILTIN.sha256)
    text = os.fspath(model)
    path = Path(text).expanduser()
    if path.is_dir():
        return _folder(path, load_format)
    if load_format == "dummy" and text in SHAPES:
        return DummySource(path)
    if path.suffix.lower() == ".gguf" or path.is_file():
        _refuse_dummy(load_format, text)
        return GgufSource(path)
    name = hub_name(text)
    if _looks_like_path(name.repo):
        raise WeightsError(f"{text}: no such folder or file: check the path")
    if is_builtin_encoder(text, revision):
        return _folder(builtin_encoder_folder(progress), load_format, BUILTIN_ENCODER_NAME)
    if name.quant is not None:
        _refuse_dummy(load_format, text)
        return GgufSource(gguf_file(name, revision=revision), name=str(name))
    snapshot = snapshot_folder(name.repo, revision=revision, with_weights=load_format != "dummy")
    return _folder(snapshot, load_format, name.repo)


def _folder(path: Path, load_format: str, name: str | None = None) -> Source:
    return DummySource(path, name=name) if load_format == "dummy" else FolderSource(path, name=name)


def _refuse_dummy(load_format: str, what: str) -> None:
    if load_format == "dummy":
        raise WeightsError(
            f"load_format='dummy' needs a folder with config.json, and {what} is none: give a folder"
        )


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or "\\" in text or text.endswith("/") or text.count("/") > 1

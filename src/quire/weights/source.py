"""Source: the interface to a model's weights, config and tokenizer, the same for every format.

`open_source` finds the Source of a model's name or path. DummySource has a model's shape without its weights, for
`--load-format dummy`.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from quire.core.errors import WeightsError
from quire.quant.encoded import Encoded, Weight
from quire.weights.architectures import SHAPES
from quire.weights.builtin import (
    BUILTIN,
    BUILTIN_ENCODER_NAME,
    BUILTIN_NAME,
    builtin_encoder_folder,
    builtin_path,
    is_builtin,
    is_builtin_encoder,
)
from quire.weights.folder import FolderSource, read_config, read_tokenizer_config
from quire.weights.gguf import GgufSource
from quire.weights.hub import gguf_file, hub_name, snapshot_folder
from quire.weights.text_files import read_json
from quire.weights.tokenizer_files import folder_tokenizer
from quire.weights.wheel import Progress


class Source(Protocol):
    """Tensors under canonical Hugging Face names, with the content of a model folder's JSON files.

    Files are mapped, not read: a tensor costs memory only while it is used.
    """

    name: str  # the hub id, or the folder's or file's name
    config: Mapping[str, Any]  # as config.json has it
    generation_config: Mapping[str, Any]  # as generation_config.json has it, or empty
    fingerprint: str  # changes when the weights change; keys prefix hashes and converted weights
    num_tensors: int
    num_bytes: int  # of all tensors as stored
    min_bits: float  # of a weight in the matrix that has the fewest, as stored
    random: bool  # no tensors are named: the consumer fills its parameters from a seed (load_format dummy)

    encodings: Mapping[str, Encoded]  # shapes without content of what `tensors` yields as encoded rows

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        """Every tensor once, as float32/float16/bfloat16 or encoded; raises WeightsError on a missing or cut file."""
        ...

    def tokenizer_json(self) -> str | None:
        """The text of tokenizer.json (made from metadata where the format has none), or None."""
        ...

    def tokenizer_config(self) -> Mapping[str, Any]:
        """As tokenizer_config.json has it; `chat_template`, `bos_token`, `eos_token` where known."""
        ...


# Checkpoints of the bare model lack the outer module's name, and some add one more.
_PREFIXES = (
    *(
        "model.decoder.",
        "model.",
        "decoder.",
        "transformer.",
        "gpt_neox.",
        "bert.",
        "roberta.",
        "distilbert.",
        "",
    ),
    *("model.language_model.", "language_model.model.", "language_model."),  # beside an encoder of images
)


def spellings(name: str) -> Iterator[str]:
    """A tensor's or module's name as it is, then with each of the known outer prefixes in place of its own."""
    yield name
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            yield from (other + name[len(prefix) :] for other in _PREFIXES)


class DummySource:
    """A folder that needs only config.json, or a published architecture.

    It names no tensors, since only a model's own file knows which it has: where `random` is true, the
    consumer fills its parameters from a seed. There may be no tokenizer.
    """

    random = True
    num_tensors = 0
    num_bytes = 0
    min_bits = 16.0
    encodings: Mapping[str, Encoded] = {}

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        """`folder` may be the name of an architecture in SHAPES instead."""
        published = None if folder.is_dir() else SHAPES.get(str(folder))
        self.folder = folder
        self.name = name or folder.resolve().name
        self.config: Mapping[str, Any] = published or read_config(folder)
        self.generation_config: Mapping[str, Any] = read_json(folder / "generation_config.json") or {}
        shape = json.dumps(self.config, sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(f"dummy {shape}".encode()).hexdigest()

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        return iter(())

    def tokenizer_json(self) -> str | None:
        return folder_tokenizer(self.folder, self.tokenizer_config())

    def tokenizer_config(self) -> Mapping[str, Any]:
        return read_tokenizer_config(self.folder)


def open_source(
    model: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    progress: Progress | None = None,
) -> Source:
    """None and "builtin" are the built-in model; otherwise a folder, a .gguf file, a name of the built-in embedding
    model or a hub id, looked for in this order; a hub id may have `hf.co/` in front and `:QUANT` behind (see hub.py).
    With `dummy` the name of a published architecture will do as well (see architectures.py).

    Reads no weights, but checks that files are present and complete: WeightsError or ModelError in one line if not.
    `progress` reports the download of the built-in models; the hub's library draws its own bars.
    """
    if model is None or is_builtin(model):
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

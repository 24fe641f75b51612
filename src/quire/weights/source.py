"""Source: the interface to a model's weights, config and tokenizer, the same for every format.

DummySource has a model's shape without its weights, for `--load-format dummy`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from quire.quant.encoded import Encoded, Weight
from quire.weights.architectures import SHAPES
from quire.weights.folder import read_config, read_tokenizer_config
from quire.weights.text_files import read_json
from quire.weights.tokenizer_files import folder_tokenizer


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

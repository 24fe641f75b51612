"""DummySource and ShapeSource: a model's shape without its weights, for `--load-format dummy`."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.weights.folder import read_config, read_json, read_text, read_tokenizer_config
from quire.weights.shapes import SHAPES


class DummySource:
    """A folder that needs only config.json.

    It names no tensors, since only a model's own file knows which it has: where `random` is true, the
    consumer fills its parameters from a seed. There may be no tokenizer.
    """

    random = True
    num_tensors = 0
    num_bytes = 0

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        self.folder = folder
        self.name = name or folder.resolve().name
        self.config: Mapping[str, Any] = read_config(folder)
        self.generation_config: Mapping[str, Any] = read_json(folder / "generation_config.json") or {}
        shape = json.dumps(self.config, sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(f"dummy {shape}".encode()).hexdigest()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def tokenizer_json(self) -> str | None:
        return read_text(self.folder / "tokenizer.json")

    def tokenizer_config(self) -> Mapping[str, Any]:
        return read_tokenizer_config(self.folder)


class ShapeSource:
    """A published architecture with no weights and no tokenizer; see DummySource for how it is filled."""

    random = True
    num_tensors = 0
    num_bytes = 0
    generation_config: Mapping[str, Any] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.config: Mapping[str, Any] = SHAPES[name]
        shape = json.dumps(self.config, sort_keys=True)
        self.fingerprint = hashlib.sha256(f"dummy {shape}".encode()).hexdigest()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def tokenizer_json(self) -> str | None:
        return None

    def tokenizer_config(self) -> Mapping[str, Any]:
        return {}

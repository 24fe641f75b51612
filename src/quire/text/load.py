"""Loads a model's tokenizer. Apart from Tokenizer itself, which needs no weights library."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.config import ModelOptions
from quire.core.errors import WeightsError
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import read_tokenizer_config
from quire.weights.gguf import GgufSource
from quire.weights.hub import snapshot_folder
from quire.weights.source import Source
from quire.weights.tokenizer_files import folder_tokenizer


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The text of tokenizer.json (None: there is none) and the content of tokenizer_config.json."""

    text: str | None
    config: Mapping[str, Any]

    def tokenizer(self) -> Tokenizer | None:
        return None if self.text is None else Tokenizer(self.text, self.config)


def choose_tokenizer(options: ModelOptions, source: Source) -> Tokenizer | None:
    """The model's own tokenizer, or the one that `tokenizer=` names: a folder, a .gguf file or a hub id."""
    return tokenizer_files(options, source).tokenizer()


def tokenizer_files(options: ModelOptions, source: Source) -> TokenizerFiles:
    """The files of choose_tokenizer's tokenizer, to be sent to another process."""
    if options.tokenizer is None:
        return _own_files(source)
    return _named_files(options.tokenizer, options.revision)


def load_tokenizer(source: Source) -> Tokenizer | None:
    """The source's tokenizer; None if it has none (a folder of bare weights, a dummy)."""
    return _own_files(source).tokenizer()


def _named_files(name: str, revision: str | None) -> TokenizerFiles:
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        files = _own_files(GgufSource(path))
    else:
        folder = path if path.is_dir() else snapshot_folder(name, revision=revision, with_weights=False)
        config = read_tokenizer_config(folder)
        files = TokenizerFiles(folder_tokenizer(folder, config), config)
    if files.text is None:
        raise WeightsError(f"{name}: there is no tokenizer: give a folder, hub id or .gguf file with one")
    return files


def _own_files(source: Source) -> TokenizerFiles:
    return TokenizerFiles(source.tokenizer_json(), source.tokenizer_config())

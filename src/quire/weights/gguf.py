"""GgufSource: weights, config, tokenizer and template from one GGUF file."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import WeightsError
from quire.weights.cache import tokenizers_folder
from quire.weights.gguf_config import (
    end_token_ids,
    hugging_face_config,
    hugging_face_layout,
    hugging_face_name,
    model_name,
)
from quire.weights.gguf_file import GgufFile, StringArray, TensorInfo, text_of
from quire.weights.gguf_tokenizer import VERSION as TOKENIZER_VERSION
from quire.weights.gguf_tokenizer import tokenizer_text

_DIRECT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_ELEMENTS = 1 << 21  # unpacking needs several times a chunk in scratch memory
_SPECIAL_TOKENS = ("bos", "eos", "unk", "pad")


class GgufSource:
    """A Source over one mapped file. Packed tensors come as float32, float tensors as they are, unread.

    The `gguf` library is needed only while packed tensors are unpacked, so a start from converted weights
    never imports it.
    """

    random = False

    def __init__(self, path: Path, *, name: str | None = None, fingerprint: str | None = None) -> None:
        self._file = GgufFile(path)
        self.name = name or model_name(path)
        self.config: Mapping[str, Any] = hugging_face_config(self._file)
        ends = end_token_ids(self._file.metadata)
        self.generation_config: Mapping[str, Any] = {"eos_token_id": ends} if ends else {}
        self.architecture = str(self._file.metadata["general.architecture"])
        self.fingerprint = fingerprint or self._file.fingerprint()
        self._tensors = self._named_tensors()
        self.num_tensors = len(self._tensors)
        self.num_bytes = sum(info.num_bytes for info in self._tensors.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, info in self._tensors.items():
            unpacked = self._unpacked(info)
            yield name, hugging_face_layout(self.architecture, self.config, info.name, unpacked)

    def tokenizer_json(self) -> str | None:
        """Built once per file and kept in the cache folder: building takes longer than the rest of opening."""
        if "tokenizer.ggml.tokens" not in self._file.metadata:
            return None
        kept = tokenizers_folder() / f"{self.fingerprint[:32]}-v{TOKENIZER_VERSION}.json"
        try:
            return kept.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            text = tokenizer_text(self._file.metadata)
            _keep(kept, text)
            return text

    def tokenizer_config(self) -> Mapping[str, Any]:
        metadata = self._file.metadata
        config: dict[str, Any] = {}
        tokens = metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, StringArray):
            ids = {word: metadata.get(f"tokenizer.ggml.{key}_token_id") for word, key in _token_keys()}
            texts = tokens.pick({int(token_id) for token_id in ids.values() if token_id is not None})
            config = {f"{word}_token": texts[token_id] for word, token_id in ids.items() if token_id in texts}
        template = text_of(metadata, "tokenizer.chat_template")
        if template is not None:
            config["chat_template"] = template
        named = metadata.get("tokenizer.chat_templates")
        if isinstance(named, StringArray) and template is not None:
            others = {name: text_of(metadata, f"tokenizer.chat_template.{name}") for name in named}
            templates = {"default": template, **{name: text for name, text in others.items() if text}}
            config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        return config

    def _named_tensors(self) -> dict[str, TensorInfo]:
        named = {}
        for info in self._file.tensors.values():
            name = hugging_face_name(self.architecture, info.name)
            if name is not None:
                named[name] = info
        return named

    def _unpacked(self, info: TensorInfo) -> Tensor:
        direct = _DIRECT.get(info.type_name)
        if direct is not None:
            count = info.num_bytes // direct.itemsize
            flat = torch.frombuffer(self._file.buffer, dtype=direct, count=count, offset=info.start)
            return flat.reshape(info.shape)
        unpacked = _dequantized(self._file.raw(info), info, self._file.path)
        self._file.forget(info)
        return torch.from_numpy(unpacked).reshape(info.shape)


def _token_keys() -> Iterator[tuple[str, str]]:
    spelled = {"unk": "unknown", "pad": "padding"}
    return ((word, spelled.get(word, word)) for word in _SPECIAL_TOKENS)


def _dequantized(raw: np.ndarray, info: TensorInfo, path: Path) -> np.ndarray:
    """float32 [rows, columns] from packed rows, a few rows at a time so that scratch memory stays small."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise WeightsError(
            f"{path}: unpacking {info.type_name} needs the gguf library: pip install gguf"
        ) from error
    columns = info.shape[-1]
    unpacked = np.empty((raw.shape[0], columns), dtype=np.float32)
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    try:
        kind = GGMLQuantizationType(info.type_id)
        for first in range(0, raw.shape[0], step):
            unpacked[first : first + step] = dequantize(raw[first : first + step], kind)
    except (NotImplementedError, ValueError) as error:
        raise WeightsError(
            f"{path}: tensor {info.name!r} is {info.type_name}, which the gguf library cannot unpack: "
            "use a file in another quantization, such as Q8_0 or Q4_K_M"
        ) from error
    return unpacked


def _keep(path: Path, text: str) -> None:
    """Writes a cache entry in one step; a cache that cannot be written is no reason to fail."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)

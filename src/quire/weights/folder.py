"""FolderSource: a Hugging Face folder with config.json and safetensors, in one file or in shards."""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import ModelError, WeightsError
from quire.quant.encoded import Encoded, Weight
from quire.weights.experts import num_pieces, split
from quire.weights.quantized import QuantizedWeights
from quire.weights.quantized.reader import Header
from quire.weights.text_files import damaged, read_json, read_text
from quire.weights.tokenizer_files import folder_tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Of an encoder-decoder model, which has none of its own: the messages' texts, as its tokenizer delimits a prompt.
PLAIN_CHAT = "{{ bos_token }}{{ messages | map(attribute='content') | join('\n') }}{{ eos_token }}"
_LARGEST_HEADER = 100_000_000  # the format's own limit: a larger number means a foreign file
_KEPT = (torch.float32, torch.float16, torch.bfloat16)
_FLOATS = {"F64", "F32", "F16", "BF16"}
_QUANTIZED = {"F8_E4M3"}  # values that mean nothing without their scales
_BUFFERS = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"}  # masks, positions: no weights


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file, its header read and its length checked against it."""

    path: Path
    entries: Mapping[str, Mapping[str, Any]]  # tensor name -> {"dtype", "shape", "data_offsets"}
    header: bytes


class FolderSource:
    """A Source over a folder; opening it reads headers only and finds every missing or cut file."""

    random = False

    def __init__(self, folder: Path, *, name: str | None = None) -> None:
        self.folder = folder
        self.name = name or folder.resolve().name
        self.config: Mapping[str, Any] = read_config(folder)
        self.generation_config: Mapping[str, Any] = read_json(folder / "generation_config.json") or {}
        self._shards = _shards(folder)
        self._opened: dict[Path, Any] = {}  # mapped files, by need
        self.fingerprint = _fingerprint(self.config, self._shards)
        entries = {name: entry for shard in self._shards for name, entry in shard.entries.items()}
        if self.config.get("is_encoder_decoder"):
            # transformers writes tie_word_embeddings=true for all of them
            self.config = {**self.config, "has_tied_head": "lm_head.weight" not in entries}
        self._quantized = self._open_quantized(entries)
        self._floats = {
            name
            for name, entry in entries.items()
            if (entry["dtype"] in _FLOATS and name not in self._quantized.owned)
            or name in self._quantized.raw
        }
        self.encodings: Mapping[str, Encoded] = self._quantized.encodings
        self.min_bits = min((encoded.bits for encoded in self.encodings.values()), default=16.0)
        pieces = sum(num_pieces(name, entries[name]["shape"]) for name in self._floats)
        self.num_tensors = pieces + len(self.encodings)
        kept = self._floats | self._quantized.owned
        self.num_bytes = sum(
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in entries.items()
            if name in kept
        )

    def _open_quantized(self, entries: Mapping[str, Mapping[str, Any]]) -> QuantizedWeights:
        headers = {name: Header(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        try:
            quantized = QuantizedWeights.of(self.config, headers, self._get)
        except (ModelError, WeightsError) as error:
            raise type(error)(f"{self.folder}: {error}") from error
        for name, header in headers.items():
            if header.dtype in _QUANTIZED and name not in quantized.owned:
                raise ModelError(
                    f"{self.folder}: tensor {name!r} is {header.dtype}, which cannot be loaded: use a 16- or 32-bit "
                    "checkpoint, or one whose config.json has a quantization_config"
                )
        return quantized

    def tensors(self) -> Iterator[tuple[str, Weight]]:
        for shard in self._shards:
            for name in shard.entries:
                if name in self._floats:
                    tensor = self._get(name)
                    kept = tensor.dtype in _KEPT or name in self._quantized.raw
                    yield from split(self.config, name, tensor if kept else tensor.float())
        for name in self.encodings:
            try:
                weight = self._quantized.read(name, self._get)
            except WeightsError as error:
                raise WeightsError(f"{self.folder}: {error}") from error
            yield name, weight

    def _get(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        shard = next((shard for shard in self._shards if name in shard.entries), None)
        if shard is None:
            raise WeightsError(f"tensor {name} is missing")
        try:
            if shard.path not in self._opened:
                self._opened[shard.path] = safe_open(str(shard.path), framework="pt")
            tensor: Tensor = self._opened[shard.path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise damaged(shard.path, f"cannot be read ({error})") from error
        return tensor

    def tokenizer_json(self) -> str | None:
        return folder_tokenizer(self.folder, self.tokenizer_config())

    def tokenizer_config(self) -> Mapping[str, Any]:
        return read_tokenizer_config(self.folder)


def _fingerprint(config: Mapping[str, Any], shards: list[Shard]) -> str:
    """From names, sizes, times and headers: the gigabytes between are not read."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for shard in shards:
        stat = shard.path.stat()
        digest.update(f"{shard.path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
        digest.update(shard.header)
    return digest.hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json's content; WeightsError where there is none."""
    config = read_json(folder / "config.json")
    if config is None:
        raise WeightsError(
            f"{folder} has no config.json: give a Hugging Face model folder, a .gguf file or a hub id"
        )
    return config


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json's content, with the template of chat_template.jinja where that file exists."""
    config = read_json(folder / "tokenizer_config.json") or {}
    if (read_json(folder / "config.json") or {}).get("is_encoder_decoder"):
        config = {"chat_template": PLAIN_CHAT, **config}
    template = read_text(folder / "chat_template.jinja")
    if template is None:
        return config
    named = {"default": template}
    others = folder / "additional_chat_templates"
    for path in sorted(others.glob("*.jinja")) if others.is_dir() else ():
        named[path.stem] = read_text(path) or ""
    listed = [{"name": name, "template": text} for name, text in named.items()]
    return {**config, "chat_template": template if len(named) == 1 else listed}


def _shards(folder: Path) -> list[Shard]:
    if (folder / WEIGHTS).exists():
        return [_shard(folder / WEIGHTS)]
    index = read_json(folder / INDEX)
    if index is not None:
        return _indexed(folder, index)
    lone = sorted(folder.glob("*.safetensors"))
    if len(lone) == 1:
        return [_shard(lone[0])]
    if any(folder.glob("pytorch_model*.bin")):
        raise WeightsError(
            f"{folder} has only pytorch_model.bin, a pickle that may run code when opened: convert to safetensors, "
            "e.g. with transformers' save_pretrained"
        )
    raise WeightsError(
        f"{folder} has no {WEIGHTS} and no {INDEX}: fetch the weights, or use --load-format dummy"
    )


def _indexed(folder: Path, index: Mapping[str, Any]) -> list[Shard]:
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise damaged(folder / INDEX, "has no weight_map")
    names = sorted(set(places.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise WeightsError(
            f"{folder}: shard {missing[0]} is missing ({len(missing)} of {len(names)} named in {INDEX}): fetch it again"
        )
    shards = {name: _shard(folder / name) for name in names}
    for tensor, name in places.items():
        if tensor not in shards[name].entries:
            raise WeightsError(
                f"{folder / name} lacks tensor {tensor!r} that {INDEX} promises: fetch the shard again"
            )
    return list(shards.values())


def _shard(path: Path) -> Shard:
    """Reads the header; WeightsError if the file is shorter or longer than its header says."""
    try:
        with open(path, "rb") as file:
            length = file.read(8)
            size = struct.unpack("<Q", length)[0] if len(length) == 8 else _LARGEST_HEADER + 1
            if size > _LARGEST_HEADER:
                raise damaged(path, "is not a safetensors file, or is cut")
            header = file.read(size)
            present = file.seek(0, 2)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        needed = 8 + size + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        kinds = {entry["dtype"]: name for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise WeightsError(f"{path}: its header is cut or damaged: fetch or copy it again") from error
    if present != needed:
        problem = "cut short" if present < needed else "too long"
        raise damaged(path, f"is {problem}: {present:,} bytes instead of {needed:,}")
    for kind, name in kinds.items():
        if kind not in _FLOATS | _BUFFERS | _QUANTIZED:
            raise ModelError(
                f"{path}: tensor {name!r} is {kind}, which cannot be loaded: use a 16- or 32-bit checkpoint"
            )
    return Shard(path, entries, header)

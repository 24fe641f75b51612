"""AdapterFile: a safetensors file read into memory at once, and its tensors as entries in those bytes."""

import json
import math
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.core.errors import AdapterError
from quire.kernels import huge_pages

ALIGNMENT = 8  # bytes
LARGEST_HEADER = 100 << 20  # bytes, as safetensors has it
KEPT = 32 << 20  # bytes: a thread reuses its buffer for smaller files
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One dense tensor in the bytes of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # its first byte

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A safetensors file in memory. Unless read with `keep`, `data` is valid until this thread reads the next file."""

    path: Path
    header: bytes  # names, dtypes, shapes and offsets, as JSON
    data: Tensor  # [bytes] uint8
    identity: bytes  # of the file's inode, size and time: changes with its content


class _Memory(threading.local):
    """A thread's own read buffer: faulting in fresh memory would take as long as reading."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, keep: bool) -> Tensor:
        if keep:
            return huge_pages.spare_bytes(num_bytes)
        if num_bytes > KEPT:
            return huge_pages.zeros(num_bytes, dtype=torch.uint8)
        if num_bytes > len(self._kept):
            self._kept = torch.empty(min(KEPT, 2 * num_bytes), dtype=torch.uint8)
        return self._kept[:num_bytes]


_memory = _Memory()


def read_file(name: str, path: Path, keep: bool = False) -> AdapterFile:
    """AdapterError if it is missing or no safetensors file. Read, not mapped: a truncated mapping would crash."""
    if not path.is_file():
        raise AdapterError(
            f"adapter {name!r}: there is no {path.name} in {path.parent}: save it with safe_serialization=True"
        )
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, LARGEST_HEADER):
                raise _unreadable(name, path, "no safetensors file, or cut short")
            header = file.read(length)
            data = _memory.take(size - 8 - length, keep)
            if file.readinto(data.numpy()) < len(data):  # type: ignore[arg-type]  # an array is a buffer
                raise EOFError("it became shorter while it was read")
    except (OSError, EOFError) as error:
        raise _unreadable(name, path, error) from error
    return AdapterFile(path, header, data, _identity(status))


def find_tensors(name: str, file: AdapterFile) -> dict[str, TensorEntry]:
    """The header's entries, checked against the bytes of the file."""
    try:
        entries = json.loads(file.header)
        entries.pop("__metadata__", None)
        tensors = {tensor: _entry(entry) for tensor, entry in entries.items()}
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        fits = all(t.offset + t.num_bytes == end for t, end in zip(tensors.values(), ends, strict=True))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _unreadable(name, file.path, f"its header is damaged: {error!r}") from error
    if not fits or max(ends, default=0) != len(file.data):
        raise _unreadable(name, file.path, "cut short, or longer than its header says")
    return tensors


def tensors_of(file: AdapterFile, entries: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """Copies of the tensors, for the ones that must be converted first."""
    pieces = {name: file.data[e.offset : e.offset + e.num_bytes].clone() for name, e in entries.items()}
    return {name: piece.view(entries[name].dtype).view(entries[name].shape) for name, piece in pieces.items()}


def gather(tensors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, TensorEntry]]:
    """The tensors' bytes [bytes] uint8, and their entries."""
    pieces: list[Tensor] = []
    entries: dict[str, TensorEntry] = {}
    used = 0
    for name, tensor in tensors.items():
        host = tensor.detach().to("cpu", torch.float32 if tensor.dtype is torch.float64 else tensor.dtype)
        piece = host.contiguous().view(-1).view(torch.uint8)
        entries[name] = TensorEntry(host.dtype, tuple(host.shape), used)
        pieces += [piece, piece.new_zeros(-len(piece) % ALIGNMENT)]
        used += len(piece) + len(pieces[-1])
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8), entries


def _identity(status: os.stat_result) -> bytes:
    return repr((status.st_ino, status.st_size, status.st_mtime_ns)).encode()


def _entry(entry: Mapping[str, Any]) -> TensorEntry:
    shape = tuple(map(int, entry["shape"]))
    offset = int(entry["data_offsets"][0])
    if offset < 0 or any(size < 0 for size in shape):
        raise ValueError(entry)
    return TensorEntry(_DTYPES[entry["dtype"]], shape, offset)


def _unreadable(name: str, path: Path, reason: object) -> AdapterError:
    return AdapterError(f"adapter {name!r}: {path} cannot be read ({reason}): copy it again")

"""Adapters' tensors as they are stored: side by side in one line of bytes, found by name. A file is read at once."""

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
KEPT = 32 << 20  # bytes: a thread reads smaller files into the same memory again
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor, dense."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # its first byte

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A safetensors file in memory. Unless it was to be kept, `data` is valid until this thread reads the next one."""

    path: Path
    header: bytes  # names, types, shapes and places, as JSON
    data: Tensor  # [bytes] uint8
    identity: bytes  # of what was opened: another file has another, and so has this one once it is written to


class _Memory(threading.local):
    """A thread's own bytes to read files into: fresh memory would cost as much as the reading."""

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


def read_file(name: str, path: Path, keep: bool = False) -> WeightsFile:
    """AdapterError if it is not there or is no safetensors file. Read, not mapped: another writer cannot crash us."""
    if not path.is_file():
        raise AdapterError(
            f"adapter {name!r}: there is no {path.name} in {path.parent}: save it with safe_serialization=True"
        )
    try:
        with open(path, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, LARGEST_HEADER):
                raise _unreadable(name, path, "no safetensors file, or cut short")
            header = file.read(length)
            data = _memory.take(size - 8 - length, keep)
            _fill(file, data)
    except (OSError, EOFError) as error:
        raise _unreadable(name, path, error) from error
    return WeightsFile(path, header, data, _identity(status))


def find_tensors(name: str, file: WeightsFile) -> dict[str, Stored]:
    """What the header says, checked against the bytes that are there."""
    try:
        entries = json.loads(file.header)
        entries.pop("__metadata__", None)
        found = {tensor: _stored(entry) for tensor, entry in entries.items()}
        ends = [entry["data_offsets"][1] for entry in entries.values()]
        fits = all(one.offset + one.num_bytes == end for one, end in zip(found.values(), ends, strict=True))
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        OverflowError,
        RecursionError,
    ) as error:
        raise _unreadable(name, file.path, f"its header is damaged: {error!r}") from error
    if not fits or max(ends, default=0) != len(file.data):
        raise _unreadable(name, file.path, "cut short, or longer than its header says")
    return found


def tensors_of(file: WeightsFile, found: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Copies, for what has to be converted first."""
    pieces = {name: file.data[one.offset : one.offset + one.num_bytes].clone() for name, one in found.items()}
    return {name: piece.view(found[name].dtype).view(found[name].shape) for name, piece in pieces.items()}


def gather(tensors: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Stored]]:
    """The tensors' bytes [bytes] uint8, and where each of them is."""
    pieces: list[Tensor] = []
    found: dict[str, Stored] = {}
    used = 0
    for name, tensor in tensors.items():
        one = tensor.detach().to("cpu", torch.float32 if tensor.dtype is torch.float64 else tensor.dtype)
        piece = one.contiguous().view(-1).view(torch.uint8)
        found[name] = Stored(one.dtype, tuple(one.shape), used)
        pieces += [piece, piece.new_zeros(-len(piece) % ALIGNMENT)]
        used += len(piece) + len(pieces[-1])
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8), found


def _identity(status: os.stat_result) -> bytes:
    return repr((status.st_ino, status.st_size, status.st_mtime_ns)).encode()


def _stored(entry: Mapping[str, Any]) -> Stored:
    shape = tuple(map(int, entry["shape"]))
    offset = int(entry["data_offsets"][0])
    if offset < 0 or any(size < 0 for size in shape):
        raise ValueError(entry)
    return Stored(_DTYPES[entry["dtype"]], shape, offset)


def _fill(file: Any, data: Tensor) -> None:
    view, done = memoryview(data.numpy()), 0  # type: ignore[arg-type]  # an array is a buffer
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise EOFError("it became shorter while it was read")
        done += count


def _unreadable(name: str, path: Path, reason: object) -> AdapterError:
    return AdapterError(f"adapter {name!r}: {path} cannot be read ({reason}): copy it again")

"""GgufFile: a GGUF file's metadata and tensor table, read from a memory map.

Not `gguf.GGUFReader`: it builds an array object per string, which takes seconds for a vocabulary of 50,000. This reader
walks the header in milliseconds, decodes long string arrays on demand, and needs no `gguf` library at start.
"""

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.errors import ModelError, WeightsError
from quire.weights.hyperparameters import MAX_SIZE

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

# Metadata value types: id -> numpy dtype. 8 is a string and 9 an array.
_SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

# Tensor types: id -> (name, elements per block, bytes per block).
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Offset, shape and packing of one tensor."""

    name: str
    shape: tuple[int, ...]  # as torch sees it: outermost dimension first
    type_id: int
    start: int  # bytes from the start of the file
    num_bytes: int

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.type_id][0]


class StringArray:
    """A metadata array of strings, decoded on each iteration: a vocabulary is rarely needed twice."""

    def __init__(self, buffer: mmap.mmap, start: int, end: int, length: int) -> None:
        self._buffer, self._start, self._end, self._length = buffer, start, end, length

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"<{self._length} strings>"

    def __iter__(self) -> Iterator[str]:
        held, at = self._buffer[self._start : self._end], 0  # slices of bytes are quicker than of a map
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(self._length):
            end = at + 8 + length_at(held, at)[0]
            yield held[at + 8 : end].decode("utf-8", "replace")
            at = end

    def pick(self, indices: set[int]) -> dict[int, str]:
        """The strings at `indices`; indices beyond the end are left out."""
        strings, at = {}, self._start
        length_at = struct.Struct("<Q").unpack_from
        for index in range(min(self._length, max(indices, default=-1) + 1)):
            end = at + 8 + length_at(self._buffer, at)[0]
            if index in indices:
                strings[index] = self._buffer[at + 8 : end].decode("utf-8", "replace")
            at = end
        return strings


class GgufFile:
    """Metadata by key and tensors by name; every tensor is known to lie inside the file.

    Raises WeightsError where the file is no GGUF, is of a version this reader does not know, or is cut.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = _mapped(path)
        try:
            self.metadata, self.tensors, self._header_end = _Reader(self.buffer, path).header()
        except (struct.error, TypeError, ValueError, OverflowError, MemoryError) as error:
            raise WeightsError(
                f"{path}: the header is cut or damaged ({error}): fetch or copy the file again"
            ) from error
        self._check_extent()

    def fingerprint(self) -> str:
        """Changes when the file does; reads the header only, never gigabytes of tensors."""
        stat = self.path.stat()
        digest = hashlib.sha256(f"gguf {stat.st_size} {stat.st_mtime_ns}".encode())
        digest.update(memoryview(self.buffer)[: self._header_end])
        return digest.hexdigest()

    def raw(self, tensor: TensorInfo) -> np.ndarray:
        """The tensor's bytes, mapped: uint8, one row per row of the tensor."""
        flat = np.frombuffer(self.buffer, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.start)
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64)) if tensor.shape else 1
        return flat.reshape(rows, -1) if tensor.num_bytes else flat.reshape(rows, 0)

    def forget(self) -> None:
        """Releases the mapped pages of everything that was read; a later read maps them again.

        Not of one tensor only: rows that are joined with those of the next tensor are read a second time.
        """
        if hasattr(self.buffer, "madvise"):
            self.buffer.madvise(mmap.MADV_DONTNEED)

    def _check_extent(self) -> None:
        needed = max((tensor.start + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if needed > len(self.buffer):
            raise WeightsError(
                f"{self.path}: cut short: its tensors need {needed:,} bytes and the file has {len(self.buffer):,}: "
                "fetch or copy it again"
            )


class _Reader:
    """A cursor over the header."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer, self.path, self.at = buffer, path, 0

    def header(self) -> tuple[dict[str, Any], dict[str, TensorInfo], int]:
        self.at = len(MAGIC)
        version = self.number("<u4")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            raise WeightsError(
                f"{self.path}: GGUF version {version} (or of the other byte order) cannot be read, only {known}: "
                "convert the model again with a current llama.cpp"
            )
        num_tensors, num_entries = self.number("<u8"), self.number("<u8")
        metadata = {}
        for _ in range(num_entries):
            key = self.text()
            metadata[key] = self.value(self.number("<u4"))
        infos = [self.tensor_info() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT)) or 1
        header_end = self.at
        data = -(-self.at // alignment) * alignment
        tensors = {
            name: self.located(name, shape, kind, data + offset) for name, shape, kind, offset in infos
        }
        return metadata, tensors, header_end

    def number(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        value = np.frombuffer(self.buffer, kind, 1, self.at)[0]
        self.at += kind.itemsize
        return value.item()

    def text(self) -> str:
        length = self.number("<u8")
        start, self.at = self.at, self.at + length
        if self.at > len(self.buffer):
            raise ValueError(f"a string of {length} bytes at byte {start}")
        return self.buffer[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(self.scalar(kind))
        element, length = self.number("<u4"), self.number("<u8")
        if element == _STRING:
            return self.strings(length)
        if element == _ARRAY:
            raise ValueError("an array of arrays")
        dtype = np.dtype(self.scalar(element))
        values = np.frombuffer(self.buffer, dtype, length, self.at) if length else np.empty(0, dtype)
        self.at += dtype.itemsize * length
        return values

    def scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind} at byte {self.at}")
        return _SCALARS[kind]

    def strings(self, length: int) -> StringArray:
        start = at = self.at
        buffer, length_at = self.buffer, struct.Struct("<Q").unpack_from
        for _ in range(length):
            at += 8 + length_at(buffer, at)[0]
        if at > len(buffer):
            raise ValueError(f"a list of strings at byte {start}")
        self.at = at
        return StringArray(buffer, start, at, length)

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.text(), self.number("<u4")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} with {dimensions} dimensions")
        sizes = [self.number("<u8") for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self.number("<u4"), self.number("<u8")

    def located(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorInfo:
        if kind not in TENSOR_TYPES:
            raise WeightsError(
                f"{self.path}: tensor {name!r} has type {kind}, which is not known here: "
                "use a file in another quantization, such as Q8_0 or Q4_K_M"
            )
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if shape and shape[-1] % block:
            raise ValueError(
                f"tensor {name!r}: rows of {shape[-1]} do not divide into {type_name} blocks of {block}"
            )
        return TensorInfo(name, shape, kind, start, math.prod(shape) // block * block_bytes)


class GgufKeys:
    """The metadata below one architecture's prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: Any = None) -> Any:
        """One number; a list with one value per layer is taken if all are equal."""
        value = self.get(key)
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise self.error(f"{self.architecture}.{key} differs from layer to layer: not supported")
            value = value[0].item()
        if value is None:
            value = default
        if value is None:
            raise self.error(f"no {self.architecture}.{key} in its metadata: convert the model again")
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(
                f"{self.architecture}.{key} is {value!r}, which must be a number: convert the model again"
            )
        # GGUF keeps float32; 1e-05 shall come back as 1e-05
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def has(self, suffix: str, prefix: str = "blk.0.") -> bool:
        return f"{prefix}{suffix}" in self.file.tensors

    def rows(self, name: str) -> int:
        """Of a matrix; older conversions wrote one of a single row as a vector."""
        shape = self.file.tensors[name].shape
        return shape[0] if len(shape) > 1 else 1

    def floats(self, name: str) -> np.ndarray | None:
        """A small tensor of float32, None where the file has none of this name."""
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type_name != "F32":
            raise self.error(f"{name} is {tensor.type_name}, not F32: convert the model again")
        return np.frombuffer(self.file.buffer, np.float32, tensor.num_bytes // 4, tensor.start)

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.file.path}: {problem}")


def _mapped(path: Path) -> mmap.mmap:
    """The whole file as a private map: writable, so that torch takes views of it, yet never written back."""
    try:
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise WeightsError(
                    f"{path} is not a GGUF file (it does not start with 'GGUF'): check the path"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise WeightsError(f"{path}: no such file: check the path") from None
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read ({error.strerror}): check the path and its permissions"
        ) from error


def token_id_of(metadata: Mapping[str, Any], word: str) -> int | None:
    """The id of a special token; None where it is absent or the largest number, which some files write for none."""
    key = f"tokenizer.ggml.{word}_token_id"
    value = metadata.get(key)
    if value is not None and not isinstance(value, int):
        raise ModelError(
            f"GGUF metadata has {key}={value!r}, which must be a token id: convert the model again"
        )
    return value if value is not None and 0 <= value <= MAX_SIZE else None


def text_of(metadata: Mapping[str, Any], key: str) -> str | None:
    """A metadata string, or None where it is absent or of another type."""
    value = metadata.get(key)
    return value if isinstance(value, str) else None

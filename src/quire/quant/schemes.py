"""Every scheme of stored weights, by name, and the names of encoded rows among a model's parameters.

Packed rows are those of another scheme in the order in which a kernel reads them: the same numbers, packed at load.
"""

from collections.abc import Mapping
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from quire.kernels import choose, native
from quire.kernels.registry import REFERENCE, listed, load
from quire.quant.codebook import CodeBook
from quire.quant.encoded import Encoded, Part, Plain, Scheme
from quire.quant.gguf_blocks import GgufBlocks
from quire.quant.int4 import Int4
from quire.quant.scaled import Scaled

OPERATION = "encoded_linear"
COLUMNS = "columns"  # of GPTQ's act-order: stored beside the packed tensors as it is


class Packed(Scheme):
    """Rows of the scheme `inner` as the `kernel` of a device packs them."""

    def __init__(self, inner: Scheme, kernel: ModuleType) -> None:
        self.inner, self.kernel = inner, kernel
        self.packing = kernel.PACKING
        self.orders = bool(getattr(kernel, "ORDERS", False))

    @property
    def name(self) -> str:
        return f"{self.inner.name}@{self.kernel.LAYOUT}"

    @classmethod
    def parse(cls, name: str, inner: Scheme) -> "Packed | None":
        """`name`: of the layout, behind the @."""
        kernels = (load(OPERATION, alternative) for alternative in listed(OPERATION))  # without building any
        kernel = next((kernel for kernel in kernels if name == kernel.LAYOUT), None)
        return cls(inner, kernel) if kernel is not None else None

    def layout(self, num_rows: int, num_columns: int) -> dict[str, Part]:
        packed = self.kernel.layout(self.inner.name, num_rows, num_columns)
        rows = self.kernel.ROWS
        parts = {name: Part(shape, types, rows=rows) for name, (shape, types) in packed.items()}
        inner = self.inner.layout(num_rows, num_columns)
        return parts | {COLUMNS: inner[COLUMNS]} if COLUMNS in inner else parts

    def gathers(self, shape: tuple[int, int]) -> bool:
        return bool(getattr(self.kernel, "GATHERS", False))

    def gather(self, parts: Mapping[str, Tensor], shape: tuple[int, int], ids: Tensor) -> Tensor:
        rows: Tensor = self.kernel.Product(self.inner.name, parts, shape).gather(ids)
        return rows

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        if self.gathers(shape):
            return self.gather(parts, shape, torch.arange(shape[0], device=parts["packed"].device))
        decoded: Tensor = self.kernel.decode(self.inner.name, parts, shape)
        return decoded


def serves_cpu() -> bool:
    """Whether the CPU has a kernel for encoded rows."""
    return not choose(OPERATION, "cpu").__name__.endswith(REFERENCE)


def prefers_blocks(device: torch.device) -> bool:
    """Whether GGUF's blocks are the default. With AMX, int8 per channel is several times faster in prefill."""
    if device.type == "cpu":
        return serves_cpu() and native.isa() != "amx"
    return serving("gguf-q4_0", (128, 128), device, torch.bfloat16) is not None


def serving(
    scheme: str, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> ModuleType | None:
    """The kernel that multiplies by such rows; "meta" stands for a GPU that is not here."""
    if device.type == "meta":
        kernel = load(OPERATION, "cuda")
        return kernel if kernel.fits(scheme, *shape, dtype) else None
    kernel = choose(OPERATION, device)
    return kernel if kernel.serves(scheme, *shape, dtype) else None


def pack(encoded: Encoded, device: torch.device, dtype: torch.dtype) -> Encoded:
    """The rows as the device's kernel reads them; as they are where it has no product for them.

    `dtype`: of the activations that they will be multiplied by.
    """
    scheme = encoded.scheme
    kernel = serving(scheme.name, encoded.shape, device, dtype)
    if isinstance(scheme, Packed) or kernel is None:
        return encoded
    packed = Packed(scheme, kernel)
    if encoded.device.type == "meta":
        return Encoded.empty(packed, encoded.shape)
    parts = dict(kernel.pack(scheme.name, encoded.parts, encoded.shape))
    if COLUMNS in encoded.parts:
        parts[COLUMNS] = encoded.parts[COLUMNS]
    return Encoded(packed, parts, encoded.shape)


MAIN = ("packed", "blocks", "weight")  # the part with the weights themselves
FLOATS = ("float32", "float16", "bfloat16")


def named(name: str) -> Scheme:
    """The inverse of `Scheme.name`; KeyError if there is none."""
    if name in FLOATS:
        return Plain(getattr(torch, name))
    stored, _, layout = name.partition("@")
    if layout:
        packed = Packed.parse(layout, named(stored))
        if packed is None:
            raise KeyError(name)
        return packed
    for kind in (Int4, CodeBook, GgufBlocks, Scaled):
        scheme = kind.parse(name)
        if scheme is not None:
            return scheme
    raise KeyError(name)


def parameter_names(segments: Mapping[int, Encoded]) -> dict[str, Tensor]:
    """Stored tensors of rows that begin at these rows, under names that `from_parameters` reads.

    Rows in one float type are `weight`, as a full matrix has it; others tell their first row and scheme.
    """
    if len(segments) == 1 and isinstance(segments[0].scheme, Plain):
        return dict(segments[0].parts)
    return {
        f"{first_row}:{encoded.scheme.name}:{name}": part
        for first_row, encoded in segments.items()
        for name, part in encoded.parts.items()
    }


def from_parameters(state: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[int, Encoded]:
    """The inverse of `parameter_names`; other names are passed over. KeyError or WeightsError if rows are missing."""
    pieces: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in state.items():
        if key == "weight":
            pieces.setdefault((0, Plain(tensor.dtype).name), {})[key] = tensor
        elif key.count(":") == 2:
            first_row, scheme, part = key.split(":")
            pieces.setdefault((int(first_row), scheme), {})[part] = tensor
    starts = [*sorted(first for first, _ in pieces), shape[0]]
    if starts[0] != 0:
        raise KeyError("rows from 0 on")
    ends = dict(pairwise(starts))
    return {
        first: Encoded(named(name), parts, (ends[first] - first, shape[1]))
        for (first, name), parts in sorted(pieces.items())
    }

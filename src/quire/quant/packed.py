"""Encoded rows in the order in which a kernel reads them: the same numbers, packed once at load."""

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from quire.kernels import choose, native
from quire.kernels.registry import REFERENCE, listed, load
from quire.quant.encoded import Encoded, Part, Scheme

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
    return device.type == "cuda" and choose(OPERATION, device).serves("gguf-q4_0", 128, 128, torch.bfloat16)


def pack(encoded: Encoded, device: torch.device, dtype: torch.dtype) -> Encoded:
    """The rows as the device's kernel reads them; as they are where it has no product for them.

    `dtype`: of the activations that they will be multiplied by.
    """
    kernel = choose(OPERATION, device)
    scheme = encoded.scheme
    if isinstance(scheme, Packed) or not kernel.serves(scheme.name, *encoded.shape, dtype):
        return encoded
    packed = Packed(scheme, kernel)
    if encoded.device.type == "meta":
        return Encoded.empty(packed, encoded.shape)
    parts = dict(kernel.pack(scheme.name, encoded.parts, encoded.shape))
    if COLUMNS in encoded.parts:
        parts[COLUMNS] = encoded.parts[COLUMNS]
    return Encoded(packed, parts, encoded.shape)

"""Encoded rows by native code: weights stay in 4 to 8 bits, activations are rounded to int8 by blocks of 32 columns.

A row of a result depends on that row alone, bit for bit, and every instruction set computes the same bits.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from quire.kernels import huge_pages, native
from quire.kernels.encoded_linear.books import CODES, dynamic_map

LAYOUT = "cpu1"
ROWS = 16
STEP = 32  # columns of activations with one scale
PACKING = ROWS * STEP
GATHERS = True  # `NativeProduct.gather` reads single rows
ORDERS = True  # a product takes x by the columns of the model, also where stored ones have another order

_FILES = {  # GGUF's blocks: coding, number of the source, columns of a group
    "gguf-q4_0": (0, 0, 32),
    "gguf-q4_1": (1, 1, 32),
    "gguf-q8_0": (6, 2, 32),
    "gguf-q4_k": (3, 3, 256),
    "gguf-q5_k": (4, 4, 256),
    "gguf-q6_k": (5, 5, 256),
}
_SCALED4, _ZERO4, _SCALED8_WIDE, _BOOK4, _NESTED4 = 0, 2, 7, 8, 9
_INT4, _BOOK, _INT8, _FLOAT = 6, 7, 8, 9  # sources
_STEP_BYTES = {4: 320, 5: 384, 6: 512, 7: 512}  # of codes; others have 4 bits: 256
_HEADER_BYTES = {0: 32, 1: 64, 2: 48, 3: 320, 4: 320, 5: 288, 6: 32, 7: 64, 8: 64, 9: 16}
_FLOATS = {"float32": (10, torch.float32), "float16": (11, torch.float16), "bfloat16": (12, torch.bfloat16)}
_UNITS = {"nf4": 32767, "fp4": 12 * 2730, "fp4bnb": 192 * 170}  # so that the entries of FP4 are whole numbers


@dataclass(frozen=True, slots=True)
class Coding:
    """How a scheme's rows are packed. Numbers are those of tile.h and pack.h."""

    number: int
    source: int
    group: int  # columns with one header of scales
    book: str = ""
    tile: tuple[int, int] = (1, 0)  # rows and columns with one scale, of int8

    @property
    def group_bytes(self) -> int:
        if self.source == _FLOAT:
            return ROWS * STEP * (4 if self.number == 10 else 2)
        return _HEADER_BYTES[self.number] + self.group // STEP * _STEP_BYTES.get(self.number, 256)


@cache
def coding_of(scheme: str, num_columns: int) -> Coding | None:
    """None: rows of this scheme and length have no product here."""
    if scheme in _FLOATS:
        return Coding(_FLOATS[scheme][0], _FLOAT, STEP)
    if num_columns % STEP:
        return None
    if scheme in _FILES:
        number, source, group = _FILES[scheme]
        return Coding(number, source, group)
    if parsed := re.fullmatch(r"int4-g(\d+)(z?)p?", scheme):
        group = int(parsed[1])
        return Coding(_ZERO4 if parsed[2] else _SCALED4, _INT4, group) if group % STEP == 0 else None
    if parsed := re.fullmatch(r"(nf4|fp4|fp4bnb)-b(\d+)(n?)", scheme):
        group = int(parsed[2])
        return (
            Coding(_NESTED4 if parsed[3] else _BOOK4, _BOOK, group, parsed[1]) if group % STEP == 0 else None
        )
    if parsed := re.fullmatch(r"int8-(?:channel|(\d+)x(\d+))", scheme):
        width = int(parsed[2] or 0) or num_columns
        sizes = [size for size in (256, 128, 64, 32) if num_columns % size == 0 and width % size == 0]
        return Coding(_SCALED8_WIDE, _INT8, sizes[0], tile=(int(parsed[1] or 1), width)) if sizes else None
    return None


def serves(scheme: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> bool:
    return dtype is torch.float32 and coding_of(scheme, num_columns) is not None


def layout(
    scheme: str, num_rows: int, num_columns: int
) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype]]]:
    coding = _known(scheme, num_columns)
    blocks, steps = -(-num_rows // ROWS), -(-num_columns // STEP)
    step_bytes = coding.group_bytes * STEP // coding.group
    parts: dict[str, tuple[tuple[int, ...], tuple[torch.dtype]]] = {
        "packed": ((blocks, steps, step_bytes), (torch.uint8,))
    }
    if coding.number == _NESTED4:
        parts["front"] = ((blocks, _front_floats(coding, num_columns)), (torch.float32,))
    return parts


def pack(scheme: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    coding = _known(scheme, shape[1])
    parts = {
        name: huge_pages.zeros(*size, dtype=dtype)
        for name, (size, (dtype,)) in layout(scheme, *shape).items()
    }
    if coding.source == _FLOAT:
        _pack_floats(parts["packed"], stored["weight"])
        return parts
    codes = next(stored[name] for name in ("blocks", "packed", "weight") if name in stored).contiguous()
    scales, zeros = _scales(coding, stored, shape), stored.get("zeros")
    if coding.number == _NESTED4:
        _fill_front(parts["front"], coding, stored, shape)
    zeros = zeros.contiguous() if zeros is not None else None
    native.call(
        "encoded_pack",
        (
            *_weight(coding, parts, shape), coding.source, codes.data_ptr(), codes.nbytes // max(1, shape[0]),
            native.address(scales), native.address(zeros),
        ),
        (codes, scales, zeros),
    )  # fmt: skip
    return parts


def decode(scheme: str, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """float32 [num_rows, num_columns], by columns as they are stored."""
    return NativeProduct(scheme, parts, shape).gather(torch.arange(shape[0]))


class NativeProduct:
    """Products by packed rows, and rows taken out of them."""

    def __init__(self, scheme: str, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
        coding = _known(scheme, shape[1])
        self._shape = shape
        self._weight = _weight(coding, parts, shape)
        self._order = parts.get("columns")
        self._floats = _floats(parts["packed"], _FLOATS[scheme][1]) if scheme in _FLOATS else None
        self._kept = (parts["packed"], parts.get("front"), self._order, _book(coding.book))

    def linear(self, x: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        self._run("encoded_linear", x, out, bias, residual)

    def linear_silu_mul(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        if self._shape[0] % (2 * ROWS):  # gate and up would share a block
            return None
        out = native.empty(x.shape[0], self._shape[0] // 2)
        self._run("encoded_linear_silu_mul", x, out, bias, None)
        return out

    def gather(self, ids: Tensor) -> Tensor:
        """ids [T] int32 or int64 -> float32 [T, num_columns]; -1: zeros. Floats are not gathered natively."""
        if self._floats is not None:
            rows = self._floats[ids // ROWS, :, ids % ROWS].float()
            return torch.where(ids[:, None] < 0, 0.0, rows[:, : self._shape[1]])
        wide = ids.dtype is torch.int64
        native.check_indices(torch.int64 if wide else torch.int32, ids)
        out = native.empty(ids.shape[0], self._shape[1])
        native.call(
            "encoded_gather",
            (*self._weight, ids.data_ptr(), int(wide), ids.shape[0], out.data_ptr(), out.stride(0)),
            (*self._kept, ids, out),
        )
        return out

    def _run(self, name: str, x: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
        native.check_floats(x, bias, residual, out)
        native.call(
            name,
            (
                *self._weight, x.data_ptr(), x.stride(0), x.shape[0], native.address(self._order),
                native.address(bias), native.address(residual), 0 if residual is None else residual.stride(0),
                out.data_ptr(), out.stride(0),
            ),
            (*self._kept, x, bias, residual, out),
        )  # fmt: skip


Product = NativeProduct


def _known(scheme: str, num_columns: int) -> Coding:
    coding = coding_of(scheme, num_columns)
    assert coding is not None, f"no product for {scheme} with {num_columns} columns"
    return coding


def _weight(coding: Coding, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> tuple[int, ...]:
    """A stored weight as native operations take it."""
    packed = parts["packed"]
    return (
        packed.data_ptr(), packed.shape[1] * packed.shape[2], shape[1], shape[0], coding.number, coding.group,
        native.address(_book(coding.book)), native.address(parts.get("front")),
    )  # fmt: skip


def _floats(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed floats as [blocks, columns, ROWS]."""
    return packed.view(dtype).view(packed.shape[0], -1, ROWS)


def _pack_floats(packed: Tensor, weight: Tensor) -> None:
    num_rows, num_columns = weight.shape
    target = _floats(packed, weight.dtype)
    whole = num_rows // ROWS * ROWS
    target[: whole // ROWS, :num_columns] = weight[:whole].view(-1, ROWS, num_columns).transpose(1, 2)
    if whole < num_rows:
        target[-1, :num_columns, : num_rows - whole] = weight[whole:].t()


def _scales(coding: Coding, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | None:
    """[num_rows, groups] as the header of a group keeps them; None: they lie in GGUF's blocks."""
    if coding.source == _INT4:
        return stored["scales"].half().contiguous()
    if coding.source == _BOOK:
        return stored["absmax"].contiguous()
    if coding.source != _INT8:
        return None
    rows, columns = coding.tile
    scales = stored["scales"].repeat_interleave(rows, 0)[: shape[0]]
    groups = shape[1] // coding.group
    return scales.repeat_interleave(columns // coding.group, 1)[:, :groups].contiguous()


def _front_floats(coding: Coding, num_columns: int) -> int:
    return ROWS * (num_columns // coding.group) // 256 + 3


def _fill_front(front: Tensor, coding: Coding, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> None:
    """Per block of rows: the offset of absmaxes, and the second-level scales of its rows in order."""
    nested = stored["nested"].flatten()
    groups = shape[1] // coding.group
    first = torch.arange(front.shape[0]) * ROWS * groups // 256
    at = first[:, None] + torch.arange(front.shape[1] - 1)
    front[:, 0] = stored["offset"]
    front[:, 1:] = torch.where(at < nested.shape[0], nested[at.clamp(max=nested.shape[0] - 1)], 0.0)


@cache
def _book(code: str) -> Tensor | None:
    """A code book as tile.h has it: whole numbers, exact values, unit, values of absmaxes."""
    if not code:
        return None
    values = np.array(CODES[code], np.float32)
    unit = _UNITS[code]
    whole = np.round(values.astype(np.float64) * unit).astype(np.int16)
    floats = np.concatenate((values, [unit], dynamic_map())).astype(np.float32)
    return torch.from_numpy(np.frombuffer(whole.tobytes() + floats.tobytes(), np.uint8).copy())

"""NF4 and FP4: four bits choose an entry of a code book, times the absmax of a block of 64 columns.

Double quantization keeps the absmaxes in 8 bits as well: their mean is subtracted, and blocks of 256 of them, counted
over the whole weight, share one float32 scale. All of it is bitsandbytes' arithmetic, so that its files keep
their bytes; `fp4` is E2M1, and `fp4bnb` the code book that bitsandbytes calls FP4.
"""

import math
import re
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from quire.kernels.encoded_linear.books import CODES, dynamic_map
from quire.quant.encoded import TILE_WEIGHTS, Part, Scheme, divided
from quire.quant.int4 import inverse

BLOCK = 64
NESTED_BLOCK = 256


class CodeBook(Scheme):
    """The first column of two is in the high half of their byte, as bitsandbytes stores it."""

    packing = 2

    def __init__(self, code: str, block: int = BLOCK, nested: bool = True) -> None:
        self.code, self.block, self.nested = code, block, nested

    @property
    def name(self) -> str:
        return f"{self.code}-b{self.block}{'n' if self.nested else ''}"

    @classmethod
    def parse(cls, name: str) -> "CodeBook | None":
        found = re.fullmatch(r"(nf4|fp4|fp4bnb)-b(\d+)(n?)", name)
        return cls(found[1], int(found[2]), bool(found[3])) if found else None

    def layout(self, num_rows: int, num_columns: int) -> dict[str, Part]:
        blocks = divided(num_columns, self.block, self.name)
        packed = Part((num_rows, num_columns // 2), (torch.uint8,), columns=2)
        if not self.nested:
            absmax = Part((num_rows, blocks), (torch.float32,), columns=self.block)
            return {"packed": packed, "absmax": absmax}
        period, scales = _period(blocks)
        return {
            "packed": packed,
            "absmax": Part((num_rows, blocks), (torch.uint8,), columns=self.block),
            "nested": Part((-(-num_rows // period), scales), (torch.float32,), rows=period),
            "offset": Part((1,), (torch.float32,), rows=0),
        }

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        step = max(1, TILE_WEIGHTS // rows.shape[1])
        pieces = [self._encode_piece(rows[first : first + step]) for first in range(0, rows.shape[0], step)]
        packed, absmax = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        parts = {"packed": packed, "absmax": absmax}
        return parts if not self.nested else parts | nest(absmax)

    def _encode_piece(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        blocks = rows.float().reshape(rows.shape[0], -1, self.block)
        absmax = blocks.abs().amax(2)
        index = nearest(_table(self.code, rows.device), blocks * inverse(absmax)[:, :, None]).view(rows.shape)
        return (index[:, 0::2] << 4) | index[:, 1::2], absmax

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        packed = parts["packed"]
        index = torch.stack((packed >> 4, packed & 15), dim=2).view(shape[0], -1, self.block)
        values = _table(self.code, packed.device)[index.long()]
        return (values * self.absmax(parts)[:, :, None]).view(shape)

    def absmax(self, parts: Mapping[str, Tensor]) -> Tensor:
        """float32 [num_rows, blocks]."""
        if not self.nested:
            return parts["absmax"]
        index = parts["absmax"]
        values = signed_map(index.device)[index.long()]
        entry = torch.arange(index.numel(), device=index.device).view(index.shape)
        return values * parts["nested"].flatten()[entry // NESTED_BLOCK] + parts["offset"]

    def cut_columns(
        self, parts: Mapping[str, Tensor], shape: tuple[int, int], first: int, last: int
    ) -> tuple[Scheme, dict[str, Tensor]]:
        """Blocks of a second level run through whole rows: a cut keeps its absmaxes in float32."""
        plain = CodeBook(self.code, self.block, nested=False)
        absmax = {"packed": parts["packed"], "absmax": self.absmax(parts)}
        return super(CodeBook, plain).cut_columns(absmax, shape, first, last)


def _period(blocks: int) -> tuple[int, int]:
    """(rows, scales): after this number of rows of `blocks` blocks a second-level block ends with a row."""
    common = math.gcd(blocks, NESTED_BLOCK)
    return NESTED_BLOCK // common, blocks // common


def nested_shape(scales: Tensor, absmax_shape: tuple[int, int]) -> Tensor:
    """Second-level scales, one per 256 absmaxes, as they are stored: whole periods of rows, the last filled up."""
    num_rows, blocks = absmax_shape
    period, per_period = _period(blocks)
    kept = scales.new_zeros(-(-num_rows // period), per_period)
    kept.view(-1)[: scales.numel()] = scales
    return kept


def nest(absmax: Tensor) -> dict[str, Tensor]:
    """Double quantization of absmax [n, blocks] float32."""
    offset = absmax.mean()
    flat = (absmax - offset).flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    scales = padded.abs().amax(1)
    index = nearest(signed_map(absmax.device), padded * inverse(scales)[:, None])
    return {
        "absmax": index.flatten()[: flat.numel()].view(absmax.shape),
        "nested": nested_shape(scales, (absmax.shape[0], absmax.shape[1])),
        "offset": offset.view(1),
    }


def nearest(table: Tensor, values: Tensor) -> Tensor:
    """uint8 index of the entry of `table` (any order) nearest to each value."""
    ordered, order = table.sort(stable=True)
    bounds = (ordered[1:] + ordered[:-1]) / 2
    return order.to(torch.uint8)[torch.bucketize(values.contiguous(), bounds)]


@cache
def _table(code: str, device: torch.device) -> Tensor:
    return torch.tensor(CODES[code], device=device)


@cache
def signed_map(device: torch.device) -> Tensor:
    """256 steps from -1 to 1, close to each other near 0."""
    return torch.tensor(dynamic_map(), device=device)

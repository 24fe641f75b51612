"""int4 by groups: weight = scale × (q − zero), q from 0 to 15, one scale and zero point per row and group of columns.

Two columns share a byte, the even one in its low half. Symmetric schemes have zero = 8 and do not store it.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.quant.encoded import SCALE_DTYPES, Part, Scheme, divided

MIDDLE = 8  # the zero point of symmetric schemes
GROUPS = (128, 64, 32)  # that quantizing at load chooses from: the largest that divides a row


class Int4(Scheme):
    """`permuted`: stored columns are in another order, so that groups are contiguous (GPTQ's act-order)."""

    packing = 2

    def __init__(self, group: int, zeros: bool = False, permuted: bool = False) -> None:
        self.group, self.zeros, self.permuted = group, zeros, permuted

    @property
    def name(self) -> str:
        return f"int4-g{self.group}{'z' if self.zeros else ''}{'p' if self.permuted else ''}"

    @classmethod
    def parse(cls, name: str) -> "Int4 | None":
        found = re.fullmatch(r"int4-g(\d+)(z?)(p?)", name)
        return cls(int(found[1]), bool(found[2]), bool(found[3])) if found else None

    def layout(self, num_rows: int, num_columns: int) -> dict[str, Part]:
        groups = divided(num_columns, self.group, self.name)
        divided(num_columns, 2, self.name)
        parts = {
            "packed": Part((num_rows, num_columns // 2), (torch.uint8,), columns=2),
            "scales": Part((num_rows, groups), SCALE_DTYPES, columns=self.group),
        }
        if self.zeros:
            parts["zeros"] = Part((num_rows, groups), (torch.uint8,), columns=self.group)
        if self.permuted:
            parts["columns"] = Part((num_columns,), (torch.int32,), rows=0)
        return parts

    def encode(self, rows: Tensor, steps: float = 7.5) -> dict[str, Tensor]:
        """Rounds to nearest; the stored 16-bit scale is the one that is rounded with.

        A symmetric scale is absmax / `steps`. 7.5 uses all 16 values, as llm-compressor does; 7 only −7 to 7.
        """
        groups = rows.float().reshape(rows.shape[0], -1, self.group)
        if self.zeros:
            low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
            scales = ((high - low) / 15).half()
            zeros = torch.round(-low * inverse(scales)).clamp_(0, 15)
        else:
            scales = (groups.abs().amax(2) / steps).half()
            zeros = torch.full_like(scales, MIDDLE, dtype=torch.float32)
        q = torch.round(groups * inverse(scales)[:, :, None]) + zeros[:, :, None]
        parts = {"packed": pack(q.clamp_(0, 15).to(torch.uint8).reshape(rows.shape)), "scales": scales}
        if self.zeros:
            parts["zeros"] = zeros.to(torch.uint8)
        return parts

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        q = unpack(parts["packed"]).view(shape[0], -1, self.group).float()
        zeros = parts["zeros"].float()[:, :, None] if self.zeros else MIDDLE
        return ((q - zeros) * parts["scales"].float()[:, :, None]).view(shape)

    def cut_columns(
        self, parts: Mapping[str, Tensor], shape: tuple[int, int], first: int, last: int
    ) -> tuple[Scheme, dict[str, Tensor]]:
        if self.permuted:
            raise NotImplementedError(
                "columns in act-order cannot be cut: their groups are spread over the row"
            )
        return super().cut_columns(parts, shape, first, last)


def pack(q: Tensor) -> Tensor:
    """uint8 [n, K] of 0 .. 15 -> [n, K / 2], even columns in the low half."""
    return q[:, 0::2] | (q[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=2).view(packed.shape[0], -1)


def inverse(scales: Tensor) -> Tensor:
    """1 / scales in float32, and 0 where a scale is 0."""
    wide = scales.float()
    return torch.where(wide == 0, 0.0, 1.0 / wide)

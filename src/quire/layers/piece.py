"""PieceLayout: all parameters of one decoder layer in one contiguous piece of bytes, so that they move in one copy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256  # a matrix unit's widest load, on any device


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer."""

    name: str  # as `layers.state.collect` spells it
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # byte

    @property
    def end(self) -> int:
        return self.first + torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PieceLayout:
    parts: tuple[Part, ...]
    num_bytes: int

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> "PieceLayout":
        """Room for these tensors, in their order."""
        parts = []
        first = 0
        for name, tensor in state.items():
            parts.append(Part(name, tensor.dtype, tuple(tensor.shape), first))
            first = -(-parts[-1].end // ALIGNMENT) * ALIGNMENT
        return cls(tuple(parts), first)

    def views(self, piece: Tensor) -> dict[str, Tensor]:
        """piece [num_bytes] uint8 -> the layer's tensors inside it."""
        return {
            part.name: piece[part.first : part.end].view(part.dtype).view(part.shape) for part in self.parts
        }

    def fill(self, piece: Tensor, state: Mapping[str, Tensor]) -> None:
        """Copies a layer's tensors into a piece, from and to any device. ValueError if they are not of this layout."""
        if PieceLayout.of(state) != self:
            raise ValueError("layers of one model differ in shape, and cannot take turns in one buffer")
        for name, view in self.views(piece).items():
            view.copy_(state[name])

    def to_json(self) -> list[list[Any]]:
        return [[p.name, str(p.dtype).removeprefix("torch."), list(p.shape)] for p in self.parts]

    @classmethod
    def from_json(cls, described: list[list[Any]]) -> "PieceLayout":
        """The inverse of `to_json`."""
        kinds = [(name, getattr(torch, dtype), shape) for name, dtype, shape in described]
        return cls.of({name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in kinds})

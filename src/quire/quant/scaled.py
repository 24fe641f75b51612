"""int8 and fp8 weights with one float scale per tile of rows × columns: per channel, group or 128 × 128 block."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.quant.encoded import Part, Scheme
from quire.quant.int4 import inverse

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {"int8": 127.0, "fp8": 448.0}


class Scaled(Scheme):
    """`columns` = 0: a tile is as wide as the weight. The last tiles of a weight may be smaller."""

    def __init__(self, kind: str, rows: int = 1, columns: int = 0) -> None:
        self.kind, self.tile_rows, self.tile_columns = kind, rows, columns

    @property
    def name(self) -> str:
        per = (
            "channel"
            if (self.tile_rows, self.tile_columns) == (1, 0)
            else f"{self.tile_rows}x{self.tile_columns}"
        )
        return f"{self.kind}-{per}"

    @classmethod
    def parse(cls, name: str) -> "Scaled | None":
        found = re.fullmatch(r"(int8|fp8)-(?:channel|(\d+)x(\d+))", name)
        return cls(found[1], int(found[2] or 1), int(found[3] or 0)) if found else None

    def layout(self, num_rows: int, num_columns: int) -> dict[str, Part]:
        tiles = -(-num_columns // self.tile_columns) if self.tile_columns else 1
        return {
            "weight": Part((num_rows, num_columns), (KINDS[self.kind],), columns=1),
            "scales": Part(
                (-(-num_rows // self.tile_rows), tiles),
                (torch.float32,),
                rows=self.tile_rows,
                columns=self.tile_columns,
            ),
        }

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        num_rows, num_columns = rows.shape
        high, wide = self.tile_rows, self.tile_columns or num_columns
        padded = torch.nn.functional.pad(rows.float(), (0, -num_columns % wide, 0, -num_rows % high))
        tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        scales = tiles.abs().amax((1, 3)) / LARGEST[self.kind]
        q = self._spread(inverse(scales), (num_rows, num_columns)) * rows.float()
        if self.kind == "int8":
            q = q.round_().clamp_(-127, 127)
        return {"weight": q.to(KINDS[self.kind]), "scales": scales}

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        return parts["weight"].float() * self._spread(parts["scales"], shape)

    def _spread(self, scales: Tensor, shape: tuple[int, int]) -> Tensor:
        """[tiles, tiles] -> broadcastable to the weight's shape."""
        if self.tile_rows > 1:
            scales = scales.repeat_interleave(self.tile_rows, 0)[: shape[0]]
        if self.tile_columns:
            scales = scales.repeat_interleave(self.tile_columns, 1)[:, : shape[1]]
        return scales

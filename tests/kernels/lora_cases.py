"""Adapters for the kernel tests: tiles scattered over a pool of not-a-numbers, lines drawn at random."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.lora.records import CODES, LoraSegments, LoraTables, Places, scales_offset
from quire.layers.lora import group_by_adapter

GAP = 16  # elements of nothing between two tiles


@dataclass(frozen=True, slots=True)
class LoraCase:
    """A fused projection with an adapter per slot; `dense` is what each line should add."""

    x: Tensor  # [T, inputs]
    y: Tensor  # [T, outputs]
    tables: LoraTables
    segments: LoraSegments
    first_site: int
    bounds: tuple[int, ...]

    def arguments(self) -> tuple[object, ...]:
        return (self.tables, self.segments, self.first_site, self.bounds)


def lora_tables(
    ranks: list[list[int]],  # of each slot at each site; -r: r ranks, cut into tiles of 5
    num_inputs: int,
    widths: list[int],
    dtype: torch.dtype,
    num_tiles: int = 32,
) -> LoraTables:
    """Site 0 is empty everywhere; site 1 + p is part p."""
    pieces: list[Tensor] = [_nothing(GAP, dtype)]
    tables = LoraTables.empty(torch.empty(0), len(ranks), 1 + len(widths), num_tiles)
    used = GAP
    for slot, parts in enumerate(ranks):
        for site, (signed, width) in enumerate(zip(parts, widths, strict=True), start=1):
            rank, tile_ranks = abs(signed), 5 if signed < 0 else 16
            tables.ranks[slot, site], tables.tile_ranks[slot, site] = rank, tile_ranks
            tables.scales[slot, site] = 0.5 + slot
            for starts, length in ((tables.tile_a, num_inputs), (tables.tile_b, width)):
                for tile, first in enumerate(range(0, rank, tile_ranks)):
                    count = min(tile_ranks, rank - first)
                    numbers = _numbers(count, length, dtype, starts is tables.tile_a)
                    pad = GAP + -len(numbers) % GAP
                    starts[slot, site, tile] = used
                    pieces += [numbers, _nothing(pad, dtype)]
                    used += len(numbers) + pad
    weights = torch.cat(pieces)
    return LoraTables(weights, *(getattr(tables, name) for name in LoraTables.__slots__[1:]))


def _nothing(count: int, dtype: torch.dtype) -> Tensor:
    return torch.full((count,), -128 if dtype is torch.int8 else float("nan"), dtype=dtype)


def _numbers(count: int, length: int, dtype: torch.dtype, is_a: bool) -> Tensor:
    """A tile; of bytes, what they are multiples of lies behind a tile of A."""
    if dtype is not torch.int8:
        return torch.randn(count * length).div(length**0.5).to(dtype)
    numbers = torch.randint(-127, 128, (count * length,), dtype=torch.int8)
    if not is_a:
        return numbers
    pad = scales_offset(count, length) - len(numbers)
    scales = (torch.rand(count) + 0.5) * 1e-4
    return torch.cat([numbers, _nothing(pad, dtype), scales.view(torch.int8)])


def lora_segments(line_slots: list[int], max_lines: int = 16, unused: int = 0) -> LoraSegments:
    """Segments of these lines, and `unused` more with nothing in them."""
    grouped = group_by_adapter(np.array(line_slots, np.int32), max_lines)
    slots = np.append(grouped.slots, np.full(unused, -1, np.int32)).astype(np.int32)
    starts = np.append(grouped.starts, np.full(unused, grouped.starts[-1])).astype(np.int32)
    return LoraSegments(
        torch.from_numpy(grouped.order), torch.from_numpy(slots), torch.from_numpy(starts), max_lines
    )


def lora_case(
    line_slots: list[int],
    ranks: list[list[int]],
    num_inputs: int,
    widths: list[int],
    dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype | None = None,
    max_lines: int = 16,
    unused: int = 3,
) -> LoraCase:
    tables = lora_tables(ranks, num_inputs, widths, weights_dtype or dtype)
    x = torch.randn(len(line_slots), num_inputs + 8).to(dtype)[:, :num_inputs]
    y = torch.randn(len(line_slots), sum(widths)).to(dtype)
    bounds = (0, *np.cumsum(widths).tolist())
    return LoraCase(x, y, tables, lora_segments(line_slots, max_lines, unused), 1, bounds)


def pack_case(given: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Places, int]:
    """Bytes with matrices of all shapes, where they are to go, and how many bytes that takes. One line is all zeros."""
    shapes = [(1, 33, 7, 16), (4, 64, 96, 16), (17, 40, 48, 16), (23, 31, 50, 5), (70, 96, 33, 16)]
    pieces: list[Tensor] = []
    sites, tiles = [], np.zeros((2, len(shapes), 32), np.int64)
    read = used = 0
    for site, (rank, inputs, outputs, tile_ranks) in enumerate(shapes):
        row = [rank, inputs, outputs, tile_ranks]
        for matrix in (torch.randn(rank, inputs) * 3, torch.randn(outputs, rank) / 7):
            matrix[:, -1] = 0
            pieces.append(matrix.to(given).view(-1).view(torch.uint8))
            row += [read, CODES[given]]
            read += len(pieces[-1])
        sites.append(row)
        for which, width in enumerate((inputs, outputs)):
            for tile, first in enumerate(range(0, rank, tile_ranks)):
                count = min(tile_ranks, rank - first)
                tiles[which, site, tile] = used
                used += scales_offset(count, width) + (4 * count if dtype is torch.int8 else 0)
                used += -used % GAP
    places = Places(torch.tensor(sites), torch.from_numpy(tiles[0]), torch.from_numpy(tiles[1]))
    return torch.cat(pieces), places, used * dtype.itemsize

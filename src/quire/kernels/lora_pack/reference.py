"""Packs an adapter's matrices into tiles, in plain torch."""

import torch
from torch import Tensor

from quire.kernels.lora.records import (
    LARGEST_BYTE,
    SCALE_BYTES,
    SMALLEST_PEAK,
    SOURCES,
    Places,
    scales_offset,
)


def pack(source: Tensor, places: Places, target: Tensor, dtype: torch.dtype) -> int:
    """Writes all tiles: A as it is, B transposed, as `dtype`. Bytes between tiles are left unchanged.

    `source`, `target`: [bytes] uint8. Returns -1, or 2 * site for an A and 2 * site + 1 for a B with a number
    that is not finite in `dtype`, the first of them; the target is then undefined. In int8 every rank has a scale of
    its own, so that its largest number is 127.
    """
    elements = target.view(dtype)
    for site, numbers in enumerate(places.sites.tolist()):
        rank, inputs, outputs, tile_ranks, a_offset, a_code, b_offset, b_code = numbers
        written = torch.float32 if dtype is torch.int8 else dtype
        a = matrix_at(source, a_offset, SOURCES[a_code], rank, inputs).to(written)
        b = matrix_at(source, b_offset, SOURCES[b_code], outputs, rank).to(written).t()
        for which, matrix in enumerate((a, b)):
            if not bool(torch.isfinite(matrix).all()):
                return 2 * site + which
        starts = places.tile_a[site].tolist(), places.tile_b[site].tolist()
        if dtype is not torch.int8:
            _place(elements, a, starts[0], tile_ranks)
            _place(elements, b, starts[1], tile_ranks)
            continue
        peaks = a.abs().amax(1), b.abs().amax(1)
        largest = torch.full_like(peaks[0], LARGEST_BYTE)
        scales = peaks[0] / largest * (peaks[1] / largest)
        if not bool(torch.isfinite(scales).all()):
            return 2 * site
        _place(elements, _rounded(a, peaks[0]), starts[0], tile_ranks)
        _place(elements, _rounded(b, peaks[1]), starts[1], tile_ranks)
        for tile, first in enumerate(range(0, rank, tile_ranks)):
            some = scales[first : first + tile_ranks]
            behind = starts[0][tile] + scales_offset(len(some), inputs)
            elements[behind : behind + SCALE_BYTES * len(some)] = some.contiguous().view(torch.int8)
    return -1


def matrix_at(source: Tensor, offset: int, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """[rows, columns] at a byte of the source; a view if it is aligned."""
    piece = source[offset : offset + rows * columns * dtype.itemsize]
    if piece.data_ptr() % dtype.itemsize:  # a view needs its alignment
        piece = piece.clone()
    return piece.view(dtype).view(rows, columns)


def _rounded(rows: Tensor, peaks: Tensor) -> Tensor:
    largest = torch.full_like(peaks, LARGEST_BYTE)  # torch turns 127 / peaks into 127 * (1 / peaks)
    inverse = torch.where(peaks > SMALLEST_PEAK, largest / peaks, 0.0)
    return (rows * inverse[:, None]).round().to(torch.int8)


def _place(elements: Tensor, rows: Tensor, starts: list[int], tile_ranks: int) -> None:
    for tile, first in enumerate(range(0, len(rows), tile_ranks)):
        some = rows[first : first + tile_ranks]
        elements[starts[tile] : starts[tile] + some.numel()].view(some.shape).copy_(some)

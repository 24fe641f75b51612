"""Cuts an adapter's bytes into pieces that are copied to a device as they are and packed into tiles there."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.lora.records import A_CODE, B_CODE, SOURCES, Places
from quire.kernels.lora_pack import reference

ALIGNMENT = 16  # bytes, of a piece's first byte
# Columns of AdapterPiece.tiles
FIRST, BY_ROW, BY_COLUMN, ROWS, COLUMNS, PLACE = range(6)


@dataclass(frozen=True, slots=True)
class AdapterPiece:
    """Matrices of one dtype that follow each other in the source."""

    first: int  # byte of the source
    last: int  # the byte behind it
    given: torch.dtype
    # [J, 6] int64: the tile's first element in the piece, elements from row to row and from column to column there,
    # rows, columns, and its first element in the target
    tiles: np.ndarray


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix in the source; its ranks are rows of a tile."""

    code: int
    offset: int
    rank: int
    width: int
    is_transposed: bool  # [width, rank] in the source
    tile_ranks: int
    starts: list[int]

    @property
    def last(self) -> int:
        return self.offset + self.rank * self.width * SOURCES[self.code].itemsize


def cut(places: Places, largest: int) -> tuple[AdapterPiece, ...]:
    """Pieces of up to `largest` bytes; none if a matrix is larger or not aligned."""
    groups: list[list[_Matrix]] = []
    for matrix in sorted(_matrices(places), key=lambda matrix: (matrix.code, matrix.offset)):
        size = SOURCES[matrix.code].itemsize
        if matrix.offset % size or matrix.last - matrix.offset + ALIGNMENT > largest:
            return ()
        last = groups[-1] if groups else None
        if last is None or last[0].code != matrix.code or matrix.last - _begin(last) > largest:
            groups.append([matrix])
        else:
            last.append(matrix)
    return tuple(
        AdapterPiece(_begin(group), max(m.last for m in group), SOURCES[group[0].code], _tiles(group))
        for group in groups
    )


def first_wrong(source: Tensor, places: Places, dtype: torch.dtype) -> int:
    """The result of `pack` without packing: -1, or which matrix has a number that is not finite in `dtype`.

    Usually one operation over all bytes, which releases the interpreter lock: the minimum and maximum of many numbers
    are not finite if any of them is not.
    """
    codes = set(places.sites[:, [A_CODE, B_CODE]].unique().tolist())
    given = SOURCES[codes.pop()] if len(codes) == 1 else None
    is_whole = given is not None and not (len(source) | source.data_ptr()) % given.itemsize
    if given is not None and is_whole and len(source) and _is_finite(source.view(given), dtype):
        return -1
    for site, numbers in enumerate(places.sites.tolist()):
        rank, inputs, outputs, _, a_offset, a_code, b_offset, b_code = numbers
        a = reference.matrix_at(source, a_offset, SOURCES[a_code], rank, inputs)
        b = reference.matrix_at(source, b_offset, SOURCES[b_code], outputs, rank)
        for which, matrix in enumerate((a, b)):
            if not _is_finite(matrix, dtype):
                return 2 * site + which
    return -1


def _is_finite(numbers: Tensor, dtype: torch.dtype) -> bool:
    ends = torch.stack(torch.aminmax(numbers)).to(dtype)
    return bool(torch.isfinite(ends).all())


def _matrices(places: Places) -> list[_Matrix]:
    matrices = []
    sites, tile_a, tile_b = places.sites.tolist(), places.tile_a.tolist(), places.tile_b.tolist()
    for site, numbers in enumerate(sites):
        rank, inputs, outputs, tile_ranks, a_offset, a_code, b_offset, b_code = numbers
        matrices.append(_Matrix(a_code, a_offset, rank, inputs, False, tile_ranks, tile_a[site]))
        matrices.append(_Matrix(b_code, b_offset, rank, outputs, True, tile_ranks, tile_b[site]))
    return matrices


def _begin(group: list[_Matrix]) -> int:
    return group[0].offset // ALIGNMENT * ALIGNMENT


def _tiles(group: list[_Matrix]) -> np.ndarray:
    tiles = []
    for matrix in group:
        begin = (matrix.offset - _begin(group)) // SOURCES[matrix.code].itemsize
        by_row, by_column = (1, matrix.rank) if matrix.is_transposed else (matrix.width, 1)
        for tile, first in enumerate(range(0, matrix.rank, matrix.tile_ranks)):
            rows = min(matrix.tile_ranks, matrix.rank - first)
            tiles.append((begin + first * by_row, by_row, by_column, rows, matrix.width, matrix.starts[tile]))
    return np.array(tiles, np.int64)

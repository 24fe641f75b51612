"""Packs an adapter's matrices into tiles on the GPU, from the bytes of their file.

The host copies bytes only: thousands of small numpy copies would contend for the interpreter lock.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.lora.records import MAX_TILE_RANKS, Places
from quire.kernels.lora_pack import reference
from quire.kernels.lora_pack.pieces import COLUMNS, cut, first_wrong

WIDTH = 256  # columns of one program


@triton.jit
def _place_kernel(source, tiles, target, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    tile = tiles + 6 * tl.program_id(0)
    first, by_row, by_column = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    rows, columns, target_first = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    row = tl.arange(0, HEIGHT)[:, None]
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < columns)
    numbers = tl.load(source + first + row * by_row + column * by_column, mask=inside, other=0.0)
    tl.store(target + target_first + row * columns + column, numbers.to(target.dtype.element_ty), mask=inside)


def place(source: Tensor, tiles: Tensor, width: int, target: Tensor) -> None:
    """Writes tiles of up to `width` columns. `source` [n]: a piece's numbers; `tiles` [J, 6] int64 as in AdapterPiece;
    `target` [m] in the dtype that is written."""
    grid = (len(tiles), -(-width // WIDTH), 1)
    _place_kernel[grid](source, tiles, target, MAX_TILE_RANKS, WIDTH, num_warps=4)


def pack(source: Tensor, places: Places, target: Tensor, dtype: torch.dtype) -> int:
    """As the reference; the same bits."""
    pieces = cut(places, len(source) + 64)
    if dtype is torch.int8 or not pieces:
        return reference.pack(source, places, target, dtype)
    wrong = first_wrong(source, places, dtype)
    for piece in pieces if wrong < 0 else ():
        numbers = source[piece.first : piece.last].view(piece.given)
        tiles = torch.from_numpy(piece.tiles).to(source.device)
        place(numbers, tiles, int(piece.tiles[:, COLUMNS].max()), target.view(dtype))
    return wrong

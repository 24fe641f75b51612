"""Packs an adapter's matrices into tiles with numpy: for the host of a GPU, without native code.

Numbers are copied as bits, and non-finite ones are detected by their bits: torch's comparisons, each with a tensor of
its own, take ten times as long as the copy. numpy releases the interpreter lock meanwhile.
"""

import numpy as np
import torch
from torch import Tensor

from quire.kernels.lora.records import SOURCES, Places
from quire.kernels.lora_pack import reference

# For each dtype: an integer as wide, the bits without the sign, and the least number of these that is not finite
_BITS: dict[torch.dtype, tuple[np.dtype, int, int]] = {
    torch.float32: (np.dtype(np.uint32), 0x7FFFFFFF, 0x7F800000),
    torch.float16: (np.dtype(np.uint16), 0x7FFF, 0x7C00),
    torch.bfloat16: (np.dtype(np.uint16), 0x7FFF, 0x7F80),
}


def pack(source: Tensor, places: Places, target: Tensor, dtype: torch.dtype) -> int:
    """As the reference; the same bits."""
    if dtype not in _BITS:
        return reference.pack(source, places, target, dtype)
    elements = target.numpy().view(_BITS[dtype][0])
    sites, tile_a, tile_b = places.sites.tolist(), places.tile_a.tolist(), places.tile_b.tolist()
    for site, numbers in enumerate(sites):
        rank, inputs, outputs, tile_ranks, a_offset, a_code, b_offset, b_code = numbers
        a = _bits(source, a_offset, SOURCES[a_code], (rank, inputs), dtype)
        b = _bits(source, b_offset, SOURCES[b_code], (outputs, rank), dtype).T
        for which, (rows, starts) in enumerate(((a, tile_a[site]), (b, tile_b[site]))):
            if not _place(elements, rows, starts, tile_ranks, dtype):
                return 2 * site + which
    return -1


def _bits(
    source: Tensor, offset: int, given: torch.dtype, shape: tuple[int, int], dtype: torch.dtype
) -> np.ndarray:
    """A matrix as `dtype`, as integers."""
    matrix = reference.matrix_at(source, offset, given, *shape)
    if given is not dtype:
        matrix = matrix.to(dtype)
    return matrix.view(torch.uint8).numpy().view(_BITS[dtype][0])


def _place(
    elements: np.ndarray, rows: np.ndarray, starts: list[int], tile_ranks: int, dtype: torch.dtype
) -> bool:
    """Writes the tiles of one matrix; False if a number is not finite. Tiles are checked while in the cache."""
    _, without_sign, not_finite = _BITS[dtype]
    for tile, first in enumerate(range(0, len(rows), tile_ranks)):
        some = rows[first : first + tile_ranks]
        placed = elements[starts[tile] : starts[tile] + some.size]
        np.copyto(placed.reshape(some.shape), some)
        if np.bitwise_and(placed, without_sign).max(initial=0) >= not_finite:
            return False
    return True

"""Inputs of the LoRA kernels: where weights lie, before and after packing, and which rows use which adapter."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TILE_RANKS = 16  # ranks whose weights lie in one piece, at most
MAX_TILES = 32  # of one matrix: ranks up to 512
MAX_PARTS = 3  # projections that one fused matrix holds, at most: q | k | v
SCALE_BYTES = 4  # of each rank of an adapter in bytes


def scales_offset(num_ranks: int, num_inputs: int) -> int:
    """Where, in a tile of A in bytes, its scales begin."""
    return -(-num_ranks * num_inputs // SCALE_BYTES) * SCALE_BYTES


@dataclass(frozen=True, slots=True)
class LoraTables:
    """The adapters that may run, one slot each; a site is a matrix of the model that adapters can add to.

    At a site an adapter has A [rank, inputs] and B, transposed, [rank, outputs]. Both are cut into tiles of
    `tile_ranks` ranks (the last may have fewer), each dense and in one block: rank i is row i % tile_ranks of tile
    i // tile_ranks. Weights of one byte are multiples of a number that each rank has of its own, A's scale times B's:
    a float32 per rank, behind its tile of A (`scales_offset`). All tensors live as long as the engine, so that a
    recorded pass finds them where they were.
    """

    weights: Tensor  # [elements] the pool, seen in the adapters' number type
    tile_a: Tensor  # [slots, sites, tiles] int64, first element of a tile
    tile_b: Tensor  # [slots, sites, tiles] int64
    ranks: Tensor  # [slots, sites] int32; 0: this adapter adds nothing here
    tile_ranks: Tensor  # [slots, sites] int32, at most MAX_TILE_RANKS
    scales: Tensor  # [slots, sites] float32

    @classmethod
    def empty(
        cls, weights: Tensor, num_slots: int, num_sites: int, num_tiles: int = MAX_TILES
    ) -> "LoraTables":
        """Tables in which no slot has anything, on the device of `weights`."""
        shape = (num_slots, num_sites)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=weights.device)

        return cls(
            weights,
            zeros(*shape, num_tiles, dtype=torch.int64),
            zeros(*shape, num_tiles, dtype=torch.int64),
            zeros(*shape, dtype=torch.int32),
            zeros(*shape, dtype=torch.int32),
            zeros(*shape, dtype=torch.float32),
        )


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """Rows of x grouped by adapter, in segments of at most `max_length`.

    There may be more segments than are used: a slot of -1 says that nothing is added, and so does an empty segment.
    """

    order: Tensor  # [T] int32, rows of x
    slots: Tensor  # [G] int32
    starts: Tensor  # [G + 1] int32, into order
    max_length: int


# Columns of Places.sites
RANK, INPUTS, OUTPUTS, TILE_RANKS, A_OFFSET, A_CODE, B_OFFSET, B_CODE = range(8)
CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
SOURCES = (torch.float32, torch.float16, torch.bfloat16)  # by code: dtypes of the source
LARGEST_BYTE = 127
SMALLEST_PEAK = 1e-30  # ranks without a larger number become zeros


@dataclass(frozen=True, slots=True)
class Places:
    """A site has A [rank, inputs] and B [outputs, rank] in the source; tiles are those of LoraTables."""

    sites: Tensor  # [S, 8] int64: rank, inputs, outputs, tile_ranks, A's first byte and code, B's first byte and code
    tile_a: Tensor  # [S, tiles] int64, first element of a tile in the target
    tile_b: Tensor  # [S, tiles] int64

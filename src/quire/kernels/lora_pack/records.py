"""Inputs of packing an adapter: where its matrices lie in the source bytes, and where their ranks go."""

from dataclasses import dataclass

import torch
from torch import Tensor

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

"""Packing: an adapter's matrices cut into tiles of a few ranks, which lie in blocks and never cross one.

Shards divide an adapter among ranks (S-LoRA's tensor parallelism): each holds a part of every matrix, and no part is
padded. Where ranks divide a layer's outputs, A is divided by its rank dimension and B by outputs; where they divide its
inputs, A is divided by inputs and every rank has B. A and B of one rank then differ in their rank dimension, so each
has a site of its own: 2s and 2s + 1 for site s of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from quire.adapters.adapter_file import TensorEntry
from quire.core.errors import AdapterError
from quire.kernels.lora.records import CODES, SCALE_BYTES, Places, scales_offset
from quire.parallel.cut import Cut, divided
from quire.weights.cut import TensorCut, tensor_cut

TILE_RANKS = 16  # ranks of a tile, where they fit a block
MAX_TILES = 32  # of a matrix
ALIGNMENT = 16  # bytes


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block of the pool, as adapters use it."""

    num_bytes: int
    dtype: torch.dtype  # of adapters' weights
    block_size: int  # in tokens, for messages

    @property
    def num_elements(self) -> int:
        return self.num_bytes // self.dtype.itemsize

    @property
    def scale_elements(self) -> int:
        """Elements of each rank's scale, stored after its tile of A; int8 only."""
        return SCALE_BYTES if self.dtype is torch.int8 else 0


@dataclass(frozen=True, slots=True)
class Matrices:
    """One site's weights in the adapter's file."""

    site: int
    name: str
    a: TensorEntry  # [rank, inputs]
    b: TensorEntry  # [outputs, rank]
    scale: float


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where an adapter's tiles lie, counted in its own blocks. S sites, up to `tiles` tiles each."""

    sites: np.ndarray  # [S] int64, ascending
    ranks: np.ndarray  # [S] int32
    tile_ranks: np.ndarray  # [S] int32
    a_blocks: np.ndarray  # [S, tiles] int32, which of the adapter's blocks
    a_offsets: np.ndarray  # [S, tiles] int64, in elements
    b_blocks: np.ndarray  # [S, tiles] int32
    b_offsets: np.ndarray  # [S, tiles] int64
    num_blocks: int
    num_waste: int  # unused elements of the blocks


def plan_tiles(name: str, shapes: tuple[tuple[int, int, int, int], ...], block: BlockShape) -> Tiles:
    """`shapes`: (site, rank, inputs, outputs) each. First fit; AdapterError where a single rank's row fits no block."""
    try:
        return _plan(shapes, block)
    except _TooWide as wide:
        raise AdapterError(
            f"adapter {name!r}: a row of {wide.width} numbers does not fit a block of {block.num_bytes:,} bytes "
            f"{wide.how}: raise block_size, which is {block.block_size}"
        ) from None


class _TooWide(Exception):
    def __init__(self, width: int, how: str) -> None:
        self.width = width
        self.how = how


@lru_cache(maxsize=256)  # adapters of one kind have the same plan
def _plan(shapes: tuple[tuple[int, int, int, int], ...], block: BlockShape) -> Tiles:
    num_sites = len(shapes)
    align = max(1, ALIGNMENT // block.dtype.itemsize)
    blocks = np.zeros((2, num_sites, MAX_TILES), np.int32)
    offsets = np.zeros((2, num_sites, MAX_TILES), np.int64)
    tile_ranks = np.zeros(num_sites, np.int32)
    used: list[int] = []  # elements of each block
    first_fits: dict[int, int] = {}  # by size: no earlier block has room for it
    for i, (_, rank, num_inputs, num_outputs) in enumerate(shapes):
        widest = max(num_inputs + block.scale_elements, num_outputs)
        in_tile = min(TILE_RANKS, block.num_elements // widest)
        if in_tile < 1:
            raise _TooWide(widest, "even alone")
        if -(-rank // in_tile) > MAX_TILES:
            raise _TooWide(widest, f"often enough for rank {rank}")
        tile_ranks[i] = in_tile
        for which, width in enumerate((num_inputs, num_outputs)):
            for tile, first in enumerate(range(0, rank, in_tile)):
                size = _tile_elements(min(in_tile, rank - first), width, block, is_a=which == 0)
                size = min(-(-size // align) * align, block.num_elements)
                index = first_fits.get(size, 0)
                while index < len(used) and used[index] + size > block.num_elements:
                    index += 1
                first_fits[size] = index
                if index == len(used):
                    used.append(0)
                blocks[which, i, tile], offsets[which, i, tile] = index, used[index]
                used[index] += size
    return Tiles(
        sites=np.array([shape[0] for shape in shapes], np.int64),
        ranks=np.array([shape[1] for shape in shapes], np.int32),
        tile_ranks=tile_ranks,
        a_blocks=blocks[0],
        a_offsets=offsets[0],
        b_blocks=blocks[1],
        b_offsets=offsets[1],
        num_blocks=len(used),
        num_waste=len(used) * block.num_elements
        - sum(r * (i + o + block.scale_elements) for _, r, i, o in shapes),
    )


def _tile_elements(ranks: int, width: int, block: BlockShape, is_a: bool) -> int:
    if not is_a or not block.scale_elements:
        return ranks * width
    return scales_offset(ranks, width) + ranks * block.scale_elements


def find_places(matrices: Sequence[Matrices], tiles: Tiles, block: BlockShape) -> Places:
    """Where each matrix comes from and goes to. `matrices` as planned."""
    sites = torch.tensor([
        (*m.a.shape, m.b.shape[0], in_tile, m.a.offset, CODES[m.a.dtype], m.b.offset, CODES[m.b.dtype])
        for m, in_tile in zip(matrices, tiles.tile_ranks.tolist(), strict=True)
    ], dtype=torch.int64)  # fmt: skip
    starts = (
        torch.from_numpy(blocks.astype(np.int64) * block.num_elements + offsets)
        for blocks, offsets in ((tiles.a_blocks, tiles.a_offsets), (tiles.b_blocks, tiles.b_offsets))
    )
    return Places(sites, *starts)


Shape = tuple[int, int, int, int]  # site, rank, inputs, outputs


@dataclass(frozen=True, slots=True)
class Shards:
    """How sites are divided among the ranks."""

    cut: Cut

    def tensors(self, m: Matrices, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's A [r, inputs] and B [outputs, r]."""
        rows = self.site(m.name)
        if rows is None:
            return a, b
        if rows.dimension == 1:
            ((first, last),) = rows.spans
            return a[:, first:last], b
        first, last = rank_span(a.shape[0], self.cut.rank, self.cut.size)
        kept = [index for span in rows.spans for index in range(*span)]
        return a[first:last], b[kept]

    def site(self, name: str) -> TensorCut | None:
        """None: every rank has all of it, such as an embedding."""
        return tensor_cut(self.cut, f"{name}.weight")

    def matrices(self, m: Matrices, a: TensorEntry, b: TensorEntry) -> tuple[Matrices, ...]:
        """A part of the adapter as its two sites, or as one where the model's site is whole."""
        if self.site(m.name) is None:
            return (replace(m, site=2 * m.site, a=a, b=b),)
        no_b, no_a = replace(b, shape=(0, a.shape[0])), replace(a, shape=(b.shape[1], 0))
        return replace(m, site=2 * m.site, a=a, b=no_b), replace(m, site=2 * m.site + 1, a=no_a, b=b)

    def shapes(self, whole: tuple[Matrices, ...], rank: int) -> tuple[Shape, ...]:
        """What any rank has of an adapter."""
        there, shapes = Shards(replace(self.cut, rank=rank)), list[Shape]()
        for m in whole:
            rows, r = there.site(m.name), m.a.shape[0]
            if rows is None:
                shapes.append((2 * m.site, r, m.a.shape[1], m.b.shape[0]))
                continue
            by_inputs = rows.dimension == 1
            first, last = (0, r) if by_inputs else rank_span(r, rank, self.cut.size)
            shapes.append((2 * m.site, last - first, rows.kept if by_inputs else m.a.shape[1], 0))
            shapes.append((2 * m.site + 1, r, 0, m.b.shape[0] if by_inputs else rows.kept))
        return tuple(shapes)


def rank_span(lora_rank: int, rank: int, size: int) -> tuple[int, int]:
    """Which of an adapter's ranks a process has: fewer than there are processes may leave some without."""
    return list(divided(lora_rank, size))[rank]

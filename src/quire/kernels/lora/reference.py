"""LoRA in plain torch."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from quire.kernels.lora.records import LoraSegments, LoraTables, scales_offset


def add(
    x: Tensor,  # [T, inputs]
    y: Tensor,  # [T, outputs]; added to in place
    tables: LoraTables,
    segments: LoraSegments,
    first_site: int,
    bounds: tuple[int, ...],  # part p of a fused projection is columns bounds[p] … bounds[p + 1] - 1 of y
) -> Tensor:
    """y[:, part] += scale * (x @ A.T) @ B for every part (site first_site + p), each row with its own adapter.

    Sums are float32. Rows of no segment, and rows whose adapter has nothing at a site, keep their bits.
    """
    for slot, rows in segments_of(segments):
        for part, (first, last) in enumerate(pairwise(bounds)):
            site = first_site + part
            a, b = matrices(tables, slot, site, x.shape[1], last - first)
            _add_rows(y, rows, first, x[rows].float() @ a.t(), b, float(tables.scales[slot, site]))
    return y


def add_embedded(
    ids: Tensor,  # [T] ints
    y: Tensor,  # [T, outputs]; added to in place
    tables: LoraTables,
    segments: LoraSegments,
    site: int,
    num_ids: int,  # how many columns A has
    first_id: int = 0,  # the column of id 0
) -> Tensor:
    """y += scale * A[:, first_id + id] @ B: as `add` for one-hot rows."""
    for slot, rows in segments_of(segments):
        a, b = matrices(tables, slot, site, num_ids, y.shape[1])
        _add_rows(y, rows, 0, a.t()[ids[rows].long() + first_id], b, float(tables.scales[slot, site]))
    return y


def matrices(
    tables: LoraTables, slot: int, site: int, num_inputs: int, num_outputs: int
) -> tuple[Tensor, Tensor]:
    """An adapter's A [rank, inputs] and B [rank, outputs] at one site, in float32."""
    rank, tile_ranks = int(tables.ranks[slot, site]), int(tables.tile_ranks[slot, site])
    weights, pair = tables.weights, []
    for starts, width in ((tables.tile_a, num_inputs), (tables.tile_b, num_outputs)):
        tiles = [torch.empty(0, width, device=weights.device)]
        for tile, first in enumerate(range(0, rank, tile_ranks or 1)):
            count, start = min(tile_ranks, rank - first), int(starts[slot, site, tile])
            rows = weights[start : start + count * width].view(count, width).float()
            if weights.dtype is torch.int8 and starts is tables.tile_a:
                behind = start + scales_offset(count, width)
                rows = rows * weights[behind : behind + 4 * count].clone().view(torch.float32)[:, None]
            tiles.append(rows)
        pair.append(torch.cat(tiles))
    return pair[0], pair[1]


def segments_of(segments: LoraSegments) -> Iterator[tuple[int, Tensor]]:
    starts = segments.starts.tolist()
    for index, slot in enumerate(segments.slots.tolist()):
        if slot >= 0 and starts[index] < starts[index + 1]:
            yield slot, segments.order[starts[index] : starts[index + 1]].long()


def _add_rows(y: Tensor, rows: Tensor, first: int, inner: Tensor, b: Tensor, scale: float) -> None:
    if len(b):
        columns = slice(first, first + b.shape[1])
        y[rows, columns] = (y[rows, columns].float() + scale * (inner @ b)).to(y.dtype)

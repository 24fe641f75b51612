"""LoRA by native code. Promises are those of the reference; a row's bits depend on that row alone."""

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.lora.records import MAX_PARTS, LoraSegments, LoraTables


def add(
    x: Tensor,
    y: Tensor,
    tables: LoraTables,
    segments: LoraSegments,
    first_site: int,
    bounds: tuple[int, ...],
) -> Tensor:
    """y[:, part] += scale * (x @ A.T) @ B for every part (site first_site + p), each row with its own adapter."""
    native.check_floats(x, y)
    source = (x.data_ptr(), x.stride(0), 0, 0, 0, x.shape[1])
    _call(source, x, y, tables, segments, first_site, bounds)
    return y


def add_embedded(
    ids: Tensor,
    y: Tensor,
    tables: LoraTables,
    segments: LoraSegments,
    site: int,
    num_ids: int,
    first_id: int = 0,
) -> Tensor:
    """y += scale * A[:, first_id + id] @ B."""
    wide = ids.dtype is torch.int64
    native.check_indices(torch.int64 if wide else torch.int32, ids)
    native.check_floats(y)
    source = (0, 0, ids.data_ptr(), int(wide), first_id, num_ids)
    _call(source, ids, y, tables, segments, site, (0, y.shape[1]))
    return y


def _call(
    source: tuple[int, ...],
    rows: Tensor,
    y: Tensor,
    tables: LoraTables,
    segments: LoraSegments,
    first_site: int,
    bounds: tuple[int, ...],
) -> None:
    places = (tables.tile_a, tables.tile_b, tables.ranks, tables.tile_ranks, tables.scales)
    chosen = (segments.order, segments.slots, segments.starts)
    native.check_indices(torch.int64, tables.tile_a)
    native.check_indices(torch.int32, tables.ranks, tables.tile_ranks, *chosen)
    padded = bounds + (bounds[-1],) * (MAX_PARTS + 1 - len(bounds))
    native.call(
        "lora_add",
        (
            *source, y.data_ptr(), y.stride(0),
            tables.weights.data_ptr(), native.PAGE_CODES[tables.weights.dtype],
            *(tensor.data_ptr() for tensor in places), tables.ranks.shape[1], tables.tile_a.shape[2],
            *(tensor.data_ptr() for tensor in chosen), segments.slots.shape[0],
            first_site, len(bounds) - 1, *padded,
        ),
        (rows, y, tables.weights, *places, *chosen),
    )  # fmt: skip

"""A packed adapter on its way to another process: what describes it, as JSON has it, and its bytes."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from quire.adapters.packing import Tiles
from quire.adapters.peft import PackedAdapter
from quire.parallel.wire import Blob


def describe_packed(packed: PackedAdapter) -> Blob:
    tiles = {field.name: getattr(packed.tiles, field.name) for field in fields(packed.tiles)}
    arrays = {
        name: (value.dtype.str, value.shape, value.ravel().tolist())
        for name, value in tiles.items()
        if isinstance(value, np.ndarray)
    }
    counts = {name: value for name, value in tiles.items() if name not in arrays}
    described = (packed.data.shape, arrays, counts, packed.scales, packed.content, packed.rank)
    return described, packed.data.numpy().tobytes()


def received_packed(blob: Blob, read: Callable[[str, str], PackedAdapter] | None) -> PackedAdapter:
    """As `describe_packed` described it; or `read` from the folder that is named instead."""
    if not blob[1] and read is not None:
        return read(*blob[0])
    (shape, arrays, counts, scales, content, rank), data = blob
    tiles: dict[str, Any] = dict(counts)
    for name, (kind, size, values) in arrays.items():
        tiles[name] = np.array(values, kind).reshape(size)
    numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(*shape)
    return PackedAdapter(numbers, Tiles(**tiles), tuple(scales), content, rank)

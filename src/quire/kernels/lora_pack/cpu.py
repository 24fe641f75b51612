"""Packs an adapter's matrices into tiles by native code, in one pass on one thread: it runs beside the steps."""

import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.lora.records import CODES, Places


def pack(source: Tensor, places: Places, target: Tensor, dtype: torch.dtype) -> int:
    """As the reference; the same bits."""
    native.check_indices(torch.int64, places.sites, places.tile_a, places.tile_b)
    wrong = torch.empty(1, dtype=torch.int64)
    native.call_aside(
        "lora_pack",
        (
            source.data_ptr(), target.data_ptr(), CODES[dtype], len(places.sites), places.sites.data_ptr(),
            places.tile_a.shape[1], places.tile_a.data_ptr(), places.tile_b.data_ptr(), wrong.data_ptr(),
        ),
    )  # fmt: skip
    return int(wrong)

"""Pool: the one region of device memory, in pages. A block holds all layers' K and V of its positions."""

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.layout import BlockLayout
from quire.kernels import huge_pages


class Pool:
    """num_blocks × block_bytes, page-major. Block 0 is never given out: padded rows of a graph write there."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.data = _zeros(num_blocks, layout.block_bytes, torch.device(device))  # [num_blocks, block_bytes]
        self._planes = [(self._plane(i, False), self._plane(i, True)) for i in range(layout.num_layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """A layer's K and V pages: two views [num_blocks, block_size, kv_heads, head_dim], strided by block."""
        return self._planes[index]

    def elements(self, dtype: torch.dtype) -> Tensor:
        """All bytes as one vector of this type, which holds the adapters' weights."""
        return self.data.view(-1).view(dtype)

    def _plane(self, layer: int, value: bool) -> Tensor:
        layout = self.layout
        elements = self.data.view(getattr(torch, layout.dtype))
        return torch.as_strided(
            elements,
            (self.num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim),
            (layout.block_elements, layout.position_elements, layout.head_dim, 1),
            layout.plane_offset(layer, value),
        )


def _zeros(num_blocks: int, block_bytes: int, device: torch.device) -> Tensor:
    """Zeroed bytes. On the CPU they are mapped, so a page costs memory only once it is written."""
    if device.type == "cpu":
        try:
            return huge_pages.zeros(num_blocks, block_bytes, dtype=torch.uint8)
        except (OSError, OverflowError) as error:
            size = f"{num_blocks * block_bytes / 1e9:,.1f} GB"
            raise ConfigError(
                f"a pool of {size} is more than this machine can give ({error}): "
                "lower kv_cache_memory_bytes or num_blocks"
            ) from error
    return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)

"""BlockLayout: offsets inside one block of the page-major KV pool. LayerGroups: which layers share a block."""

from collections.abc import Sequence
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}
SCALE_DTYPE = "bfloat16"  # the range of float32: no K is too small or too large for its scale


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Layers whose K and V lie in one block, and are kept equally long.

    Layers with a sliding window need blocks of the last positions only. Where other layers need all, layers are divided
    into groups of equal size, full ones first, and a sequence has one block of each group for the same positions.
    """

    places: tuple[tuple[int, int], ...]  # of each layer: its group, and its index there
    num_full: int = 1  # groups that keep all positions
    num_window: int = 0  # the groups after them, that keep the last `window` positions
    window: int = 0

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_window

    @property
    def num_layers(self) -> int:
        """In one block."""
        return 1 + max(index for _, index in self.places)

    @classmethod
    def together(cls, num_layers: int) -> "LayerGroups":
        """All layers in one block, which is kept as long as its sequence."""
        return cls(tuple((0, index) for index in range(num_layers)))

    @classmethod
    def of(cls, windows: Sequence[int]) -> "LayerGroups":
        """By each layer's window, 0 for none. Where few layers have one, all stay together: a group would be padded."""
        full = [layer for layer, window in enumerate(windows) if not window]
        inside = [layer for layer, window in enumerate(windows) if window]
        if len(inside) < len(full) or not inside:
            return cls.together(len(windows))
        size = len(full) or len(inside)
        places = {layer: (0, index) for index, layer in enumerate(full)}
        first = 1 if full else 0
        places |= {layer: (first + index // size, index % size) for index, layer in enumerate(inside)}
        num_window = -(-len(inside) // size)
        return cls(tuple(places[layer] for layer in range(len(windows))), first, num_window, max(windows))


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Block b holds, for every layer of a group, K and V of its positions: [layers, 2, block_size, kv_heads, head_dim].

    In int8 their scales follow, one per position and head: [layers, kv_heads, 2, block_size] in bfloat16. With blocks
    of 16 positions, a head's scales of K and V fill one cache line.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_groups: int = 1  # blocks that a sequence has for the same positions, see LayerGroups

    @property
    def position_elements(self) -> int:
        """Elements from one position to the next, within one layer's K (or V)."""
        return self.num_kv_heads * self.head_dim

    @property
    def plane_elements(self) -> int:
        """Elements of one layer's K (or V) in one block."""
        return self.block_size * self.position_elements

    @property
    def block_elements(self) -> int:
        return self.num_layers * 2 * self.plane_elements

    @property
    def has_scales(self) -> bool:
        return self.dtype == "int8"

    @property
    def in_words(self) -> str:
        return f"{self.dtype} with scales" if self.has_scales else self.dtype

    @property
    def scales_offset(self) -> int:
        """Bytes from the start of a block to its scales."""
        return self.block_elements * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        num_scales = self.num_layers * 2 * self.num_kv_heads * self.block_size if self.has_scales else 0
        return self.scales_offset + num_scales * DTYPE_BYTES[SCALE_DTYPE]

    @property
    def bytes_per_token(self) -> int:
        """Of all groups."""
        return self.num_groups * self.block_bytes // self.block_size

    def plane_offset(self, layer: int, value: bool) -> int:
        """Element offset of a layer's K (or V, with `value`) from the start of a block."""
        return (layer * 2 + int(value)) * self.plane_elements

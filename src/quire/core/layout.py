"""BlockLayout: offsets inside one block of the page-major KV pool. Numbers only, no tensors."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}
SCALE_DTYPE = "bfloat16"  # the range of float32: no K is too small or too large for its scale


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Block b holds, for every layer, K and V of its positions: [layers, 2, block_size, kv_heads, head_dim].

    In int8 their scales follow, one per position and head: [layers, kv_heads, 2, block_size] in bfloat16. With blocks
    of 16 positions, a head's scales of K and V fill one cache line.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

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
        return self.block_bytes // self.block_size

    def plane_offset(self, layer: int, value: bool) -> int:
        """Element offset of a layer's K (or V, with `value`) from the start of a block."""
        return (layer * 2 + int(value)) * self.plane_elements

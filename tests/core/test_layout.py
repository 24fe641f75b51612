"""Offsets of a block add up, and int8 with its scales holds the tokens that the documentation promises."""

from dataclasses import replace

import pytest

from quire.core.layout import DTYPE_BYTES, BlockLayout

SMOLLM, LLAMA_8B = (30, 3, 64), (32, 8, 128)


@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "head_dim"), [SMOLLM, LLAMA_8B, (2, 1, 80), (3, 5, 7)]
)
def test_numbers_then_scales_fill_a_block(
    num_layers: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    layout = BlockLayout(num_layers, block_size, num_kv_heads, head_dim, "int8")
    assert layout.scales_offset == layout.plane_offset(num_layers, value=False)
    assert layout.block_bytes == block_size * layout.bytes_per_token
    assert layout.bytes_per_token == num_layers * 2 * num_kv_heads * (head_dim + 2)
    for dtype in set(DTYPE_BYTES) - {"int8"}:
        other = replace(layout, dtype=dtype)
        assert other.block_bytes == other.scales_offset == other.block_elements * DTYPE_BYTES[dtype]


@pytest.mark.parametrize(("shape", "ratio"), [(SMOLLM, 1.93), (LLAMA_8B, 1.96)])
def test_int8_holds_more_than_1_9_times_the_tokens_of_16_bits(
    shape: tuple[int, int, int], ratio: float
) -> None:
    num_layers, num_kv_heads, head_dim = shape
    half = BlockLayout(num_layers, 16, num_kv_heads, head_dim, "float16")
    assert half.bytes_per_token / replace(half, dtype="int8").bytes_per_token > ratio

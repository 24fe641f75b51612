"""Rotary position embedding and the store into pages, by native code. Promises are those of the reference."""

import torch
from torch import Tensor

from quire.kernels import native


def rotate_and_store(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D], q and k are rotated in place
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos_sin: Tensor | None,  # [P, rotary_dim] fp32, cosines | sines; None: no rotation
    positions: Tensor,  # [T] int32
    slots: Tensor,  # [T] int64, block * block_size + offset
    k_pages: Tensor,  # [num_blocks, block_size, Hkv, D], any strides but the last
    v_pages: Tensor,
    k_scales: Tensor | None = None,  # [num_blocks, Hkv, block_size] bfloat16, of pages in int8
    v_scales: Tensor | None = None,
) -> None:
    """Rotates q and k in place ("rotate half" of the first rotary_dim), writes k and v to their slots."""
    native.check_floats(qkv, cos_sin)
    native.check_indices(torch.int32, positions)
    native.check_indices(torch.int64, slots)
    native.call(
        "rotate_and_store",
        (
            qkv.data_ptr(), qkv.stride(0), qkv.shape[0], num_heads, num_kv_heads, head_dim,
            native.address(cos_sin), 0 if cos_sin is None else cos_sin.shape[1],
            positions.data_ptr(), slots.data_ptr(),
            native.PAGE_CODES[k_pages.dtype], k_pages.shape[1],
            k_pages.data_ptr(), *k_pages.stride()[:3],
            v_pages.data_ptr(), *v_pages.stride()[:3], *native.page_scales(k_pages, k_scales, v_scales),
        ),
        (qkv, cos_sin, positions, slots, k_pages, v_pages, k_scales, v_scales),
    )  # fmt: skip


def rotate(
    heads: Tensor,  # [T, H, D], dense in the last two dimensions
    cos_sin: Tensor,  # [P, rotary_dim] fp32, cosines | sines
    positions: Tensor,  # [T] int32
) -> None:
    """Rotates heads in place, as rotate_and_store does, and stores nothing."""
    tokens, num_heads, head_dim = heads.shape
    native.check_floats(heads, cos_sin)
    native.check_indices(torch.int32, positions)
    slots = torch.zeros(tokens, dtype=torch.int64)  # of no keys and no values
    native.call(
        "rotate_and_store",
        (
            heads.data_ptr(), heads.stride(0), tokens, num_heads, 0, head_dim,
            cos_sin.data_ptr(), cos_sin.shape[1], positions.data_ptr(), slots.data_ptr(),
            native.DTYPE_CODES[torch.float32], 1, 0, 0, 0, 0, 0, 0, 0, 0,
        ),
        (heads, cos_sin, positions, slots),
    )  # fmt: skip

"""Rotary position embedding and the store into pages, in plain torch."""

import torch
from torch import Tensor


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
) -> None:
    """Rotates q and k in place ("rotate half" of the first rotary_dim), writes k and v to their slots."""
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    if cos_sin is not None:
        _rotate(heads[:, : num_heads + num_kv_heads], cos_sin[positions.long()])
    block_size = k_pages.shape[1]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots % block_size
    k_pages[blocks, offsets] = heads[:, num_heads : num_heads + num_kv_heads].to(k_pages.dtype)
    v_pages[blocks, offsets] = heads[:, num_heads + num_kv_heads :].to(v_pages.dtype)


def rotate(
    heads: Tensor,  # [T, H, D], dense in the last two dimensions
    cos_sin: Tensor,  # [P, rotary_dim] fp32, cosines | sines
    positions: Tensor,  # [T] int32
) -> None:
    """Rotates heads in place, as rotate_and_store does, and stores nothing."""
    _rotate(heads, cos_sin[positions.long()])


def _rotate(heads: Tensor, cos_sin: Tensor) -> None:
    half = cos_sin.shape[1] // 2
    cosine = cos_sin[:, None, :half]
    sine = cos_sin[:, None, half:]
    first = heads[..., :half].float()
    second = heads[..., half : 2 * half].float()
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    heads[..., : 2 * half] = rotated.to(heads.dtype)

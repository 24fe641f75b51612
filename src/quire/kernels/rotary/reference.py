"""Rotary position embedding and the store into pages, in plain torch."""

import torch
from torch import Tensor

LARGEST = 127.0
SMALLEST_SCALE = 1e-30  # of zeros


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
    """Rotates q and k in place ("rotate half" of the first rotary_dim), writes k and v to their slots.

    Pages in int8 get round(x / scale), and their scales the largest |x| of a token and head, divided by 127.
    """
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    if cos_sin is not None:
        _rotate(heads[:, : num_heads + num_kv_heads], cos_sin[positions.long()])
    block_size = k_pages.shape[1]
    blocks = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots % block_size
    keys, values = heads[:, num_heads : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    for content, pages, scales in ((keys, k_pages, k_scales), (values, v_pages, v_scales)):
        if scales is not None:
            content, scales[blocks, :, offsets] = quantize(content)
        pages[blocks, offsets] = content.to(pages.dtype)


def quantize(content: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H, D] -> whole numbers of int8, and scales [T, H] bfloat16."""
    wide = content.float()
    scales = (wide.abs().amax(-1) / LARGEST).clamp(min=SMALLEST_SCALE).bfloat16()
    return (wide * (1.0 / scales.float())[..., None]).round().clamp(-LARGEST, LARGEST), scales


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

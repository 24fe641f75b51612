"""Rotary position embedding and the store into pages, one launch of Triton. Promises are those of the reference."""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.dependents import EARLY, launch_dependents, wait_for_results
from quire.kernels.rotary import reference
from quire.kernels.rotary.reference import rotate

__all__ = ["rotate", "rotate_and_store"]

# A file's constants reach a kernel as constexpr only.
LARGEST = tl.constexpr(reference.LARGEST)
SMALLEST_SCALE = tl.constexpr(reference.SMALLEST_SCALE)


@triton.jit
def _whole_numbers(x, inverse):
    """Of int8, ties to even: adding 1.5 * 2^23 leaves no bits for fractions."""
    scaled = tl.minimum(tl.maximum(x.to(tl.float32) * inverse, -LARGEST), LARGEST)
    return (scaled + 12582912.0) - 12582912.0


@triton.jit
def _rotate_kernel(
    qkv, cos_sin, positions, slots, k_pages, v_pages, k_scales, v_scales,
    qkv_stride, cos_stride, k_block_stride, k_token_stride, k_head_stride,
    v_block_stride, v_token_stride, v_head_stride, scale_block_stride, scale_head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FIRST_HEAD: tl.constexpr, ROTATES: tl.constexpr,
    SCALED: tl.constexpr, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token. A thread holds both partners of a pair, so that it may write in place."""
    launch_dependents()
    wait_for_results()
    token = tl.program_id(0).to(tl.int64)
    head = FIRST_HEAD + tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    slot = tl.load(slots + token).to(tl.int64)
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS) & (slot >= 0)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (slot >= 0)
    rotated = head < NUM_HEADS + NUM_KV_HEADS
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    heads = qkv + token * qkv_stride + head * HEAD_DIM
    keys = k_pages + block * k_block_stride + offset * k_token_stride + (head - NUM_HEADS) * k_head_stride
    values = v_pages + block * v_block_stride + offset * v_token_stride
    values += (head - NUM_HEADS - NUM_KV_HEADS) * v_head_stride

    column = tl.arange(0, HALF_BLOCK)[None, :]
    wanted = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (column < HALF)
    first = tl.load(heads + column, mask=wanted, other=0.0)
    second = tl.load(heads + HALF + column, mask=wanted, other=0.0)
    if ROTATES:
        position = tl.load(positions + token).to(tl.int64)
        angles = cos_sin + position * cos_stride + column
        cosine = tl.load(angles, mask=column < HALF, other=0.0)
        sine = tl.load(angles + HALF, mask=column < HALF, other=0.0)
        turned_first = first.to(tl.float32) * cosine - second.to(tl.float32) * sine
        turned_second = second.to(tl.float32) * cosine + first.to(tl.float32) * sine
        first = tl.where(rotated, turned_first.to(first.dtype), first)
        second = tl.where(rotated, turned_second.to(second.dtype), second)
        tl.store(heads + column, first, mask=wanted & rotated)
        tl.store(heads + HALF + column, second, mask=wanted & rotated)
    if REST_BLOCK > 0:
        # the part that is not rotated goes to the pages unchanged
        rest_column = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        of_rest = rest_column < HEAD_DIM
        rest = tl.load(heads + rest_column, mask=(is_key | is_value) & of_rest, other=0.0)
    if SCALED:
        top = tl.max(
            tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32))), 1, keep_dims=True
        )
        if REST_BLOCK > 0:
            top = tl.maximum(top, tl.max(tl.abs(rest.to(tl.float32)), 1, keep_dims=True))
        scale = tl.maximum(top / LARGEST, SMALLEST_SCALE).to(tl.bfloat16)
        inverse = 1.0 / scale.to(tl.float32)
        first, second = _whole_numbers(first, inverse), _whole_numbers(second, inverse)
        if REST_BLOCK > 0:
            rest = _whole_numbers(rest, inverse)
        scale_slot = block * scale_block_stride + offset
        tl.store(k_scales + scale_slot + (head - NUM_HEADS) * scale_head_stride, scale, mask=is_key)
        value_head = head - NUM_HEADS - NUM_KV_HEADS
        tl.store(v_scales + scale_slot + value_head * scale_head_stride, scale, mask=is_value)
    tl.store(keys + column, first.to(k_pages.dtype.element_ty), mask=wanted & is_key)
    tl.store(keys + HALF + column, second.to(k_pages.dtype.element_ty), mask=wanted & is_key)
    tl.store(values + column, first.to(v_pages.dtype.element_ty), mask=wanted & is_value)
    tl.store(values + HALF + column, second.to(v_pages.dtype.element_ty), mask=wanted & is_value)
    if REST_BLOCK > 0:
        tl.store(keys + rest_column, rest.to(k_pages.dtype.element_ty), mask=is_key & of_rest)
        tl.store(values + rest_column, rest.to(v_pages.dtype.element_ty), mask=is_value & of_rest)


@cache
def _shape(head_dim: int, rotary_dim: int, few: bool) -> tuple[int, int, int, int]:
    """(half of the rotated part, its tile, the rest's tile, heads per program)."""
    half = (rotary_dim or head_dim - head_dim % 2) // 2
    rest = head_dim - 2 * half
    half_block = triton.next_power_of_2(half)
    # about 2048 elements keep four warps busy; fewer where there are few tokens to spread over the device
    heads = max(1, (512 if few else 2048) // (2 * half_block))
    return half, half_block, triton.next_power_of_2(rest) if rest else 0, heads


def rotate_and_store(
    qkv: Tensor,  # [T, (Hq + 2 * Hkv) * D], q and k are rotated in place
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos_sin: Tensor | None,  # [P, rotary_dim] fp32, cosines | sines; None: no rotation
    positions: Tensor,  # [T] int32
    slots: Tensor,  # [T] int64, block * block_size + offset; negative: nothing is stored
    k_pages: Tensor,  # [num_blocks, block_size, Hkv, D], any strides but the last
    v_pages: Tensor,
    k_scales: Tensor | None = None,  # [num_blocks, Hkv, block_size] bfloat16, of pages in int8
    v_scales: Tensor | None = None,
) -> None:
    """Rotates q and k in place ("rotate half" of the first rotary_dim), writes k and v to their slots."""
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    few = tokens < 64
    half, half_block, rest_block, heads = _shape(head_dim, 0 if cos_sin is None else cos_sin.shape[1], few)
    first_head = num_heads if cos_sin is None else 0
    table = qkv if cos_sin is None else cos_sin
    k_block, k_token, k_head, _ = k_pages.stride()
    v_block, v_token, v_head, _ = v_pages.stride()
    scaled = k_scales is not None and v_scales is not None
    scales = (k_scales, v_scales) if scaled else (k_pages, v_pages)  # not read where there are none
    scale_strides = k_scales.stride()[:2] if k_scales is not None else (0, 0)
    _rotate_kernel[(tokens, -(-(num_heads + 2 * num_kv_heads - first_head) // heads), 1)](
        qkv, table, positions, slots, k_pages, v_pages, *scales,
        qkv.stride(0), table.stride(0), k_block, k_token, k_head, v_block, v_token, v_head, *scale_strides,
        num_heads, num_kv_heads, head_dim, half, k_pages.shape[1], first_head, cos_sin is not None,
        scaled, heads, half_block, rest_block,
        num_warps=1 if few else 4, **EARLY,
    )  # fmt: skip

"""Shared by the attention kernels: page lookup, one tile of online softmax, merging partial sums."""

import os
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class PageScales(NamedTuple):
    """Scales of pages in int8, as kernels take them."""

    k: Tensor  # [num_blocks, Hkv, block_size] bfloat16; pages, and not read, where there are no scales
    v: Tensor
    strides: tuple[int, ...]  # of a block and of a head
    exist: bool


def table_width(slopes: Tensor | None) -> int:
    """The kernels' SLOPED: 0 without slopes, 1 with one per head, else the width of a table by distance."""
    return 0 if slopes is None else 1 if slopes.dim() == 1 else slopes.shape[1]


# A file's constants reach a kernel as constexpr only.
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(1.44269504088896)
# Triton's interpreter multiplies the bits of bfloat16 as if they were integers: there, it multiplies in fp32.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def page_ids(table, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Blocks that hold positions start .. start + TILE: one id where they share a block, else one per position."""
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        positions = start + tl.arange(0, TILE)
        return tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def slot_offsets(ids, start, stride_block, stride_token, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Offsets of positions start .. start + TILE, given their blocks; int64, since a pool is larger than 2^31."""
    positions = start + tl.arange(0, TILE)
    return ids.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * stride_token


@triton.jit
def load_tile(
    pages, offsets, start, end,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[TILE, BLOCK_D] of K or V; zeros outside the context and the head, where a slot may hold anything."""
    positions = start + tl.arange(0, TILE)
    columns = tl.arange(0, BLOCK_D)
    pointers = pages + offsets[:, None] + columns[None, :]
    if MASKED:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=(positions < end)[:, None], other=0.0)
        else:
            inside = (positions < end)[:, None] & (columns < HEAD_DIM)[None, :]
            return tl.load(pointers, mask=inside, other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def tile_scales(k_scales, v_scales, offsets, start, end, TILE: tl.constexpr, SCALED: tl.constexpr):
    """[TILE] each: what a tile of K and of V in int8 is multiplied by. Not read where pages have no scales."""
    if SCALED:
        inside = start + tl.arange(0, TILE) < end
        k_scale = tl.load(k_scales + offsets, mask=inside, other=0.0)
        return k_scale, tl.load(v_scales + offsets, mask=inside, other=0.0)
    else:
        return tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)


@triton.jit
def visible_keys(query_positions, start, end, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """[rows, TILE]: which keys of a tile each query may see."""
    keys = start + tl.arange(0, TILE)
    visible = (keys[None, :] <= query_positions[:, None]) & (keys < end)[None, :]
    if WINDOW > 0:
        visible = visible & (keys[None, :] > query_positions[:, None] - WINDOW)
    return visible


@triton.jit
def matmul(a, b, acc):
    """a @ b (+ acc), added in fp32; fp32 operands are not rounded."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def row_slopes_of(slopes, heads, used, SLOPED: tl.constexpr):
    """The slope of each row's head, or where the middle of its table lies (SLOPED is its width); zeros where the model
    has none."""
    if SLOPED > 1:
        return slopes + tl.where(used, heads, 0) * SLOPED + SLOPED // 2
    elif SLOPED == 1:
        return tl.load(slopes + heads, used, 0.0)
    else:
        return heads * 0.0


@triton.jit
def with_sinks(total, top, sinks, heads, used, SINKS: tl.constexpr):
    """Sums of probabilities with that of each row's sink, at the end of a row: a key without a value."""
    if SINKS:
        return total + tl.exp2(tl.load(sinks + heads, used, 0.0) * LOG2_E - top)
    else:
        return total


@triton.jit
def adjusted(scores, slopes, positions, start, CAP: tl.constexpr, SLOPED: tl.constexpr, TILE: tl.constexpr):
    """Scores [rows, TILE] in base 2, capped, and with each row's slope times the distance of a key, or what
    its table has for the distance."""
    if CAP > 0:
        # tanh(y) = 1 - 2 / (1 + e^2y)
        scores = CAP * LOG2_E * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 / CAP))))
    if SLOPED > 0:
        distances = (start + tl.arange(0, TILE))[None, :] - positions[:, None]
        if SLOPED > 1:
            near = tl.minimum(tl.maximum(distances, -(SLOPED // 2)), SLOPED // 2)
            scores += tl.load(slopes[:, None] + near) * LOG2_E
        else:
            scores += slopes[:, None] * LOG2_E * distances.to(tl.float32)
    return scores


# Four signed bytes to bfloat16, exactly: the low seven bits are the mantissa of 128 + low; 128 is subtracted again, or
# 256 of a negative byte. And to float16, where 1024 + 128 + byte has room for all eight.
_BYTES_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 pair, low, less, ones;
mov.b32 ones, 0x3f803f80;
prmt.b32 pair, $2, 0, 0x4140;
lop3.b32 low, pair, 0x007f007f, 0x43004300, 0xea;
lop3.b32 less, pair, 0x00800080, 0xc300c300, 0xea;
fma.rn.bf16x2 $0, low, ones, less;
prmt.b32 pair, $2, 0, 0x4342;
lop3.b32 low, pair, 0x007f007f, 0x43004300, 0xea;
lop3.b32 less, pair, 0x00800080, 0xc300c300, 0xea;
fma.rn.bf16x2 $1, low, ones, less;
}""")
_BYTES_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 bytes, pair, less;
mov.b32 less, 0x64806480;
xor.b32 bytes, $2, 0x80808080;
prmt.b32 pair, bytes, 0x64646464, 0x4140;
sub.rn.f16x2 $0, pair, less;
prmt.b32 pair, bytes, 0x64646464, 0x4342;
sub.rn.f16x2 $1, pair, less;
}""")


@triton.jit
def as_operand(stored, q):
    """A tile of pages in the type of q. The interpreter cannot convert whole numbers to bfloat16.

    Bytes are converted before Triton orders them for the tensor cores (not "pure", or it would exchange the two): it
    orders V's byte by byte, and 16-bit numbers as whole matrices.
    """
    if INTERPRETED:
        return stored.to(tl.float32)
    elif stored.dtype == tl.int8 and q.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _BYTES_TO_BFLOAT16, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=False, pack=4
        )
    elif stored.dtype == tl.int8 and q.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _BYTES_TO_FLOAT16, "=r,=r,r", [stored], dtype=tl.float16, is_pure=False, pack=4
        )
    else:
        return stored.to(q.dtype)


@triton.jit
def attend_tile(
    q, k, v, k_scale, v_scale, visible, acc, top, total, scale, slopes, positions, start,
    MASKED: tl.constexpr, SCALED: tl.constexpr, CAP: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """One step of online softmax in base 2. A fully masked tile leaves a row's bits as they were.

    Scales of K multiply scores, those of V probabilities: once per key, not once per number.
    """
    scores = matmul(q, tl.trans(as_operand(k, q)), None)
    if SCALED:
        scores = scores * k_scale.to(tl.float32)[None, :]
    if CAP > 0 or SLOPED > 0:
        scores = adjusted(scores * scale, slopes, positions, start, CAP, SLOPED, k.shape[0])
        scale = 1.0
    if MASKED:
        scores = tl.where(visible, scores * scale, NEGATIVE_INFINITY)
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == NEGATIVE_INFINITY, 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
    else:
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        base = new_top
        weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    if SCALED:
        weights = weights * v_scale.to(tl.float32)[None, :]
    acc = matmul(weights.to(q.dtype), as_operand(v, q), acc * shrink[:, None])
    return acc, new_top, total


@triton.jit
def merge(acc, top, total, other_acc, other_top, other_total):
    """Merges the sums of two pieces. FMAs are explicit, so that every kernel gives the same bits."""
    new_top = tl.maximum(top, other_top)
    base = tl.where(new_top == NEGATIVE_INFINITY, 0.0, new_top)
    shrink, other_shrink = tl.exp2(top - base), tl.exp2(other_top - base)
    total = tl.fma(total, shrink, other_total * other_shrink)
    wide = tl.broadcast_to(shrink[:, None], acc.shape)
    acc = tl.fma(acc, wide, other_acc * other_shrink[:, None])
    return acc, new_top, total

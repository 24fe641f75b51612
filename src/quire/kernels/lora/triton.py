"""LoRA in Triton: two launches for all parts of a fused projection and any mix of adapters.

`shrink` computes x A^T split-K, since a decode has few rows and all multiprocessors must read A at once; `expand` sums
the splits in one order and adds their product with B. Grids follow shapes alone and programs without work exit at once,
so a captured graph serves every mix of adapters. No atomics: in segments of 16 rows a row's bits do not depend on the
other rows. Longer segments split the inputs by the number of rows.
"""

import os
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.lora.records import MAX_PARTS, MAX_TILE_RANKS, LoraSegments, LoraTables

# Triton's interpreter multiplies the bits of bfloat16 as if they were integers: there, it multiplies in fp32.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
SHORT = 16  # rows of a segment in small batches
BUSY = 264  # programs that keep a large GPU busy: two per multiprocessor
MOST_RANKS = 64  # that a program takes at once
ALIGNED = 8  # elements: what is a multiple of this is read 16 bytes at a time


@dataclass(frozen=True, slots=True)
class LoraTuning:
    """Tile sizes for one segment length."""

    shrink_ranks: int  # of A that a program multiplies at once
    chunk: int  # inputs of one step
    splits: int  # split-K of the inputs, at most
    shrink_warps: int
    shrink_stages: int
    expand_ranks: int
    columns: int  # of y that a program adds to
    expand_warps: int
    expand_stages: int


# By segment length: decodes are bound by reading adapters, long segments by compute.
TUNINGS = {
    16: LoraTuning(16, 512, 8, 4, 2, 16, 256, 4, 2),
    64: LoraTuning(32, 64, 8, 4, 3, 16, 128, 4, 3),
}


def add(
    x: Tensor,
    y: Tensor,
    tables: LoraTables,
    segments: LoraSegments,
    first_site: int,
    bounds: tuple[int, ...],
    tuning: LoraTuning | None = None,
) -> Tensor:
    """y[:, part] += scale * (x @ A.T) @ B for every part (site first_site + p), each row with its own adapter."""
    if not len(x) or not len(segments.slots):
        return y
    tuning = TUNINGS[segments.max_length] if tuning is None else tuning
    inner = _shrink(x, tables, segments, first_site, len(bounds) - 1, tuning)
    _expand(y, inner, tables, segments, first_site, bounds, tuning)
    return y


def add_embedded(
    ids: Tensor,
    y: Tensor,
    tables: LoraTables,
    segments: LoraSegments,
    site: int,
    num_ids: int,
    first_id: int = 0,
) -> Tensor:
    """y += scale * A[:, first_id + id] @ B."""
    if not len(ids) or not len(segments.slots):
        return y
    inner = _inner(y, tables, 1, 1)
    _pick_kernel[(len(segments.slots),)](
        ids, tables.weights, inner, tables.tile_a, tables.ranks, tables.tile_ranks,
        segments.order, segments.slots, segments.starts,
        tables.ranks.shape[1], tables.tile_a.shape[2], site, num_ids, first_id, inner.shape[3],
        segments.max_length, MAX_TILE_RANKS, num_warps=1,
    )  # fmt: skip
    _expand(y, inner, tables, segments, site, (0, y.shape[1]), TUNINGS[segments.max_length])
    return y


def _inner(rows: Tensor, tables: LoraTables, parts: int, splits: int) -> Tensor:
    """A buffer for x A^T in float32 [T, parts, splits, ranks], with whole blocks of ranks: values past an adapter's
    last rank are written and read, but not used."""
    ranks = triton.cdiv(tables.tile_a.shape[2] * MAX_TILE_RANKS, MOST_RANKS) * MOST_RANKS
    return torch.empty(rows.shape[0], parts, splits, ranks, dtype=torch.float32, device=rows.device)


def _shrink(
    x: Tensor, tables: LoraTables, segments: LoraSegments, first_site: int, parts: int, tuning: LoraTuning
) -> Tensor:
    inputs = x.shape[1]
    chunk = min(tuning.chunk, max(16, triton.next_power_of_2(inputs)))
    most = tuning.splits
    # Enough programs to fill the GPU, and no more partial sums than that.
    if segments.max_length > SHORT:
        wanted = max(1, min(most, BUSY * segments.max_length // (parts * len(x))))
        # A power of two: fewer kernels to compile, and even splits.
        most = 1 << wanted.bit_length() - 1
    steps = triton.cdiv(triton.cdiv(inputs, chunk), most)
    splits = triton.cdiv(inputs, chunk * steps)
    inner = _inner(x, tables, parts, splits)
    _shrink_kernel[(splits, parts, len(segments.slots))](
        x, tables.weights, inner, tables.tile_a, tables.ranks, tables.tile_ranks,
        segments.order, segments.slots, segments.starts,
        x.stride(0), tables.ranks.shape[1], tables.tile_a.shape[2], first_site, inner.shape[3],
        inputs, parts, splits, chunk * steps, chunk, segments.max_length, tuning.shrink_ranks,
        inputs % ALIGNED == 0, inputs % (chunk * steps) == 0, x.dtype is torch.float32,
        num_warps=tuning.shrink_warps, num_stages=tuning.shrink_stages,
    )  # fmt: skip
    return inner


def _expand(
    y: Tensor,
    inner: Tensor,
    tables: LoraTables,
    segments: LoraSegments,
    first_site: int,
    bounds: tuple[int, ...],
    tuning: LoraTuning,
) -> None:
    edges = bounds + (bounds[-1],) * (MAX_PARTS + 1 - len(bounds))
    widths = [last - first for first, last in pairwise(edges)]
    columns = min(tuning.columns, max(16, triton.next_power_of_2(max(widths))))
    pieces = [triton.cdiv(width, columns) for width in widths]
    _expand_kernel[(sum(pieces), len(segments.slots))](
        y, tables.weights, inner, tables.tile_b, tables.ranks, tables.tile_ranks, tables.scales,
        segments.order, segments.slots, segments.starts,
        y.stride(0), tables.ranks.shape[1], tables.tile_b.shape[2], first_site, inner.shape[3],
        *edges, pieces[0], pieces[0] + pieces[1], inner.shape[1], inner.shape[2],
        columns, segments.max_length, tuning.expand_ranks,
        all(width % ALIGNED == 0 for width in widths), all(width % columns == 0 for width in widths),
        tables.weights.dtype is torch.float32,
        num_warps=tuning.expand_warps, num_stages=tuning.expand_stages,
    )  # fmt: skip


@triton.jit
def _rows(tiles, rank, tile_ranks, known, width, ALIGN: tl.constexpr):
    """First elements of ranks: row rank % tile_ranks of tile rank // tile_ranks."""
    tile = tl.load(tiles + rank // tile_ranks, mask=known, other=0)
    row = tile + (rank % tile_ranks).to(tl.int64) * width
    return row // ALIGN * ALIGN  # tells the compiler that rows are aligned


@triton.jit
def _load(pointers, wanted, column, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Zeros where a row is masked or a column lies outside; EVEN: none does."""
    if EVEN:
        return tl.load(pointers, mask=wanted, other=0.0)
    else:
        return tl.load(pointers, mask=wanted & (column < WIDTH), other=0.0)


@triton.jit
def _matmul(a, b, sums, EXACT: tl.constexpr):
    """sums + a b."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    else:
        return tl.dot(a, b, sums, input_precision="ieee" if EXACT else None)


@triton.jit
def _shrink_kernel(
    x, weights, inner, tile_a, ranks, tile_ranks, order, slots, starts,
    x_stride, num_sites, num_tiles, first_site, inner_ranks,
    INPUTS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr,
    TOKENS: tl.constexpr, RANKS: tl.constexpr, VECTORS: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    split, part, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + segment)
    if slot >= 0:
        site_index = slot * num_sites + first_site + part
        rank = tl.load(ranks + site_index)
        tile_rank = tl.load(tile_ranks + site_index)
        first = tl.load(starts + segment)
        token = tl.arange(0, TOKENS)
        real = token < tl.load(starts + segment + 1) - first
        source = tl.load(order + first + token, mask=real, other=0).to(tl.int64)
        column = split * SPAN + tl.arange(0, CHUNK)
        x_rows = x + source[:, None] * x_stride + column[None, :]
        target = (
            inner + (((first + token) * PARTS + part) * SPLITS + split).to(tl.int64)[:, None] * inner_ranks
        )
        if SPAN == CHUNK:  # one step: x is read once for all ranks
            a = _load(x_rows, real[:, None], column[None, :], INPUTS, EVEN)
        for rank_first in range(0, rank, RANKS):
            j = rank_first + tl.arange(0, RANKS)
            known = j < rank
            row = _rows(
                tile_a + site_index.to(tl.int64) * num_tiles, j, tile_rank, known, INPUTS, 8 if VECTORS else 1
            )
            rows = weights + row[None, :] + column[:, None]
            sums = tl.zeros((TOKENS, RANKS), tl.float32)
            if SPAN == CHUNK:
                b = _load(rows, known[None, :], column[:, None], INPUTS, EVEN)
                sums = _matmul(a.to(b.dtype), b, sums, EXACT)
            else:
                for step in range(0, SPAN, CHUNK):
                    a = _load(x_rows + step, real[:, None], (column + step)[None, :], INPUTS, EVEN)
                    b = _load(rows + step, known[None, :], (column + step)[:, None], INPUTS, EVEN)
                    sums = _matmul(a.to(b.dtype), b, sums, EXACT)
            tl.store(target + j[None, :], sums, mask=real[:, None])


@triton.jit
def _pick_kernel(
    ids, weights, inner, tile_a, ranks, tile_ranks, order, slots, starts,
    num_sites, num_tiles, site, num_ids, first_id, inner_ranks, TOKENS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    slot = tl.load(slots + segment)
    if slot >= 0:
        site_index = slot * num_sites + site
        rank = tl.load(ranks + site_index)
        tile_rank = tl.load(tile_ranks + site_index)
        first = tl.load(starts + segment)
        token = tl.arange(0, TOKENS)
        real = token < tl.load(starts + segment + 1) - first
        source = tl.load(order + first + token, mask=real, other=0)
        column = tl.load(ids + source, mask=real, other=0).to(tl.int64) + first_id
        target = inner + (first + token).to(tl.int64)[:, None] * inner_ranks
        for rank_first in range(0, rank, RANKS):
            j = rank_first + tl.arange(0, RANKS)
            known = j < rank
            row = _rows(tile_a + site_index.to(tl.int64) * num_tiles, j, tile_rank, known, num_ids, 1)
            wanted = real[:, None] & known[None, :]
            value = tl.load(weights + row[None, :] + column[:, None], mask=wanted, other=0.0)
            tl.store(target + j[None, :], value.to(tl.float32), mask=wanted)


@triton.jit
def _expand_kernel(
    y, weights, inner, tile_b, ranks, tile_ranks, scales, order, slots, starts,
    y_stride, num_sites, num_tiles, first_site, inner_ranks,
    EDGE0: tl.constexpr, EDGE1: tl.constexpr, EDGE2: tl.constexpr, EDGE3: tl.constexpr,
    SECOND: tl.constexpr, THIRD: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr,
    VECTORS: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    piece, segment = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + segment)
    if slot >= 0:
        # pieces of the first part come first; SECOND and THIRD say where the others' begin
        part = (piece >= SECOND).to(tl.int32) + (piece >= THIRD).to(tl.int32)
        edge = tl.where(part == 0, EDGE0, tl.where(part == 1, EDGE1, EDGE2))
        width = tl.where(part == 0, EDGE1 - EDGE0, tl.where(part == 1, EDGE2 - EDGE1, EDGE3 - EDGE2))
        column = (piece - tl.where(part == 0, 0, tl.where(part == 1, SECOND, THIRD))) * COLUMNS
        column += tl.arange(0, COLUMNS)
        inside = column < width
        site_index = slot * num_sites + first_site + part
        rank = tl.load(ranks + site_index)
        if rank > 0:
            tile_rank = tl.load(tile_ranks + site_index)
            first = tl.load(starts + segment)
            token = tl.arange(0, TOKENS)
            real = token < tl.load(starts + segment + 1) - first
            source = tl.load(order + first + token, mask=real, other=0).to(tl.int64)
            partials = inner + ((first + token) * PARTS + part).to(tl.int64)[:, None] * SPLITS * inner_ranks
            sums = tl.zeros((TOKENS, COLUMNS), tl.float32)
            for rank_first in range(0, rank, RANKS):
                j = rank_first + tl.arange(0, RANKS)
                known = j < rank
                row = _rows(
                    tile_b + site_index.to(tl.int64) * num_tiles,
                    j,
                    tile_rank,
                    known,
                    width,
                    8 if VECTORS else 1,
                )
                rows = weights + row[:, None] + column[None, :]
                if EVEN:
                    b = tl.load(rows, mask=known[:, None], other=0.0)
                else:
                    b = tl.load(rows, mask=known[:, None] & inside[None, :], other=0.0)
                a = tl.zeros((TOKENS, RANKS), tl.float32)
                for split in tl.static_range(SPLITS):
                    a += tl.load(partials + split * inner_ranks + j[None, :], mask=real[:, None], other=0.0)
                a = tl.where(known[None, :], a, 0.0)
                sums = _matmul(a.to(b.dtype), b, sums, EXACT)
            target = y + source[:, None] * y_stride + edge + column[None, :]
            wanted = real[:, None] & inside[None, :]
            value = (
                tl.load(target, mask=wanted, other=0.0).to(tl.float32) + tl.load(scales + site_index) * sums
            )
            tl.store(target, value.to(y.dtype.element_ty), mask=wanted)

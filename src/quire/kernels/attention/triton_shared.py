"""Finds rows that begin with the same pages, so that attention reads a shared prefix once for several rows.

A decode's query tile has 16 rows and a group of heads fills few of them; the rest can hold the heads of neighbouring
sequences. Sequences of one request (samples, beams) are neighbours, and so are all under one system prompt.
"""

import triton
import triton.language as tl

MIN_SHARED = 256  # tokens; fewer are not worth a piece of their own
FEW_ROWS = 4  # per query head of a group: with fewer rows nothing is shared
COMPARED = 128  # table entries at a time


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["starts", "lens", "tables"])
def common_kernel(
    starts, lens, tables, common, stride_table, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    MIN_SHARED: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """common[row]: tokens, in whole tiles, that a decode and the decode in the row before it have in the same pages.

    The newest token's page is never shared, so each row keeps work of its own. Less than MIN_SHARED counts as zero.
    """
    row = tl.program_id(0)
    before = tl.maximum(row - 1, 0)
    start = tl.load(starts + row)
    both = (row > 0) & (tl.load(starts + row + 1) - start == 1) & (start - tl.load(starts + before) == 1)
    shorter = tl.minimum(tl.load(lens + row), tl.load(lens + before))
    limit = tl.where(both, (shorter - 1) // BLOCK_SIZE, 0)  # pages
    here = tables + row.to(tl.int64) * stride_table
    there = tables + before.to(tl.int64) * stride_table
    entry = tl.arange(0, COMPARED)
    num_same = 0
    going = limit > 0
    while going:
        inside = num_same + entry < limit
        same = tl.load(here + num_same + entry, inside, -1) == tl.load(there + num_same + entry, inside, -2)
        equal = tl.min(tl.where(same, COMPARED, entry), 0)
        num_same += equal
        going = (equal == COMPARED) & (num_same < limit)
    tokens = num_same * BLOCK_SIZE // TILE * TILE
    tl.store(common + row, tl.where(tokens >= MIN_SHARED, tokens, 0))


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def group_rows(
    common, shared, row, lane, num_rows, num_before, most, MEMBERS: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes shared[row] = (tokens shared, rows of the group if this row leads one, else 0); returns how many lead.

    A run of rows that share with the row before is cut into groups of up to MEMBERS; no more than `most` lead one.
    """
    alone = (tl.load(common + row, row < num_rows, 0) == 0) | (lane == 0)
    in_run = lane - tl.associative_scan(tl.where(alone, lane, 0), 0, _later)
    leads = in_run % MEMBERS == 0
    size = tl.where(row < num_rows, 1, 0)
    tokens = tl.load(common + row + 1, leads & (row + 1 < num_rows) & (lane + 1 < BLOCK), 0)
    together = leads & (tokens > 0)
    for i in tl.static_range(1, MEMBERS):
        other = tl.load(common + row + i, together & (row + i < num_rows) & (lane + i < BLOCK), 0)
        together = together & (other > 0)
        size += tl.where(together, 1, 0)
        tokens = tl.where(together, tl.minimum(tokens, other), tokens)
    leads = leads & (size > 1)
    rank = num_before + tl.cumsum(leads.to(tl.int32), 0)
    leads = leads & (rank <= most)
    tl.store(shared + row * 2, row * 0, row < num_rows)
    tl.store(shared + row * 2 + 1, row * 0, row < num_rows)
    tl.debug_barrier()
    tl.store(shared + row * 2 + 1, size, leads)
    for i in tl.static_range(0, MEMBERS):
        tl.store(shared + (row + i) * 2, tokens, leads & (i < size))
    tl.debug_barrier()
    return tl.sum(leads.to(tl.int32), 0)

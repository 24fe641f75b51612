"""A step's inputs by two small kernels, one launch each. Both may be captured in a graph."""

import triton
import triton.language as tl
from torch import Tensor

_SCATTERED = 1024  # entries per program
_TOKENS = 256  # tokens, and table entries, per program and pass


def scatter(target: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> None:
    """target[rows[i], columns[i]] = values[i]; no element is named twice."""
    count = rows.shape[0]
    _scatter[(triton.cdiv(count, _SCATTERED),)](
        target, rows, columns, values, count, target.stride(0), _SCATTERED
    )


def spread(
    rows: Tensor,
    num_computed: Tensor,
    query_starts: Tensor,
    row_tokens: Tensor,
    row_tables: Tensor,
    block_size: int,
    max_query_len: int,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
) -> None:
    """As the reference."""
    grid = (rows.shape[0], triton.cdiv(max_query_len, _TOKENS))
    _spread[grid](
        rows, num_computed, query_starts, row_tokens, row_tables,
        token_ids, positions, slots, context_lens, block_tables,
        row_tokens.stride(0), row_tables.stride(0), block_tables.stride(0),
        block_size, _TOKENS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _scatter(target, rows, columns, values, count, stride, SIZE: tl.constexpr):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    row = tl.load(rows + index, mask=inside, other=0).to(tl.int64)
    column = tl.load(columns + index, mask=inside, other=0)
    value = tl.load(values + index, mask=inside, other=0)
    tl.store(target + row * stride + column, value, mask=inside)


@triton.jit
def _spread(
    rows, num_computed, query_starts, row_tokens, row_tables,
    token_ids, positions, slots, context_lens, block_tables,
    tokens_stride, tables_stride, gathered_stride,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows + index).to(tl.int64)
    start = tl.load(query_starts + index)
    count = tl.load(query_starts + index + 1) - start
    offset = piece * TOKENS + tl.arange(0, TOKENS)
    inside = offset < count
    if row < 0:
        zero = tl.zeros((TOKENS,), tl.int32)
        # No token: zeros take matrix units less power than numbers do, and power is what limits large steps.
        tl.store(token_ids + start + offset, zero - 1, mask=inside)
        tl.store(positions + start + offset, zero, mask=inside)
        tl.store(slots + start + offset, zero.to(tl.int64), mask=inside)
        if piece == 0:
            tl.store(context_lens + index, 0)
    else:
        first = tl.load(num_computed + index)
        position = first + offset
        token = tl.load(row_tokens + row * tokens_stride + position, mask=inside, other=0)
        table = row_tables + row * tables_stride
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        tl.store(token_ids + start + offset, token, mask=inside)
        tl.store(positions + start + offset, position, mask=inside)
        tl.store(slots + start + offset, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
        if piece == 0:
            context = first + count
            tl.store(context_lens + index, context)
            num_blocks = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
            gathered = block_tables + index.to(tl.int64) * gathered_stride
            for base in range(0, num_blocks, TOKENS):
                entry = base + tl.arange(0, TOKENS)
                taken = entry < num_blocks
                tl.store(gathered + entry, tl.load(table + entry, mask=taken, other=0), mask=taken)

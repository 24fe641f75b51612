"""A step's inputs in plain torch."""

import torch
from torch import Tensor


def scatter(
    target: Tensor,  # [rows, columns] int32, changed in place
    rows: Tensor,  # [N] int32
    columns: Tensor,  # [N] int32
    values: Tensor,  # [N] int32
) -> None:
    """target[rows[i], columns[i]] = values[i]; no element is named twice."""
    target[rows.long(), columns.long()] = values


def spread(
    rows: Tensor,  # [R] int32, the row of each sequence that advances; -1 is padding of one token
    num_computed: Tensor,  # [R] int32, position of each sequence's first token
    query_starts: Tensor,  # [R + 1] int32
    row_tokens: Tensor,  # [max_rows, max_len] int32, every row's tokens
    row_tables: Tensor,  # [max_rows, max_blocks] int32, every row's block table
    block_size: int,
    max_query_len: int,  # no sequence has more tokens than this
    token_ids: Tensor,  # [T] int32, written
    positions: Tensor,  # [T] int32, written
    slots: Tensor,  # [T] int64, written
    context_lens: Tensor,  # [R] int32, written
    block_tables: Tensor,  # [R, max_blocks] int32, written as far as the context goes
) -> None:
    """Token ids, positions, slots, context lengths and block tables of a ragged batch.

    Padding has no context and no token but -1, whose embedding is zeros. It writes to block 0, never allocated.
    """
    counts = (query_starts[1:] - query_starts[:-1]).long()
    padded = rows < 0
    owner = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
    offsets = torch.arange(len(owner), device=rows.device) - query_starts[:-1].long()[owner]
    row = rows.long().clamp(min=0)[owner]
    position = torch.where(padded[owner], 0, num_computed.long()[owner] + offsets)
    block = torch.where(padded[owner], 0, row_tables[row, position // block_size].long())
    token_ids[: len(owner)] = torch.where(padded[owner], -1, row_tokens[row, position])
    positions[: len(owner)] = position
    slots[: len(owner)] = block * block_size + position % block_size
    context_lens.copy_(torch.where(padded, 0, num_computed + counts.int()))
    block_tables.copy_(row_tables[rows.long().clamp(min=0)])

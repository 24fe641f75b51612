"""Accepted paths of token trees in Triton. Promises are those of the reference."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


def settle(
    chosen: Tensor, trees: Tensor, nodes: Tensor, row_tokens: Tensor, row_tables: Tensor, slots: Sequence[Tensor],
) -> None:  # fmt: skip
    """As the reference, without synchronization."""
    num_trees, _, most = nodes.shape
    # Of each tree: the path's length, then its nodes.
    paths = torch.empty(num_trees, most + 1, dtype=torch.int32, device=chosen.device)
    _follow[(num_trees,)](
        chosen, trees, nodes, row_tokens, paths, row_tokens.stride(0), most,
        LANES=triton.next_power_of_2(most), num_warps=1,
    )  # fmt: skip
    for planes in slots:
        narrow = planes.shape[3] % 4 or planes.stride(0) % 4 or planes.storage_offset() % 4
        words = planes if narrow else planes.view(torch.int32)
        _, num_planes, block_size, slot_words = words.shape
        _move[(num_trees, num_planes)](
            words, trees, paths, row_tables, words.stride(0), row_tables.stride(0), most, slot_words,
            BLOCK_SIZE=block_size, WORDS=triton.next_power_of_2(slot_words),
        )  # fmt: skip


@triton.jit(do_not_specialize=["most"])
def _follow(chosen, trees, nodes, row_tokens, paths, stride, most, LANES: tl.constexpr):
    tree = tl.program_id(0)
    row = tl.load(trees + tree * 4).to(tl.int64)
    position = tl.load(trees + tree * 4 + 1)
    first = tl.load(trees + tree * 4 + 2)
    count = tl.load(trees + tree * 4 + 3)
    lane = tl.arange(0, LANES)
    tokens = tl.load(nodes + tree * 2 * most + lane, lane < count, -2)
    parents = tl.load(nodes + (tree * 2 + 1) * most + lane, lane < count, -2)
    wanted = tl.load(chosen + first).to(tl.int32)
    row_target = row_tokens + row * stride + position
    tl.store(row_target, wanted)
    node = tl.max(tl.where((parents == -1) & (tokens == wanted), lane, -1), 0)
    depth = count * 0
    while node >= 0:
        wanted = tl.load(chosen + first + 1 + node).to(tl.int32)
        tl.store(paths + tree * (most + 1) + 1 + depth, node)
        depth += 1
        tl.store(row_target + depth, wanted)
        node = tl.max(tl.where((parents == node) & (tokens == wanted), lane, -1), 0)
    tl.store(paths + tree * (most + 1), depth)


@triton.jit(do_not_specialize=["most"])
def _move(
    pool, trees, paths, tables, block_stride, table_stride, most, slot_words,
    BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One plane of one tree. A node's depth is at most its index, so nothing is read after it was overwritten."""
    tree, plane = tl.program_id(0), tl.program_id(1)
    table = tables + tl.load(trees + tree * 4).to(tl.int64) * table_stride
    position = tl.load(trees + tree * 4 + 1)
    path = paths + tree * (most + 1)
    word = tl.arange(0, WORDS)
    inside = word < slot_words
    for depth in range(tl.load(path)):
        node = tl.load(path + 1 + depth)
        if node != depth:
            source, target = position + node, position + depth
            from_block = tl.load(table + source // BLOCK_SIZE).to(tl.int64)
            to_block = tl.load(table + target // BLOCK_SIZE).to(tl.int64)
            from_slot = (plane * BLOCK_SIZE + source % BLOCK_SIZE) * slot_words
            to_slot = (plane * BLOCK_SIZE + target % BLOCK_SIZE) * slot_words
            held = tl.load(pool + from_block * block_stride + from_slot + word, inside, 0)
            tl.store(pool + to_block * block_stride + to_slot + word, held, inside)

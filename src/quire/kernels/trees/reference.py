"""Accepted paths of token trees in plain torch."""

from collections.abc import Sequence

from torch import Tensor


def settle(
    chosen: Tensor,  # [S] int64, the target's tokens: after a tree's root, then after each of its nodes
    trees: Tensor,  # [D, 4] int32: row, position of the first node, index into [S], number of nodes
    nodes: Tensor,  # [D, 2, N] int32: tokens and parents (-1 is the root); entries past a tree's nodes are ignored
    row_tokens: Tensor,  # [max_rows, max_len] int32, every row's tokens
    row_tables: Tensor,  # [max_rows, max_blocks] int32, every row's block table
    slots: Sequence[Tensor],  # each [num_blocks, planes, block_size, bytes] uint8: K and V of layers, scales
) -> None:
    """Follows from each root the child whose token was chosen; no node has two such.

    The row then has the chosen tokens from the tree's position on, and K and V of the drafted ones lie at their
    positions. Slots behind them are undefined.
    """
    for (row, position, first, count), (tokens, parents) in zip(trees.tolist(), nodes.tolist(), strict=True):
        at, path = -1, []
        wanted = [int(chosen[first])]
        for node in range(count):
            if parents[node] == at and tokens[node] == wanted[-1]:  # children follow their parents
                at = node
                path.append(node)
                wanted.append(int(chosen[first + 1 + node]))
        for depth, token_id in enumerate(wanted):
            row_tokens[row, position + depth] = token_id
        moved = [(position + node, position + depth) for depth, node in enumerate(path) if node != depth]
        if moved:
            sources, targets = zip(*moved, strict=True)
            for planes in slots:
                block_size = planes.shape[2]
                planes[_places(row_tables[row], targets, block_size)] = planes[
                    _places(row_tables[row], sources, block_size)
                ]


def _places(table: Tensor, places: tuple[int, ...], block_size: int) -> tuple[Tensor, slice, list[int]]:
    blocks = table[[place // block_size for place in places]].long()
    return blocks, slice(None), [place % block_size for place in places]

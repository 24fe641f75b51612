"""Acceptance: which tokens of a draft are accepted.

The target chooses its own token at each position of a draft, with that position's own random number, exactly as
it would have without the draft. A drafted token is accepted if it is that token. So an answer has the same tokens
with and without speculation, greedy or sampled, seeded or not; the draft's distribution does not matter.
In a tree, the child whose token was chosen is followed.
"""

from collections.abc import Sequence

from quire.core.draft import ROOT


def num_accepted(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of a draft's tokens are accepted; `chosen` has the target's token at each of them, and one more."""
    for index, token_id in enumerate(drafted):
        if chosen[index] != token_id:
            return index
    return len(drafted)


def accepted_nodes(drafted: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The accepted nodes, from the root on. `chosen` has the target's token after the root, then after each node.

    No node has two children of one token. Without parents the draft is a chain.
    """
    if not parents:
        return list(range(num_accepted(drafted, chosen)))
    path: list[int] = []
    at, wanted = ROOT, chosen[0]
    for node, (token_id, parent) in enumerate(zip(drafted, parents, strict=True)):
        if parent == at and token_id == wanted:  # a node's children follow it
            path.append(node)
            at, wanted = node, chosen[1 + node]
    return path

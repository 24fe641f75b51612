"""Token trees: drafts of one sequence merged, so that common prefixes are computed once, and which tokens are accepted.

The target chooses its own token at each position of a draft, with that position's own random number, exactly as it
would have without the draft. A drafted token is accepted if it is that token; in a tree, the child whose token was
chosen is followed. So an answer has the same tokens with and without speculation, greedy or sampled, seeded or not;
the distribution of the draft does not matter.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from quire.core.draft import MAX_NODES, ROOT, TokenTree, straightened
from quire.core.request import Ints, ints


def merged(drafts: Iterable[Sequence[int]], most: int = MAX_NODES) -> TokenTree:
    """Merges drafts, the likeliest first, into a tree of at most `most` nodes, depth first.

    Drafts with a common prefix share nodes. Later drafts are cut where there is no room.
    """
    children: list[dict[int, int]] = [{}]  # of the root, then of each node in order of arrival: token -> node
    for draft in drafts:
        at = 0
        for token_id in draft:
            child = children[at].get(token_id)
            if child is None:
                if len(children) > most:
                    break
                child = children[at][token_id] = len(children)
                children.append({})
            at = child
    token_ids, parents = ints(), ints()
    waiting = [(token_id, ROOT, node) for token_id, node in reversed(children[0].items())]
    while waiting:
        token_id, parent, node = waiting.pop()
        index = len(token_ids)
        token_ids.append(token_id)
        parents.append(parent)
        waiting += [(after, index, child) for after, child in reversed(children[node].items())]
    return straightened(token_ids, parents)


def parted(drafts: Sequence[Sequence[int]]) -> TokenTree:
    """Drafts of one length whose first tokens differ, as a tree."""
    length = len(drafts[0])
    return TokenTree(
        ints(token_id for draft in drafts for token_id in draft),
        _parted_parents(length, len(drafts)) if len(drafts) > 1 else ints(),
    )


@lru_cache
def _parted_parents(length: int, width: int) -> Ints:
    return ints(
        ROOT if depth == 0 else first + depth - 1
        for first in range(0, length * width, length)
        for depth in range(length)
    )


def branches(tree: TokenTree) -> list[list[int]]:
    """The drafts that a tree was merged from, as far as they end in leaves, in order."""
    parents = tree.parents or range(-1, len(tree) - 1)
    paths: list[list[int]] = []
    for token_id, parent in zip(tree.token_ids, parents, strict=True):
        paths.append([*(paths[parent] if parent != ROOT else ()), token_id])
    inner = set(parents)
    return [path for node, path in enumerate(paths) if node not in inner]


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

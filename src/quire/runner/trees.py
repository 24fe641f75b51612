"""Token trees in a step: where each node stands in the sequence, what it sees, and which of them are verified."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quire.core.draft import Draft, ancestors, depths
from quire.core.ints import ints
from quire.core.step import Step

NO_TREE = -1


@dataclass(frozen=True, slots=True)
class SpreadTrees:
    """The tokens of a step in which some rows have trees."""

    positions: np.ndarray  # [T] int64, in the sequence
    starts: np.ndarray  # [T] int32, where the row's tree begins; NO_TREE
    ancestors: np.ndarray  # [T] int64, bit n: the token sees node n


@lru_cache(maxsize=1024)  # drafts of one kind have one shape
def _arrays(parents: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Depths and ancestors of a tree's nodes, each [K] int64."""
    of_nodes = ints(np.frombuffer(parents, np.int32).tolist())
    return np.array(depths(of_nodes), np.int64), np.array(ancestors(of_nodes), np.int64)


def spread_trees(step: Step) -> SpreadTrees | None:
    """None where every draft is a chain."""
    trees = {draft.row: draft for draft in step.drafts if draft.parents}
    if not trees:
        return None
    num_tokens = step.total_tokens
    positions = np.empty(num_tokens, np.int64)
    starts = np.full(num_tokens, NO_TREE, np.int32)
    seen = np.zeros(num_tokens, np.int64)
    first = 0
    for row, computed, count in zip(step.rows, step.num_computed, step.num_tokens, strict=True):
        places = np.arange(computed, computed + count)
        here = slice(first, first + count)
        positions[here] = places
        tree = trees.get(row)
        if tree is not None:
            nodes = places - tree.position
            inside = nodes >= 0
            depth, bits = _arrays(tree.parents.tobytes())
            positions[here][inside] = tree.position + depth[nodes[inside]]
            seen[here][inside] = bits[nodes[inside]]
            starts[here] = tree.position
        first += count
    return SpreadTrees(positions, starts, seen)


@dataclass(frozen=True, slots=True)
class VerifiedTrees:
    """The trees that a step verifies, as the kernel that accepts paths takes them."""

    trees: np.ndarray  # [D, 4] int32: row, position of the first node, index into [S], number of nodes
    nodes: np.ndarray  # [D, 2, N] int32: tokens and parents


def verified_trees(step: Step) -> VerifiedTrees | None:
    """None where there is none: a chain is in its place already, and so are its tokens unless they were drawn."""
    found = [
        (draft, first)
        for draft, first in step.verified()
        if (draft.parents or draft.drawn) and not draft.is_growing
    ]
    if not found:
        return None
    most = max(len(draft.token_ids) for draft, _ in found)
    trees, nodes = np.empty((len(found), 4), np.int32), np.full((len(found), 2, most), -2, np.int32)
    for i, (draft, first) in enumerate(found):
        count = len(draft.token_ids)
        trees[i] = draft.row, draft.position, first, count
        nodes[i, 0, :count] = draft.token_ids
        nodes[i, 1, :count] = draft.parents or range(-1, count - 1)
    return VerifiedTrees(trees, nodes)


def drawn_drafts(step: Step) -> list[tuple[Draft, int]]:
    """Drafts that the draft model's probabilities decide, and the index into [S] of the first of their samples."""
    if not any(draft.drawn for draft in step.drafts):
        return []
    return [(draft, first) for draft, first in step.verified() if draft.drawn and not draft.is_growing]

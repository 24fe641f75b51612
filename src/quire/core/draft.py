"""Draft: proposed tokens of a sequence, a chain or a tree, and the room for them."""

from dataclasses import dataclass, field

from quire.core.request import Ints, Sequence, ints

MAX_NODES = 64  # of a tree: its nodes' ancestors are the bits of one integer
ROOT = -1  # the parent of nodes that follow the sequence's last token


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Proposed tokens, a parent before its children; depth first, the likeliest branch first, when verified."""

    token_ids: Ints = field(default_factory=ints)  # [K] int32
    parents: Ints = field(default_factory=ints)  # [K] int32, indices into `token_ids` or ROOT; []: a chain
    # length of its branches if they were sampled: the draft model's probabilities decide what is accepted
    drawn: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> "TokenTree":
        """Without the nodes behind the first `count`: a tree still, since parents come first."""
        return straightened(self.token_ids[:count], self.parents[:count], self.drawn)

    @property
    def main(self) -> int:
        """How many nodes its first branch has: these come first."""
        return next((n for n, parent in enumerate(self.parents) if parent != n - 1), len(self.token_ids))


def straightened(token_ids: Ints, parents: Ints, drawn: int = 0) -> TokenTree:
    """As a chain where each node's parent is the one before it, so that it is verified as one."""
    chain = all(parent == n - 1 for n, parent in enumerate(parents))
    return TokenTree(token_ids, ints() if chain else parents, drawn)


def depths(parents: Ints) -> list[int]:
    """Of each node: 0 follows the sequence's last token."""
    result: list[int] = []
    for parent in parents:
        result.append(0 if parent == ROOT else result[parent] + 1)
    return result


def ancestors(parents: Ints) -> list[int]:
    """Of each node, as bits: the nodes on its path, itself included. Signed, as 64 bits are elsewhere."""
    masks: list[int] = []
    for n, parent in enumerate(parents):
        masks.append((0 if parent == ROOT else masks[parent]) | 1 << n)
    return [bits - (1 << 64) if bits >> 63 else bits for bits in masks]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens of a row. The step computes and samples at each, so that they are verified.

    Node n's K and V are written to position `position + n`, at any depth; those of accepted nodes are then moved to
    their own positions.
    """

    row: int
    position: int  # of the first of them: the row's known tokens end before it
    token_ids: Ints  # [K] int32
    parents: Ints = field(default_factory=ints)  # [K] int32, see TokenTree; []: a chain
    is_growing: bool = False  # part of a tree that a draft model is still making: nothing is verified
    drawn: int = 0  # see TokenTree


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """Limits of one sequence's draft; blocks for all its tokens are allocated."""

    sequence: Sequence
    length: int  # tokens from the sequence's end to a leaf, at most
    width: int = 1  # branches, at most

    @property
    def num_tokens(self) -> int:
        return self.length * self.width

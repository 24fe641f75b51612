"""Draft: tokens that someone proposes for a sequence, as a chain or as a tree, and how many there is room for."""

from dataclasses import dataclass, field

from quire.core.ints import Ints, ints
from quire.core.request import Sequence

MAX_NODES = 64  # of a tree: its nodes' ancestors are the bits of one integer
ROOT = -1  # the parent of what follows the sequence's last token


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Proposed tokens, a parent before its children; depth first, the likeliest branch first, when verified."""

    token_ids: Ints = field(default_factory=ints)  # [K] int32
    parents: Ints = field(default_factory=ints)  # [K] int32, indices into `token_ids` or ROOT; []: a chain
    drawn: int = (
        0  # length of its branches where they were drawn: the draft model's probabilities decide what stays
    )

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
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return found


def ancestors(parents: Ints) -> list[int]:
    """Of each node, as bits: the nodes on its path, itself included. Signed, as 64 bits are elsewhere."""
    found: list[int] = []
    for n, parent in enumerate(parents):
        found.append((0 if parent == ROOT else found[parent]) | 1 << n)
    return [bits - (1 << 64) if bits >> 63 else bits for bits in found]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens of a row. The step computes and samples at each, so that they are verified.

    Node n's K and V go where position `position + n` will have its own, whatever its depth; what is accepted is then
    moved to its place.
    """

    row: int
    position: int  # of the first of them: the row's known tokens end before it
    token_ids: Ints  # [K] int32
    parents: Ints = field(default_factory=ints)  # [K] int32, see TokenTree; []: a chain
    is_growing: bool = False  # part of a tree that a draft model still makes: nothing is verified
    drawn: int = 0  # see TokenTree


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """A sequence that may draft so far: blocks for all the tokens are its own already."""

    sequence: Sequence
    length: int  # tokens from the sequence's end to a leaf, at most
    width: int = 1  # branches, at most

    @property
    def num_tokens(self) -> int:
        return self.length * self.width

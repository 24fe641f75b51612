"""Token trees: drafts that begin alike share nodes, and what the target chose is followed."""

from hypothesis import given
from hypothesis import strategies as st

from quire.core.draft import MAX_NODES, ROOT, TokenTree, ancestors, depths
from quire.core.request import ints
from quire.speculate.ngram import Lookup
from quire.speculate.tree import accepted_nodes, branches, merged, num_accepted

DRAFTS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6)


def test_drafts_that_begin_alike_share_nodes() -> None:
    tree = merged([[1, 2, 3], [1, 2, 4], [5, 2], [1, 6]])
    assert list(tree.token_ids) == [1, 2, 3, 4, 6, 5, 2]
    assert list(tree.parents) == [ROOT, 0, 1, 1, 0, ROOT, 5]
    assert tree.main == 3
    assert depths(tree.parents) == [0, 1, 2, 2, 1, 0, 1]
    assert ancestors(tree.parents) == [0b1, 0b11, 0b111, 0b1011, 0b10001, 0b100000, 0b1100000]


def test_one_draft_is_a_chain() -> None:
    assert merged([[1, 2, 3], [1, 2]]) == TokenTree(ints([1, 2, 3]))
    assert merged([]) == TokenTree()
    assert merged([[1, 2], [3]]).first(2) == TokenTree(ints([1, 2]))


def test_the_last_bit_is_a_sign() -> None:
    chain = ints(range(-1, MAX_NODES - 1))
    assert ancestors(chain)[-1] == -1
    assert all(-(1 << 63) <= bits < 1 << 63 for bits in ancestors(chain))


@given(DRAFTS, st.integers(0, 20))
def test_merging_loses_nothing_but_for_room(drafts: list[list[int]], most: int) -> None:
    tree = merged(drafts, most)
    assert len(tree) <= most
    kept = branches(tree)
    assert merged(kept, most) == tree
    parents = list(tree.parents) or list(range(-1, len(tree) - 1))
    assert len(set(zip(parents, tree.token_ids, strict=True))) == len(tree)  # distinct nodes only
    assert all(parent < node for node, parent in enumerate(parents))
    whole = merged(drafts)
    prefixes = {tuple(draft[:n]) for draft in drafts for n in range(1, len(draft) + 1)}
    assert len(whole) == len(prefixes)
    if drafts and most >= len(drafts[0]):
        assert list(tree.token_ids[: len(drafts[0])]) == drafts[0]


@given(DRAFTS, st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_the_longest_branch_that_was_chosen_stays(drafts: list[list[int]], answer: list[int]) -> None:
    """Whatever the tree, as many tokens stay as the best of its drafts would have kept."""
    tree = merged(drafts)
    parents = list(tree.parents) or list(range(-1, len(tree) - 1))
    depth = depths(ints(parents))
    chosen = [answer[0], *(answer[1 + depth[node]] for node in range(len(tree)))]
    path = accepted_nodes(tree.token_ids, tree.parents, chosen)
    assert len(path) == max((num_accepted(draft, answer) for draft in drafts), default=0)
    assert [tree.token_ids[node] for node in path] == answer[: len(path)]
    assert [parents[node] for node in path] == [ROOT, *path[:-1]][: len(path)]


def test_several_continuations_are_found() -> None:
    tokens = ints([1, 2, 7, 7, 1, 2, 8, 8, 9, 1, 2, 7, 5, 1, 2])
    found = Lookup(2, 2).find_several(tokens, 2, 3)
    assert [list(one) for one in found] == [[7, 5], [8, 8], [7, 7]]
    assert list(found[0]) == list(Lookup(2, 2).find(tokens, 2))
    assert Lookup(2, 2).find_several(ints([1, 2, 3]), 2, 3) == []

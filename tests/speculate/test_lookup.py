"""Prompt lookup: the latest continuation of the longest n-gram, kept up to date without a scan."""

from hypothesis import given
from hypothesis import strategies as st

from quire.core.request import ints
from quire.speculate.ngram import TRIED, Lookup


def test_continues_where_the_same_tokens_stood_before() -> None:
    assert list(Lookup(2, 4).find(ints([1, 2, 3, 4, 5, 1, 2]), 3)) == [3, 4, 5]


def test_a_longer_match_wins_over_a_later_one() -> None:
    tokens = ints([9, 1, 2, 7, 7, 8, 1, 2, 6, 6, 9, 1, 2])
    assert list(Lookup(2, 3).find(tokens, 2)) == [7, 7]
    assert list(Lookup(2, 2).find(tokens, 2)) == [6, 6]


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert list(Lookup(2, 3).find(ints([4, 5, 6, 4, 5, 6, 4, 5]), 5)) == [6, 4, 5, 6, 4]


def test_nothing_is_found_where_nothing_repeats() -> None:
    for tokens in ([], [1], [1, 1], [1, 2, 3, 4]):
        assert not Lookup(2, 4).find(ints(tokens), 3)


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.integers(1, 7)),
)
def test_growing_gives_what_a_scan_gives(
    tokens: list[int], shortest: int, more: int, pieces: list[int]
) -> None:
    lookup, longest, end = Lookup(shortest, shortest + more), shortest + more, 0
    for piece in [*pieces, len(tokens)]:
        end = min(len(tokens), end + piece)
        known = ints(tokens[:end])
        assert list(lookup.find(known, 4)) == _scanned(tokens[:end], shortest, longest, 4)


def _scanned(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """All places where the shortest n-gram stood, the latest few; the longest match of these, the latest first."""
    end = len(tokens)
    places = [
        p for p in range(end - 1, shortest - 1, -1) if tokens[p - shortest : p] == tokens[end - shortest :]
    ]
    best, best_length = 0, 0
    for place in places[:TRIED]:
        length = max(
            n for n in range(1, min(longest, place) + 1) if tokens[place - n : place] == tokens[end - n :]
        )
        if length > best_length:
            best, best_length = place, length
    if not best:
        return []
    return [tokens[best + i % (end - best)] for i in range(count)]

"""Prompt lookup: drafts from the sequence's own tokens, prompt and output. No model, no device memory.

What followed the last n-gram when it occurred before is likely to follow again.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Listed

from quire.core.draft import DraftRoom, TokenTree
from quire.core.request import Ints, Sequence, ints
from quire.speculate.tree import merged

TRIED = 8  # earlier matches that are compared, the latest first


class Lookup:
    """An index of the n-grams of a growing sequence: one entry per token, a few lookups per draft.

    Only the shortest n-grams are indexed, each linked to its previous occurrence; longer matches are found by comparing
    backwards from there.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self.num_matched = 0  # length of the last match
        self._last: dict[bytes, int] = {}  # n-gram -> the position after its last occurrence
        # [position after an n-gram] -> the position after its previous occurrence, or 0
        self._before = array("i", [0] * shortest)

    def find(self, token_ids: Ints, count: int) -> Ints:
        """The `count` tokens that followed the longest match of the last tokens; empty without a match.

        Where they run into the end, the text repeats itself, and so does the draft.
        """
        match = self._longest_match(token_ids)
        return _continued(token_ids, match, count) if match else ints()

    def find_several(self, token_ids: Ints, count: int, width: int) -> list[Ints]:
        """Up to `width` different continuations of the last tokens' earlier occurrences.

        Longer matches come first, then later ones, so the first is the result of `find`.
        """
        matches = sorted(self._matches(token_ids), key=lambda match: -match[1])
        self.num_matched = matches[0][1] if matches else 0
        drafts: list[Ints] = []
        for position, _ in matches:
            continued = _continued(token_ids, position, count)
            if continued not in drafts:
                drafts.append(continued)
            if len(drafts) == width:
                break
        return drafts

    def _longest_match(self, token_ids: Ints) -> int:
        """The position after the longest earlier match of the last tokens, the latest of several; 0: none."""
        best, best_length = 0, 0
        for position, length in self._matches(token_ids):
            if length > best_length:
                best, best_length = position, length
            if length == self._longest:
                break
        self.num_matched = best_length
        return best

    def _matches(self, token_ids: Ints) -> Iterator[tuple[int, int]]:
        """(position after an earlier match of the last tokens, its length), the latest first."""
        self._take(token_ids)
        end, shortest = len(token_ids), self._shortest
        position = self._last.get(token_ids[end - shortest :].tobytes(), 0) if end > shortest else 0
        for _ in range(TRIED):
            if position == 0:
                return
            length = shortest
            while (
                length < self._longest
                and length < position
                and token_ids[position - length - 1] == token_ids[end - length - 1]
            ):
                length += 1
            yield position, length
            position = self._before[position]

    def _take(self, token_ids: Ints) -> None:
        """Indexes the n-grams that end before the last token: the last one has no continuation yet."""
        last, before, shortest = self._last, self._before, self._shortest
        for end in range(len(before), len(token_ids)):
            ngram = token_ids[end - shortest : end].tobytes()
            before.append(last.get(ngram, 0))
            last[ngram] = end


def _continued(token_ids: Ints, first: int, count: int) -> Ints:
    """`count` tokens from `first` on, repeated where they run into the end."""
    period = token_ids[first : first + count]
    return period if len(period) == count else (period * -(-count // len(period)))[:count]


class NgramProposer:
    """Drafts by prompt lookup, with an index per sequence."""

    guesses = True

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._lookups: dict[str, dict[int, Lookup]] = {}

    def guess(self, sequence: Sequence) -> int | None:
        following = self._lookup(sequence).find(sequence.token_ids, 1)
        return following[0] if following else None

    def is_long_match(self, sequence: Sequence) -> bool:
        """Whether the last match was of the longest length: then longer drafts are likely right."""
        return self._lookup(sequence).num_matched >= self._longest

    def can_draft(self, sequence: Sequence) -> bool:
        return self.guess(sequence) is not None

    def seconds(self, length: int) -> float:
        return 0.0

    def draft(self, rooms: Listed[DraftRoom]) -> list[TokenTree]:
        return [self._draft(room) for room in rooms]

    def _draft(self, room: DraftRoom) -> TokenTree:
        lookup, token_ids = self._lookup(room.sequence), room.sequence.token_ids
        if room.width == 1:
            return TokenTree(lookup.find(token_ids, room.length))
        return merged(lookup.find_several(token_ids, room.length, room.width), room.num_tokens)

    def forget(self, request_id: str) -> None:
        self._lookups.pop(request_id, None)

    def close(self) -> None:
        self._lookups.clear()

    def _lookup(self, sequence: Sequence) -> Lookup:
        of_request = self._lookups.setdefault(sequence.request.request_id, {})
        lookup = of_request.get(sequence.index)
        if lookup is None:
            lookup = of_request[sequence.index] = Lookup(self._shortest, self._longest)
        return lookup

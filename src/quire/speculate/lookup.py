"""Prompt lookup: what followed the last tokens when they stood together before is likely to follow again."""

from array import array
from collections.abc import Iterator

from quire.core.ints import Ints, ints

TRIED = 8  # earlier places that are compared, the latest first


class Lookup:
    """Where each n-gram of a growing sequence stood, without a scan: a token costs one entry, a draft a few looks.

    Only the shortest n-grams are indexed, each linked to the place where it stood before; longer ones are found by
    comparing backwards from there.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self.num_matched = 0  # tokens of the n-gram that was found last
        self._last: dict[bytes, int] = {}  # n-gram -> the position after its last occurrence
        self._before = array(
            "i", [0] * shortest
        )  # [position after an n-gram] -> the same of the one before, or 0

    def find(self, token_ids: Ints, count: int) -> Ints:
        """What followed the longest known n-gram at the end, `count` tokens; nothing if none is known.

        Where that runs into the end, the text repeats itself, and the draft goes on repeating.
        """
        place = self._best_place(token_ids)
        return _continued(token_ids, place, count) if place else ints()

    def find_several(self, token_ids: Ints, count: int, width: int) -> list[Ints]:
        """What followed the last tokens wherever they stood, up to `width` different continuations.

        Longer n-grams come first, then later ones, so the first is what `find` finds.
        """
        places = sorted(self._places(token_ids), key=lambda found: -found[1])
        self.num_matched = places[0][1] if places else 0
        found: list[Ints] = []
        for place, _ in places:
            continued = _continued(token_ids, place, count)
            if continued not in found:
                found.append(continued)
            if len(found) == width:
                break
        return found

    def _best_place(self, token_ids: Ints) -> int:
        """The position after the longest n-gram that equals the end, the latest of several; 0: there is none."""
        best, best_length = 0, 0
        for place, length in self._places(token_ids):
            if length > best_length:
                best, best_length = place, length
            if length == self._longest:
                break
        self.num_matched = best_length
        return best

    def _places(self, token_ids: Ints) -> Iterator[tuple[int, int]]:
        """(the position after an n-gram that equals the end, its length), the latest first."""
        self._take(token_ids)
        end, shortest = len(token_ids), self._shortest
        place = self._last.get(token_ids[end - shortest :].tobytes(), 0) if end > shortest else 0
        for _ in range(TRIED):
            if place == 0:
                return
            length = shortest
            while (
                length < self._longest
                and length < place
                and token_ids[place - length - 1] == token_ids[end - length - 1]
            ):
                length += 1
            yield place, length
            place = self._before[place]

    def _take(self, token_ids: Ints) -> None:
        """Learns the n-grams that ended before the last token: the one that ends with it is yet to be continued."""
        last, before, shortest = self._last, self._before, self._shortest
        for end in range(len(before), len(token_ids)):
            ngram = token_ids[end - shortest : end].tobytes()
            before.append(last.get(ngram, 0))
            last[ngram] = end


def _continued(token_ids: Ints, place: int, count: int) -> Ints:
    """`count` tokens from a place on, over and over where they run into the end."""
    period = token_ids[place : place + count]
    return period if len(period) == count else (period * -(-count // len(period)))[:count]

"""NgramProposer: drafts from the sequence's own tokens, prompt and answer. No model, no memory on the device."""

from collections.abc import Sequence as Listed

from quire.core.draft import DraftRoom, TokenTree
from quire.core.request import Sequence
from quire.speculate.lookup import Lookup
from quire.speculate.tree import merged


class NgramProposer:
    guesses = True

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._lookups: dict[str, dict[int, Lookup]] = {}

    def guess(self, sequence: Sequence) -> int | None:
        found = self._lookup(sequence).find(sequence.token_ids, 1)
        return found[0] if found else None

    def is_strong(self, sequence: Sequence) -> bool:
        """Whether as many tokens matched as are compared: then more is likely to."""
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

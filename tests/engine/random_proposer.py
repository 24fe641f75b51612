"""RandomProposer: drafts that are right as often as asked, so that every pattern of acceptance happens."""

import random

from quire.core.draft import DraftRoom, TokenTree
from quire.core.request import Sequence
from quire.speculate.tree import merged
from tests.engine.page_runner import VOCABULARY, next_token


class RandomProposer:
    guesses = False

    def __init__(self, acceptance_rate: float) -> None:
        self._agreement = acceptance_rate
        self._random = random.Random(5)

    def guess(self, sequence: Sequence) -> int | None:
        return None

    def is_strong(self, sequence: Sequence) -> bool:
        return True

    def can_draft(self, sequence: Sequence) -> bool:
        return self._random.random() < 0.9

    def seconds(self, length: int) -> float:
        return 0.0

    def draft(self, rooms: list[DraftRoom]) -> list[TokenTree]:
        """As many branches as there is room for, each of its own length; right ones begin alike and share nodes."""
        return [
            merged(
                (self._draft(room.sequence, self._random.randint(0, room.length)) for _ in range(room.width)),
                room.num_tokens,
            )
            for room in rooms
        ]

    def _draft(self, sequence: Sequence, count: int) -> list[int]:
        tokens = list(sequence.token_ids)
        for _ in range(count):
            is_right = self._random.random() < self._agreement
            tokens.append(
                next_token(tokens, sequence.index) if is_right else self._random.randrange(VOCABULARY)
            )
        return tokens[len(sequence.token_ids) :]

    def forget(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass

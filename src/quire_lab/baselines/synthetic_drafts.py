"""SyntheticProposer: drafts that are right as often as they are asked to be, for benchmarks and tests.

It is told the answers beforehand and costs no pass of a model, so what is measured is verification alone.
"""

import random
from collections.abc import Mapping
from collections.abc import Sequence as Listed

from quire.core.draft import DraftRoom, TokenTree
from quire.core.request import Sequence
from quire.speculate.tree import parted


class SyntheticProposer:
    """Each token of a branch is right with the chance `acceptance_rate`, as long as those before it were.

    Where the first branch begins wrong, one of the others begins right with the chance `branch_acceptance`. Wrong
    tokens are drawn evenly; branches begin differently.
    """

    guesses = False

    def __init__(
        self,
        answers: Mapping[tuple[tuple[int, ...], int], Listed[int]],  # by prompt and sample index
        vocab_size: int,
        acceptance_rate: float,
        branch_acceptance: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._acceptance_rate, self._branch_acceptance = acceptance_rate, branch_acceptance
        self._random = random.Random(seed)

    def guess(self, sequence: Sequence) -> int | None:
        return None

    def is_long_match(self, sequence: Sequence) -> bool:
        return True

    def can_draft(self, sequence: Sequence) -> bool:
        return (sequence.request.prompt_token_ids, sequence.index) in self._answers

    def seconds(self, length: int) -> float:
        return 0.0

    def draft(self, rooms: Listed[DraftRoom]) -> list[TokenTree]:
        return [self._draft(room) for room in rooms]

    def forget(self, request_id: str) -> None:
        pass

    def close(self) -> None:
        pass

    def _draft(self, room: DraftRoom) -> TokenTree:
        sequence, chance = room.sequence, self._random.random
        answer = self._answers[tuple(sequence.request.prompt_token_ids), sequence.index]
        coming = answer[sequence.num_outputs : sequence.num_outputs + room.length]
        if not coming:
            return TokenTree()
        right = 0 if chance() < self._acceptance_rate else None  # the branch that begins right
        if right is None and room.width > 1 and chance() < self._branch_acceptance:
            right = self._random.randrange(1, room.width)
        taken = {coming[0]}
        drafts = []
        for branch in range(room.width):
            first = coming[0] if branch == right else self._other(taken)
            taken.add(first)
            drafts.append([first, *self._continued(coming, branch == right)])
        return parted(drafts)

    def _continued(self, coming: Listed[int], is_right: bool) -> list[int]:
        tokens = []
        for token_id in coming[1:]:
            is_right = is_right and self._random.random() < self._acceptance_rate
            tokens.append(token_id if is_right else self._other({token_id}))
        return tokens

    def _other(self, taken: set[int]) -> int:
        """A token that is none of these."""
        while (token_id := int(self._random.random() * self._vocab_size)) in taken:
            pass
        return token_id

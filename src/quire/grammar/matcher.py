"""Matcher: the state of one sequence in its grammar."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.grammar.errors import GrammarError
from quire.grammar.vocabulary import Vocabulary


class Matcher:
    """Not thread-safe, but forks are independent of each other. Unusable after a GrammarError."""

    def __init__(self, inner: Any, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        # end tokens after a text that was complete already, which llguidance does not consume
        self._num_ends = 0
        library_words = -(-(len(vocabulary.tokens) + (not vocabulary.end_ids)) // 32)
        self._wide = np.zeros(library_words, np.uint32) if library_words > vocabulary.num_words else None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consumes `token_ids`; GrammarError if the grammar does not allow them, or a limit is exceeded."""
        for token_id in token_ids:
            if token_id in self._vocabulary.end_ids and self.is_terminated:
                self._num_ends += 1
            elif not self._inner.consume_token(token_id):
                raise self._error()

    def fill(self, bits: np.ndarray) -> None:
        """Writes the mask of allowed next tokens to bits [num_words] uint32: token t is bit t % 32 of word t // 32.

        End tokens are allowed where the text is complete, and are the only ones once nothing else can follow.
        """
        target = bits if self._wide is None else self._wide
        self._inner.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        if self._inner.is_error():
            raise self._error()
        if self._wide is not None:
            bits[:] = self._wide[: len(bits)]

    def accepted(self, token_ids: Sequence[int]) -> int:
        """Length of the longest prefix of the draft `token_ids` that the grammar allows. Changes no state."""
        if self.is_terminated:
            return int(bool(token_ids) and token_ids[0] in self._vocabulary.end_ids and not self._num_ends)
        return self._inner.validate_tokens(list(token_ids))

    def rollback(self, num_tokens: int) -> None:
        """Removes the last `num_tokens` tokens."""
        ends = min(num_tokens, self._num_ends)
        self._num_ends -= ends
        if num_tokens > ends and not self._inner.rollback(num_tokens - ends):
            raise self._error()

    def fork(self) -> "Matcher":
        fork = Matcher(self._inner.deep_copy(), self._vocabulary)
        fork._num_ends = self._num_ends
        return fork

    @property
    def is_terminated(self) -> bool:
        """Whether only an end token can follow, or has followed."""
        return self._inner.is_stopped() and not self._inner.is_error()

    def _error(self) -> GrammarError:
        reason = " ".join(self._inner.get_error().replace("<non-verbose/>", "").split())
        return GrammarError(f"the grammar stopped the answer: {reason or 'the token is not allowed'}")

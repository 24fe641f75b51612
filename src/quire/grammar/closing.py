"""Closer: how JSON that a limit is about to cut off ends in few tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.grammar.matcher import GrammarError, Matcher
from quire.grammar.vocabulary import Vocabulary

HORIZON = 32  # tokens before the limit at which ending is first considered: each costs a walk to the end
MARGIN = 4  # one more token may open brackets that take as many to close
_ENDING = b'"]}'
_BETWEEN = b'"]},:[{'


class Closer:
    """Of one vocabulary. Changes no matcher: it walks with a copy."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        special = vocabulary.special_ids
        tokens = [b"" if at in special else token for at, token in enumerate(vocabulary.tokens)]
        self._lengths = np.array([len(token.strip()) for token in tokens], np.int32)  # [V]
        # quotes first, since brackets within a string are text; then the token that closes most
        self._ending = _made_of(
            _ENDING,
            tokens,
            lambda token: (not token.startswith(b'""'), not token.startswith(b'"'), -len(token)),
        )
        self._between = _made_of(_BETWEEN, tokens, len)
        self._end_ids = np.array(vocabulary.end_ids, np.int64)

    def token_to_end(self, matcher: Matcher, num_left: int) -> int | None:
        """The next token of a short way to the end, if waiting longer would miss it; None: not yet, or too late."""
        bits = np.zeros(self._vocabulary.num_words, np.uint32)
        walker, first, num_tokens = matcher.fork(), None, 0
        try:
            while not walker.is_terminated:
                walker.fill(bits)
                token_id = self._next(bits)
                if token_id is None or num_tokens == num_left:
                    return None
                first = token_id if first is None else first
                num_tokens += 1
                if token_id in self._vocabulary.end_ids:
                    break
                walker.advance([token_id])
        except GrammarError:
            return None
        return first if num_tokens >= num_left - MARGIN else None

    def _next(self, bits: np.ndarray) -> int | None:
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(self._lengths)].astype(bool)
        for token_ids in (self._end_ids, self._ending, self._between):
            found = token_ids[allowed[token_ids]]
            if len(found):
                return int(found[0])
        longest = int(np.argmax(self._lengths * allowed))
        return longest if allowed[longest] and self._lengths[longest] else None


def _made_of(characters: bytes, tokens: list[bytes], key: Callable[[bytes], Any]) -> np.ndarray:
    """The tokens of these characters alone, in the order of `key`."""
    found = [at for at, token in enumerate(tokens) if token and not token.strip(characters)]
    return np.array(sorted(found, key=lambda at: key(tokens[at])), np.int64)

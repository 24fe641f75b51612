"""Vocabulary: what a grammar must know of a tokenizer. The bytes of every token, and which tokens are not text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token t is `tokens[t]`; ids that stand for nothing are empty. As many tokens as the model has logits."""

    tokens: Sequence[bytes]  # [V]
    special_ids: frozenset[int]  # never part of a text
    end_ids: tuple[int, ...]  # special tokens that end an answer; the only ones that a grammar may allow
    encode: Callable[[str], Sequence[int]] | None = (
        None  # how the model is used to see a text; None: greedily
    )

    @property
    def num_words(self) -> int:
        """32-bit words in a row of bits."""
        return -(-len(self.tokens) // 32)


class LibraryVocabulary:
    """A Vocabulary as the grammar library reads it: these attributes, and a call that makes tokens of text.

    The call serves text that the grammar forces, so that the model meets the tokens that it was trained on.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        end_ids = vocabulary.end_ids
        # a model without an end token gets one beyond its logits: the library wants one, and nobody can draw it
        tokens = list(vocabulary.tokens) if end_ids else [*vocabulary.tokens, b"<end>"]
        self.end_ids = list(end_ids) or [len(tokens) - 1]
        self.eos_token_id = self.end_ids[0]
        self._special = {*vocabulary.special_ids, *self.end_ids}
        self.special_token_ids = sorted(self._special)
        self.tokens = tokens
        self._encode = vocabulary.encode
        self._ids: dict[bytes, int] = {}
        self._longest = 1

    def __call__(self, text: str) -> Sequence[int]:
        if self._encode is not None:
            token_ids = self._encode(text)
            # Some tokenizers put a space in front of any text, which the grammar would not have; and text that
            # reads like a special token is text.
            spelled = b"".join(self.tokens[one] for one in token_ids)
            if spelled == text.encode() and self._special.isdisjoint(token_ids):
                return token_ids
        return self._greedy(text.encode())

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token that fits, again and again; stops where none does."""
        if not self._ids:
            self._ids = {
                token: token_id
                for token_id, token in reversed(list(enumerate(self.tokens)))
                if token and token_id not in self._special
            }
            self._longest = max(map(len, self._ids), default=1)
        found: list[int] = []
        at = 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                token_id = self._ids.get(text[at:end])
                if token_id is not None:
                    break
            else:
                break
            found.append(token_id)
            at = end
        return found

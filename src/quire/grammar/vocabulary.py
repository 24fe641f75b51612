"""Vocabulary: the bytes of every token, and which tokens are special, as grammars need them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token t is `tokens[t]`, empty for an unused id. There are as many tokens as the model has logits."""

    tokens: Sequence[bytes]  # [V]
    special_ids: frozenset[int]  # never part of a text
    end_ids: tuple[int, ...]  # special tokens that end an answer; the only ones that a grammar may allow
    # the tokenizer's own encoding; None: greedy longest match
    encode: Callable[[str], Sequence[int]] | None = None

    @property
    def num_words(self) -> int:
        """32-bit words of a mask."""
        return -(-len(self.tokens) // 32)


class LibraryVocabulary:
    """A Vocabulary with the attributes that llguidance reads, and a call that tokenizes text.

    The call tokenizes text that the grammar forces, as the model saw it in training.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        end_ids = vocabulary.end_ids
        # llguidance requires an end token: a model without one gets an id beyond its logits, which is never sampled
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
            # Some tokenizers prepend a space, which the grammar does not allow; and text that looks like a special
            # token is text.
            spelled = b"".join(self.tokens[token_id] for token_id in token_ids)
            if spelled == text.encode() and self._special.isdisjoint(token_ids):
                return token_ids
        return self._greedy(text.encode())

    def _greedy(self, text: bytes) -> list[int]:
        """Greedy longest match; stops where no token fits."""
        if not self._ids:
            self._ids = {
                token: token_id
                for token_id, token in reversed(list(enumerate(self.tokens)))
                if token and token_id not in self._special
            }
            self._longest = max(map(len, self._ids), default=1)
        token_ids: list[int] = []
        at = 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                token_id = self._ids.get(text[at:end])
                if token_id is not None:
                    break
            else:
                break
            token_ids.append(token_id)
            at = end
        return token_ids

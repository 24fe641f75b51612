"""Tokenizer: text to token ids and back, over the tokenizers library."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from quire.core.errors import InvalidRequest, ModelError


class Tokenizer:
    """Immutable after construction and safe to share between threads.

    Padding and truncation that a tokenizer.json may switch on are switched off: a prompt is never cut silently.
    """

    def __init__(self, text: str, config: Mapping[str, Any] | None = None) -> None:
        """From the text of tokenizer.json and, for the names of special tokens, of tokenizer_config.json."""
        try:
            self._inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(
                f"tokenizer.json cannot be read ({error}): fetch it again or give another with --tokenizer"
            ) from error
        self._inner.no_padding()
        self._inner.no_truncation()
        self.special_tokens = special_tokens(config or {})
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: dict[
            int, str
        ] = {}  # of byte-level tokens that end between characters; filled by decoders

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included. A model may have more rows than this."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that decoding leaves out with `skip_special_tokens`."""
        added = self._inner.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether each token stands for fixed bytes, independent of its neighbours: text is then made byte by byte."""
        decoder = self._inner.decoder
        if decoder is None:
            return False
        state = json.loads(decoder.__getstate__())
        kinds = {part["type"] for part in state.get("decoders", [state])}
        return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with `add_special_tokens`, between the model's start and end tokens."""
        if not isinstance(text, str):
            raise InvalidRequest(f"a prompt must be text, not {type(text).__name__}: send a string", "prompt")
        try:
            return self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            position = next((at for at, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), 0)
            raise InvalidRequest(
                f"the prompt holds half of a character (a lone surrogate) at position {position}: send valid Unicode",
                "prompt",
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; unused ids are left out, invalid bytes become U+FFFD."""
        return self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self._inner.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the middle of a text; empty for an unused id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The text that a token adds to the middle of a text; U+FFFD for a part of a character."""
        if self.is_byte_level:
            return self.decode([token_id], skip_special_tokens=False)
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def context_id(self, token_ids: Sequence[int]) -> int | None:
        """The last piece of a prompt, behind which the text of an answer goes on: special tokens and single bytes are
        passed over. None at the start of a text, and for byte-level tokens, which do not depend on neighbours."""
        if self.is_byte_level:
            return None
        for token_id in reversed(token_ids):
            token = self._inner.id_to_token(token_id)
            if token is not None and token_id not in self.special_ids and not is_byte_token(token):
                return token_id
        return None

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell these words, at the start of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.strip(" ") if isinstance(word, str) else ""
            if not bare:
                raise InvalidRequest(
                    f"bad_words holds {word!r}: give words with at least one letter", "bad_words"
                )
            for spelled in (bare, f" {bare}"):
                sequences[tuple(self.encode(spelled, add_special_tokens=False))] = None
        return tuple(token_ids for token_ids in sequences if token_ids)

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF[letter] for letter in token)
            except KeyError:
                return token.encode()  # an added token, spelled as it is
        if is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        if token_id in self.special_ids:
            return token.encode()
        return token.replace("\u2581", " ").encode()

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._inner.token_to_id(token)


def is_byte_token(token: str) -> bool:
    """Whether this is SentencePiece's spelling of one byte: <0x0A>."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like; each is a string or a record with its content."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _byte_spelling() -> dict[str, int]:
    """Byte-level vocabularies spell a printable Latin-1 byte as itself, the others as U+0100 and onwards."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_spelling()

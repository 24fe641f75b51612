"""Tokenizer: text to token ids and back, over the tokenizers library."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

from quire.core.errors import InvalidRequest, ModelError
from quire.core.sampling import MAX_BAD_WORD_TOKENS

LONG = 8192  # characters, about a millisecond of work; longer texts are encoded without the interpreter lock
_WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
# What each step before the vocabulary may make of a text: how many characters become one, at most. Steps that are
# not listed may drop characters.
_SHRINKING = {"NFC": 4, "NFKC": 4} | dict.fromkeys(("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"), 1)
_ALPHANUMERIC = re.compile("[A-Za-z0-9]")
_SPLITTING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")


@dataclass(frozen=True, slots=True)
class _PieceBound:
    """What a token stands for at most."""

    longest: int  # characters of the text
    dropped: str  # characters that belong to no token
    stripping: tuple[str, ...]  # added tokens that take any white space beside them


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
        # Of byte-level tokens that end between characters; filled by decoders.
        self.whole_texts: dict[int, str] = {}

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
        return self._encoding(text, add_special_tokens).ids

    def encode_pair(self, first: str, second: str, keep: int | None = None) -> tuple[list[int], int]:
        """Both texts as the model's pairs have them, and where tokens of type 1 begin (their number: nowhere).

        `keep` tokens are left of a longer pair: the longer text is cut first, at its end.
        """
        texts = [self._encoding(text, add_special_tokens=False) for text in (first, second)]
        if keep is not None:
            room = max(0, keep - self._inner.num_special_tokens_to_add(is_pair=True))
            for text, length in zip(texts, _cut_lengths(len(texts[0]), len(texts[1]), room), strict=True):
                text.truncate(length)
        pair = self._inner.post_process(texts[0], texts[1], add_special_tokens=True)
        return pair.ids, pair.type_ids.index(1) if 1 in pair.type_ids else len(pair.ids)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of `text` begins and ends, in characters; without the model's start and end tokens."""
        return self._inner.encode_batch([text], add_special_tokens=False)[0].offsets

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if not isinstance(text, str):
            raise InvalidRequest(f"a prompt must be text, not {type(text).__name__}: send a string", "prompt")
        try:
            if len(text) > LONG:
                return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            return self._inner.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            position = next((at for at, letter in enumerate(text) if "\ud800" <= letter <= "\udfff"), 0)
            raise InvalidRequest(
                f"the prompt holds half of a character (a lone surrogate) at position {position}: send valid Unicode",
                "prompt",
            ) from error

    def fewest_tokens(self, text: str, enough: int) -> int:
        """A number of tokens that `text` has at least, found without encoding it; 0 where nothing is certain. It may
        stop counting at `enough`."""
        bound = self._piece_bound
        if bound is None:
            words = text.split(" ", enough)[:enough] if self._encodes_words else ()
            return sum(1 for word in words if _ALPHANUMERIC.search(word))
        uncounted = bound.dropped
        if any(token in text for token in bound.stripping):
            uncounted += _WHITESPACE
        fewest = 0
        for part in (text[: 2 * enough * bound.longest], text):  # most often the first part is enough
            fewest = -(-(len(part) - sum(map(part.count, uncounted))) // bound.longest)
            if fewest >= enough or len(part) == len(text):
                break
        return fewest

    @property
    def max_piece(self) -> int | None:
        """Characters of a text that one token stands for at most; None where nothing is certain."""
        bound = self._piece_bound
        return None if bound is None else bound.longest

    @cached_property
    def _piece_bound(self) -> "_PieceBound | None":
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        shrinking = _shrinking(_steps(self._inner.normalizer, "normalizers"))
        splits = _steps(self._inner.pre_tokenizer, "pretokenizers")
        keeps_all = all(
            step["type"] in _SPLITTING or step.get("behavior", "Removed") != "Removed" for step in splits
        )
        dropped = self._dropped(vocabulary)
        if shrinking is None or not keeps_all or dropped is None:
            return None
        added = self._inner.get_added_tokens_decoder().values()
        stripping = tuple(token.content for token in added if token.lstrip or token.rstrip)
        return _PieceBound(shrinking * max(map(len, vocabulary), default=1), dropped, stripping)

    @cached_property
    def _encodes_words(self) -> bool:
        """Whether a word between two spaces has a token of its own if it has a plain letter or digit."""
        splits = _steps(self._inner.pre_tokenizer, "pretokenizers")
        steps = _steps(self._inner.normalizer, "normalizers")
        added = self._inner.get_added_tokens_decoder().values()
        return (
            isinstance(self._inner.model, tokenizers.models.WordPiece)
            and any(step["type"] in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit") for step in splits)
            and all(step["type"] in (*_SHRINKING, "BertNormalizer", "StripAccents") for step in steps)
            and not any(" " in token.content for token in added)
        )

    def _dropped(self, vocabulary: Mapping[str, int]) -> str | None:
        """The characters that encoding leaves out; None where it may leave out others, or turn a run of unknown ones
        into a single token."""
        model = self._inner.model
        if self.is_byte_level and isinstance(model, tokenizers.models.BPE):
            missing = [byte for letter, byte in _BYTE_OF.items() if letter not in vocabulary]
            # of a longer character at least one byte is left if the bytes after its first are known
            is_known = not any(0x80 <= byte < 0xC0 for byte in missing)
            return "".join(chr(byte) for byte in missing if byte < 0x80) if is_known else None
        falls_back = False
        if isinstance(model, tokenizers.models.BPE):
            falls_back = model.byte_fallback
        elif isinstance(model, tokenizers.models.Unigram):
            falls_back = bool(json.loads(model.__getstate__()).get("byte_fallback"))
        return "" if falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) else None

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
            bare = word.strip(" ")
            if not bare:
                raise InvalidRequest(
                    f"bad_words holds {word!r}: give words with at least one letter", "bad_words"
                )
            for spelled in (bare, f" {bare}"):
                token_ids = tuple(self.encode(spelled, add_special_tokens=False))
                if len(token_ids) > MAX_BAD_WORD_TOKENS:
                    raise InvalidRequest(
                        f"bad_words holds {word[:40]!r}, which has {len(token_ids)} tokens, and {MAX_BAD_WORD_TOKENS} "
                        "are allowed: shorten it",
                        "bad_words",
                    )
                sequences[token_ids] = None
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


def _cut_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """What is left of two texts' tokens in `room`, the longer one cut first: transformers' longest_first."""
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if first <= second else (long, short)


def _steps(component: Any, key: str) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    if component is None:
        return []
    state: dict[str, Any] = json.loads(component.__getstate__())
    parts = state.get(key, [state])
    return [inner for part in parts for inner in part.get(key, [part])]


def _shrinking(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """How many characters normalizers turn into one at most; None: they may drop any number."""
    factor = 1
    for step in steps:
        known = _SHRINKING.get(step["type"])
        if step["type"] == "Replace" and step["content"] and "String" in step["pattern"]:
            known = -(-len(step["pattern"]["String"]) // len(step["content"]))
        if known is None:
            return None
        factor *= max(1, known)
    return factor


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

"""tokenizer.json from GGUF metadata: byte-level BPE ("gpt2"), SentencePiece BPE ("llama"), unigram ("t5")
and WordPiece ("bert").

It lives in `weights` and not in `text`, because every Source promises a tokenizer.json.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.core.errors import ModelError
from quire.weights.gguf_file import token_id_of

VERSION = 3  # part of the cache key: raise it when the same metadata gives another text

# tokenizer.ggml.token_type, the same as in a SentencePiece model
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"  # SentencePiece writes a space as this
# By architecture, where texts have both ends marked: what a second text begins with, of RoBERTa and of ModernBERT.
_ENCODERS = {"bert": "eos", "modern-bert": ""}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level tokenizer cuts text into words before it merges."""

    pattern: str | None = None  # None: GPT-2's own, which the tokenizers library has built in
    single_digits: bool = False
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # a word that is a token needs no merges
    starts_with_bos: bool = False  # where the file does not say
    thousands: bool = False  # punctuation apart first, and three digits apart last


_PLAIN = _Split()
_DIGITS = _Split(single_digits=True)
_LLAMA3 = _Split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole_words=True, starts_with_bos=True)
_DBRX = _Split(_LLAMA3.pattern)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _SLASHED = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (f"{_BEFORE}{_UPPER}*{_LOWER}+", f"{_BEFORE}{_UPPER}+{_LOWER}*")
_TEKKEN = _Split(rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHED}", whole_words=True, starts_with_bos=True)
_GPT4O = _Split(rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHED}")
_BLOOM = _Split(r" ?[^(\s|[.,!?…。，、।۔،])]+")
_FALCON = _Split(thousands=True)
_QWEN2 = _Split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", compose=True)

_SPLITS = {
    "default": _PLAIN,
    "modern-bert": _Split(compose=True),
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "olmo": _PLAIN,
    "roberta-bpe": _PLAIN,
    "mpt": _PLAIN,
    "bloom": _BLOOM,
    "falcon": _FALCON,
    "falcon3": _LLAMA3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "gpt-4o": _GPT4O,
    "tekken": _TEKKEN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_text(metadata: Mapping[str, Any]) -> str:
    """The text of tokenizer.json; ModelError names a tokenizer that cannot be built from metadata."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = _token_types(metadata, len(tokens))
    if kind == "gpt2":
        parts = _byte_level(metadata, tokens)
    elif kind == "llama":
        parts = _sentence_piece(metadata, tokens, types)
    elif kind == "t5":
        parts = _unigram(metadata, tokens, types)
    elif kind == "bert":
        tokens = [_bert_word(token, kind) for token, kind in zip(tokens, types, strict=True)]
        parts = _word_piece(metadata, tokens, types)
    else:
        raise ModelError(
            f"GGUF tokenizer {kind!r} cannot be built here, only 'bert', 'gpt2', 'llama' and 't5': "
            "give a folder or hub id that has its tokenizer.json with --tokenizer"
        )
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        **parts,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _token_types(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is not None and len(types) == num_tokens:
        return [int(kind) for kind in types]
    guessed = [NORMAL] * num_tokens  # files of 2023 may lack the list
    for word in ("bos", "eos", "unknown", "padding"):
        token_id = token_id_of(metadata, word)
        if token_id is not None and token_id < num_tokens:
            guessed[token_id] = CONTROL
    return guessed


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in text as a whole. Control tokens are special: decoding may skip them."""
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for token_id, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(name)
    if split is None:
        raise ModelError(
            f"GGUF pre-tokenizer {name!r} is not known here (known: {', '.join(sorted(_SPLITS))}): "
            "give a folder or hub id that has its tokenizer.json with --tokenizer"
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = []
    if split.thousands:
        steps.append({"type": "Punctuation", "behavior": "Contiguous"})
    if split.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if split.pattern is not None:
        steps.append(_isolated(split.pattern))
    steps.append({**byte_level, "use_regex": split.pattern is None})
    if split.thousands:
        steps += [{"type": "Digits", "individual_digits": False}, _isolated("[0-9][0-9][0-9]")]
    return {
        "normalizer": {"type": "NFC"} if split.compose else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(metadata, tokens, split.starts_with_bos),
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            **_MODEL,
            "ignore_merges": split.whole_words,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": list(metadata.get("tokenizer.ggml.merges", ())),
        },
    }


def _isolated(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_MODEL = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def _scores(metadata: Mapping[str, Any], num_tokens: int) -> Any:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != num_tokens:
        kind = metadata.get("tokenizer.ggml.model")
        raise ModelError(f"GGUF tokenizer {kind!r} has no score per token: convert the model again")
    return scores


def _unigram(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """SentencePiece's unigram model: the most probable cut of a text into pieces."""
    scores = _scores(metadata, len(tokens))
    unknown = token_id_of(metadata, "unknown")
    if unknown is None and UNKNOWN in types:
        unknown = types.index(UNKNOWN)
    normalizers: list[dict[str, Any]] = []
    folding = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if folding is not None and len(folding):
        table = base64.b64encode(bytes(int(byte) & 0xFF for byte in folding)).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": table})
    encodes = metadata.get("general.architecture") in _ENCODERS  # XLM-R divides texts at white space first
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", True) and not encodes:
        normalizers.append({"type": "Strip", "strip_left": False, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": _SPACE})
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always" if prefixed else "never"}
    words = [*([{"type": "WhitespaceSplit"}] if encodes else []), {**spaces, "split": True}]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words},
        "post_processor": _post_processor(metadata, tokens, False),
        "decoder": {**spaces, "split": True},
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[token, float(score)] for token, score in zip(tokens, scores, strict=True)],
            "byte_fallback": BYTE in types,
        },
    }


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = _scores(metadata, len(tokens))
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = token_id_of(metadata, "unknown") or 0
    to_piece = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    if prefixed:
        to_piece.insert(0, {"type": "Prepend", "prepend": _SPACE})
    to_text: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        to_text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": to_piece},
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, tokens, True),
        "decoder": {"type": "Sequence", "decoders": to_text},
        "model": {
            **_MODEL,
            "unk_token": tokens[unknown] if unknown < len(tokens) else None,
            "fuse_unk": True,
            "byte_fallback": BYTE in types,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": _merges_by_score(tokens, types, scores),
        },
    }


def _word_piece(metadata: Mapping[str, Any], words: list[str], types: list[int]) -> dict[str, Any]:
    """The files do not say whether case counts: it does if some word has capitals."""
    cased = any(
        kind == NORMAL and not word.startswith("[") and word != word.lower()
        for word, kind in zip(words, types, strict=True)
    )

    def named(keys: tuple[str, ...], word: str) -> int:
        known = _first_id(metadata, *keys)
        if known is None and word not in words:
            raise ModelError(f"GGUF tokenizer 'bert' names no {keys[0]} token: convert the model again")
        return words.index(word) if known is None else known

    around = {"bos": named(("cls", "bos"), "[CLS]"), "eos": named(("seperator", "eos"), "[SEP]")}
    unknown = named(("unknown",), "[UNK]")
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not cased,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template(words, around, ""),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": words[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: token_id for token_id, word in enumerate(words)},
        },
    }


def _bert_word(token: str, kind: int) -> str:
    """GGUF marks where words begin, BERT where they go on."""
    if token.startswith(_SPACE) and kind != CONTROL:
        return token[1:]
    if kind in (CONTROL, UNKNOWN) or (token.startswith("[") and token.endswith("]")):
        return token
    return f"##{token}"


def _merges_by_score(tokens: list[str], types: list[int], scores: Any) -> list[list[str]]:
    """SentencePiece joins whichever neighbours give the best-scored piece: the same as merges in score order."""
    pieces = {token: index for index, token in enumerate(tokens) if types[index] == NORMAL}
    by_score = sorted(pieces, key=lambda piece: (-float(scores[pieces[piece]]), pieces[piece]))
    merges: list[list[str]] = []
    for piece in by_score:
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [(left, right) for left, right in cuts if left in pieces and right in pieces]
        pairs.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        merges.extend([left, right] for left, right in pairs)
    return merges


def _post_processor(
    metadata: Mapping[str, Any], tokens: list[str], bos_by_default: bool
) -> dict[str, Any] | None:
    """Puts the start and end tokens around a text, where the model wants them."""
    second = _ENCODERS.get(str(metadata.get("general.architecture")))
    encodes = second is not None
    ids: dict[str, int] = {}
    for word, other, by_default in (("bos", "cls", bos_by_default), ("eos", "seperator", False)):
        token_id = _first_id(metadata, *([other] if encodes else []), word)
        added = metadata.get(f"tokenizer.ggml.add_{word}_token", by_default or encodes)
        if added and token_id is not None and token_id < len(tokens):
            ids[word] = token_id
    return _template(tokens, ids, "bos" if second is None else second) if ids else None


def _first_id(metadata: Mapping[str, Any], *names: str) -> int | None:
    """Of the first of these special tokens that the file has."""
    token_ids = (token_id_of(metadata, name) for name in names)
    return next((token_id for token_id in token_ids if token_id is not None), None)


def _template(tokens: list[str], ids: Mapping[str, int], second: str) -> dict[str, Any]:
    """`ids`: of bos and eos, each where it is wanted; `second`: which of them a second text begins with. Texts that
    are divided by two of one token have no types of their own."""

    def around(*sequences: str) -> list[dict[str, Any]]:
        template: list[dict[str, Any]] = []
        for index, sequence in enumerate(sequences):
            kind = 0 if second == "eos" else index
            for word in (second if index else "bos", sequence, "eos"):
                if word == sequence:
                    template.append({"Sequence": {"id": sequence, "type_id": kind}})
                elif word in ids:
                    template.append({"SpecialToken": {"id": tokens[ids[word]], "type_id": kind}})
        return template

    special = {
        tokens[token_id]: {"id": tokens[token_id], "ids": [token_id], "tokens": [tokens[token_id]]}
        for token_id in ids.values()
    }
    single, pair = around("A"), around("A", "B")
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}

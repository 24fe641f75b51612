"""tokenizer.json of a folder. Where there is none, it is made from vocab.json and merges.txt, tokenizer.model or
vocab.txt, which older folders have. Files that cannot be read here are refused, with what to do."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError, WeightsError
from quire.weights.gguf_tokenizer import CONTROL, NORMAL, USER_DEFINED, tokenizer_text
from quire.weights.text_files import damaged, read_json, read_text

# How text is cut into words, by tokenizer_config.json's tokenizer_class, else config.json's model_type.
_SPLITS = dict.fromkeys(("gpt2tokenizer", "gpt2", "opt"), "gpt-2") | dict.fromkeys(
    ("qwen2tokenizer", "qwen2", "qwen3"), "qwen2"
)
_BPE = 2  # of SentencePiece's two kinds of model
_WHAT_TO_DO = (
    "save its tokenizer.json with transformers' AutoTokenizer.from_pretrained(…).save_pretrained(…), or give a folder "
    "or hub id that has one with --tokenizer"
)


def folder_tokenizer(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The text of tokenizer.json, or None where the folder has no file of a tokenizer. `config` is
    tokenizer_config.json's content."""
    text = read_text(folder / "tokenizer.json")
    if text is not None:
        return text
    if (folder / "merges.txt").exists() and (folder / "vocab.json").exists():
        return _byte_level(folder, config)
    if (folder / "tokenizer.model").exists():
        return _sentence_piece(folder / "tokenizer.model", config)
    if (vocabulary := read_text(folder / "vocab.txt")) is not None:
        return wordpiece_json(vocabulary, config)
    others = [
        name
        for name in ("spiece.model", "sentencepiece.bpe.model", "tekken.json")
        if (folder / name).exists()
    ]
    if others:
        raise ModelError(
            f"{folder / others[0]} is the only file of a tokenizer and cannot be read here: {_WHAT_TO_DO}"
        )
    return None


def _byte_level(folder: Path, config: Mapping[str, Any]) -> str:
    """GPT-2's and Qwen's form: token -> id, and the merges in order."""
    model = read_json(folder / "config.json") or {}
    name = str(config.get("tokenizer_class") or model.get("model_type")).removesuffix("Fast")
    split = _SPLITS.get(name.lower())
    if split is None:
        raise ModelError(
            f"{folder}: vocab.json and merges.txt do not say how a {name} cuts text into words: {_WHAT_TO_DO}"
        )
    vocabulary = _token_ids(folder / "vocab.json", read_json(folder / "vocab.json") or {})
    lines = (read_text(folder / "merges.txt") or "").split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    tokens: list[str] = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split, "tokenizer.ggml.merges": merges}
    return _made(folder, config, metadata, tokens, [NORMAL] * len(tokens), ("<|endoftext|>",))


def _made(
    folder: Path,
    config: Mapping[str, Any],
    metadata: dict[str, Any],
    tokens: list[str],
    types: list[int],
    special: tuple[str, ...] = (),
    scores: list[float] | None = None,
) -> str:
    """tokenizer.json of these tokens, with the added ones of tokenizer_config.json and added_tokens.json."""
    named = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    names = {*special, *(token for token in named.values() if token)}
    for token_id, token, is_special in _added(folder, config):
        if token_id > len(tokens):
            raise damaged(
                folder / "tokenizer_config.json", f"has no token {len(tokens)} but a token {token_id}"
            )
        if token_id == len(tokens):
            tokens.append(token)
            types.append(NORMAL)
        if token_id < len(tokens) and tokens[token_id] == token:
            types[token_id] = CONTROL if is_special or token in names else USER_DEFINED
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    for token in names & ids.keys():
        types[ids[token]] = CONTROL
    for word in ("bos", "eos"):
        name = named.get(f"{word}_token")
        if name in ids:
            metadata[f"tokenizer.ggml.{word}_token_id"] = ids[name]
        if isinstance(config.get(f"add_{word}_token"), bool):
            metadata[f"tokenizer.ggml.add_{word}_token"] = config[f"add_{word}_token"]
    if scores is not None:
        metadata["tokenizer.ggml.scores"] = [*scores, *([0.0] * (len(tokens) - len(scores)))]
    return tokenizer_text({**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})


def _added(folder: Path, config: Mapping[str, Any]) -> list[tuple[int, str, bool]]:
    """(id, token, whether it is special), in order of ids."""
    path = folder / "added_tokens.json"
    added = {i: (token, False) for token, i in _token_ids(path, read_json(path) or {}).items()}
    decoder = config.get("added_tokens_decoder")
    for token_id, entry in decoder.items() if isinstance(decoder, Mapping) else ():
        content = _content(entry)
        if content is None or not str(token_id).isdecimal():
            raise damaged(folder / "tokenizer_config.json", f"has an added token {token_id}: {entry!r}")
        added[int(token_id)] = (content, bool(entry.get("special")) if isinstance(entry, Mapping) else False)
    return [(token_id, *added[token_id]) for token_id in sorted(added)]


def _token_ids(path: Path, vocabulary: Mapping[str, Any]) -> dict[str, int]:
    """Checked: ids that leave large gaps would take memory for nothing."""
    for token, token_id in vocabulary.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 2**24:
            raise damaged(path, f"gives {token!r} the id {token_id!r}")
    return dict(vocabulary)


def _content(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


# ---------------------------------------------------------------------- tokenizer.model


def _sentence_piece(path: Path, config: Mapping[str, Any]) -> str:
    """From SentencePiece's ModelProto: pieces (1), trainer_spec (2), normalizer_spec (3)."""
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for number, value in _fields(path.read_bytes()):
            if number == 1:
                piece = dict(_fields(value))
                tokens.append(piece[1].decode())
                scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
                types.append(int(piece.get(3, NORMAL)))
            elif number in (2, 3):
                (trainer if number == 2 else normalizer).update(_fields(value))
    except (OSError, IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise damaged(path, f"is no SentencePiece model ({error})") from error
    if trainer.get(3, 1) != _BPE or normalizer.get(2) or normalizer.get(4, 1):
        raise ModelError(
            f"{path}: only SentencePiece models of kind BPE that leave text as it is can be read: {_WHAT_TO_DO}"
        )
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
        "tokenizer.ggml.unknown_token_id": int(trainer.get(40, 0)),
        "tokenizer.ggml.bos_token_id": int(trainer.get(41, 1)),
        "tokenizer.ggml.eos_token_id": int(trainer.get(42, 2)),
    }
    return _made(path.parent, config, metadata, tokens, types, scores=scores)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: whole numbers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None:
            length, at = _varint(data, at)
        if kind not in (1, 2, 5) or at + length > len(data):
            raise ValueError(f"a field of {length} bytes at byte {at}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128 or shift > 63:
            return value, at


# ---------------------------------------------------------------------- vocab.txt


def wordpiece_json(vocab_txt: str, config: Mapping[str, Any]) -> str:
    """tokenizer.json of a BERT model that has only vocab.txt: WordPiece with the options of tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    # tokens may have other ends of lines than "\n", such as U+2028
    tokens = vocab_txt.removesuffix("\n").split("\n")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown, first, last = (_special_token(config, name) for name in ("unk", "cls", "sep"))
    for token in (unknown, first, last):
        if token not in vocabulary:
            raise WeightsError(f"vocab.txt has no {token}: give a tokenizer.json with --tokenizer")
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(config.get("do_lower_case", True)),
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing((last, vocabulary[last]), (first, vocabulary[first]))
    tokenizer.decoder = decoders.WordPiece()
    special = (unknown, first, last, _special_token(config, "pad"), _special_token(config, "mask"))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in special if token in vocabulary]
    )
    return tokenizer.to_str()


def _special_token(config: Mapping[str, Any], name: str) -> str:
    content = _content(config.get(f"{name}_token"))
    return f"[{name.upper()}]" if content is None else content

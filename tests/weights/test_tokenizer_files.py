"""Folders without tokenizer.json: the older files give the ids that transformers gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Inner

from quire.core.errors import ModelError, WeightsError
from quire.text.tokenizer import Tokenizer
from quire.weights.tokenizer_files import folder_tokenizer
from tests.text.conftest import byte_level_text, sentence_piece_text

TEXTS = (
    *(
        "the quick brown fox",
        " leading and  double spaces ",
        "Hello there!\n\nHow are you's 1234567 today?",
        "",
    ),
    *(
        "größer als früher: naïve façade",
        "日本語のテキスト 😀",
        "tabs\tand\r\nlines",
        "<|endoftext|>after",
        "</s> x",
    ),
)


def loaded(folder: Path) -> Tokenizer:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    text = folder_tokenizer(folder, config)
    assert text is not None
    return Tokenizer(text, config)


def write_vocabulary(folder: Path, config: dict[str, Any], **model: Any) -> dict[str, int]:
    document = json.loads(byte_level_text())["model"]
    vocabulary = {**document["vocab"], "<|endoftext|>": len(document["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [" ".join(pair) for pair in document["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(model))
    return vocabulary


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_vocabulary_and_merges_give_the_ids_of_transformers(tmp_path: Path, name: str) -> None:
    config = {"tokenizer_class": name, "eos_token": "<|endoftext|>", "model_max_length": 1 << 20}
    vocabulary = write_vocabulary(tmp_path, config)
    end = {"content": "<|im_end|>", "special": True}
    config["added_tokens_decoder"] = {str(len(vocabulary)): end}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = loaded(tmp_path)
    kind = getattr(transformers, name.removesuffix("Fast"))
    theirs = kind.from_pretrained(str(tmp_path))
    for text in (*TEXTS, "a<|im_end|>b"):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text), False) == text
    assert ours.eos_token_id == vocabulary["<|endoftext|>"]
    assert ours.special_ids >= {vocabulary["<|endoftext|>"], len(vocabulary)}


def test_the_kind_comes_from_config_json_where_the_tokenizer_does_not_say(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, {}, model_type="opt")
    assert loaded(tmp_path).decode(loaded(tmp_path).encode("the dog")) == "the dog"
    write_vocabulary(tmp_path, {}, model_type="unheard")
    with pytest.raises(ModelError, match=r"how a unheard cuts text into words: save its tokenizer\.json"):
        loaded(tmp_path)


def proto(path: Path, kind: int = 2, charsmap: bytes = b"") -> tuple[dict[str, int], list[Any]]:
    """tokenizer.model of the small tokenizer, written by the library that defines the format."""
    from transformers.utils import sentencepiece_model_pb2_new as pb2

    vocabulary = Inner.from_str(sentence_piece_text()).get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    model = pb2.ModelProto()
    for token_id, piece in enumerate(pieces):
        is_byte = piece.startswith("<0x")
        which = {"<unk>": 2, "<s>": 3, "</s>": 3}.get(piece, 6 if is_byte else 1)
        model.pieces.add(piece=piece, score=0.0 if which != 1 else -float(token_id), type=which)
    model.trainer_spec.model_type = kind
    model.trainer_spec.unk_id, model.trainer_spec.bos_id = vocabulary["<unk>"], vocabulary["<s>"]
    model.trainer_spec.eos_id, model.trainer_spec.pad_id = vocabulary["</s>"], -1
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.precompiled_charsmap = charsmap
    path.write_bytes(model.SerializeToString())
    return vocabulary, pieces


def test_a_sentence_piece_model_gives_the_ids_of_transformers(tmp_path: Path) -> None:
    from transformers.tokenization_utils_base import generate_merges

    vocabulary, _ = proto(tmp_path / "tokenizer.model")
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    config = {
        **special,
        "added_tokens_decoder": {str(len(vocabulary)): {"content": "<pad>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = loaded(tmp_path)
    theirs = transformers.LlamaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary), **special)
    start = vocabulary["<s>"]
    for text in TEXTS[:-2]:
        # SentencePiece puts its space before any text, transformers 5 not before one that begins with a space
        expected = theirs.encode(text.lstrip(" "), add_special_tokens=False)
        assert ours.encode(text.lstrip(" "), add_special_tokens=False) == expected, text
        assert ours.encode(text.lstrip(" ")) == [start, *expected]
        assert ours.decode(ours.encode(text)) == text
    assert ours.token_id("<pad>") == len(vocabulary)


@pytest.mark.parametrize("kind", [{"kind": 1}, {"charsmap": b"x"}])
def test_other_kinds_of_sentence_piece_are_refused_with_what_to_do(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    proto(tmp_path / "tokenizer.model", **kind)
    with pytest.raises(ModelError, match=r"only SentencePiece models of kind BPE.*--tokenizer"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "data", [b"\x00", b"\x0a\xff\xff\xff\xff\x7f", b"\xff" * 40, b"\x0a\x02\x10\x05", b"hello"]
)
def test_a_damaged_model_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises((WeightsError, ModelError), match=r"tokenizer\.model"):
        loaded(tmp_path)


@pytest.mark.parametrize("token_id", [-1, 10**30, "1", 1.5, None])
def test_an_id_that_is_none_is_refused(tmp_path: Path, token_id: Any) -> None:
    write_vocabulary(tmp_path, {}, model_type="gpt2")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": token_id}))
    with pytest.raises(WeightsError, match=r"vocab\.json gives 'a' the id"):
        loaded(tmp_path)


def test_a_folder_whose_only_tokenizer_is_unknown_is_refused_and_one_without_any_is_not(
    tmp_path: Path,
) -> None:
    assert folder_tokenizer(tmp_path, {}) is None
    (tmp_path / "spiece.model").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"spiece\.model is the only file of a tokenizer.*save_pretrained"):
        folder_tokenizer(tmp_path, {})

"""Two small tokenizers, trained in a moment: one byte-level, one in SentencePiece's manner."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from quire.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind at all",
    "Hello there! How are you today? I am fine, thank you. \n\nStop here. END of text",
    "größer als früher: naïve façade, 日本語のテキスト, emoji 😀 👍🏽 and 1234567890",
] * 3
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
SPECIAL = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]


def byte_level_text() -> str:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens([AddedToken("<tool>", special=False, normalized=False), "é x"])
    inner.enable_truncation(4)
    inner.enable_padding(length=4)
    return inner.to_str()


def sentence_piece_text() -> str:
    inner = Inner(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *SPECIAL, *pieces], show_progress=False
    )
    plain = [line.encode("ascii", "ignore").decode() for line in CORPUS]  # so that the rest needs byte tokens
    inner.train_from_iterator(plain, trainer)
    document = json.loads(inner.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in pieces]
    return json.dumps(document)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_text(), CONFIG)


@pytest.fixture(scope="session")
def sentence_piece() -> Tokenizer:
    return Tokenizer(sentence_piece_text(), CONFIG)


@pytest.fixture(scope="session", params=["byte_level", "sentence_piece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)

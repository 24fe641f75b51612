"""Prompts with a gap, for the families of models that fill it."""

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from quire.text.infill import Infill
from quire.text.tokenizer import Tokenizer

FAMILIES = {
    "qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|endoftext|>"),
}


def byte_level(*special: str) -> Tokenizer:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE({character: index for index, character in enumerate(characters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Tokenizer(inner.to_str())


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_suffix_and_middle_have_their_tokens(family: str):
    tokenizer = byte_level(*FAMILIES[family])
    infill = Infill.of(tokenizer)
    assert infill is not None
    token_ids = infill.token_ids("def f(", "return", tokenizer)
    before, after, middle, end = FAMILIES[family]
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == f"{before}def f({after}return{middle}"
    assert tokenizer.token_id(end) in infill.end_ids


def test_a_suffix_of_sentencepiece_gets_no_space():
    """CodeLlama: its tokenizer puts a space before every text."""
    special = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    pieces = ["<unk>", "▁", "a", "b", "☺", "▁a", "▁b", "▁☺"]
    inner = Inner(models.Unigram([(piece, -1.0) for piece in [*pieces, *special]], 0))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    tokenizer = Tokenizer(inner.to_str())
    infill = Infill.of(tokenizer)
    assert infill is not None
    spelled = [tokenizer.token(token_id) for token_id in infill.token_ids("a", "b", tokenizer)]
    assert spelled == ["▁<PRE>", "▁a", "▁<SUF>", "b", "▁<MID>"]


def test_a_model_without_all_of_the_tokens_has_none():
    assert Infill.of(byte_level()) is None
    assert Infill.of(byte_level("<fim_prefix>", "<fim_suffix>")) is None

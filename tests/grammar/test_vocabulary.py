"""Grammars over other people's tokenizers: SentencePiece's, word pieces, more logits than tokens, no end token."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from quire.core.structured import StructuredOutput
from quire.grammar.compiler import Compiler
from quire.grammar.vocabulary import LibraryVocabulary, Vocabulary
from quire.text.tokenizer import Tokenizer
from tests.grammar.conftest import allowed, is_complete

LETTERS = [chr(one) for one in range(33, 127)]


def sentence_piece() -> Tokenizer:
    """As Llama 2's: a space is ▁, unknown bytes have tokens of their own, and any text begins with a ▁."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *LETTERS,
        "ye",
        "▁ye",
        "▁yes",
        "yes",
    ]
    merges = [("y", "e"), ("▁", "ye"), ("ye", "s"), ("▁ye", "s")]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True
    )
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(made.to_str(), {"eos_token": "</s>"})


def unigram() -> Tokenizer:
    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("▁", -3.0),
        ("yes", -1.0),
        ("▁yes", -1.0),
        *((one, -5.0) for one in LETTERS),
    ]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["</s>"])
    return Tokenizer(made.to_str(), {"eos_token": "</s>"})


@pytest.mark.parametrize("make", [sentence_piece, unigram])
@pytest.mark.parametrize("extra", [0, 45], ids=["", "more logits than tokens"])
def test_texts_are_the_same_over_any_tokenizer(make, extra):
    tokenizer = make()
    size = tokenizer.vocab_size + extra
    end = tokenizer.eos_token_id
    vocabulary = Vocabulary(
        tokens=[tokenizer.token_bytes(one) for one in range(size)],
        special_ids=tokenizer.special_ids,
        end_ids=(end,),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
    compiler = Compiler(lambda: vocabulary)
    rng = np.random.default_rng(0)
    try:
        form = StructuredOutput.json(
            {"type": "array", "items": {"enum": ["yes", "no no", 7]}, "minItems": 1, "maxItems": 3}
        )
        grammar = compiler.submit(form).result(30)
        for _ in range(10):
            matcher, text = grammar.matcher(), b""
            while not matcher.is_terminated:
                ids = allowed(matcher, vocabulary)
                assert end not in ids
                chosen = int(rng.choice(ids))
                text += vocabulary.tokens[chosen]
                matcher.advance([chosen])
            assert allowed(matcher, vocabulary).tolist() == [end]
            assert set(json.loads(text)) <= {"yes", "no no", 7}
    finally:
        compiler.close()


def test_a_model_without_an_end_token_ends_by_its_grammar():
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)], frozenset(), ())
    compiler = Compiler(lambda: vocabulary)
    try:
        matcher = compiler.submit(StructuredOutput.regex("ab?")).result(30).matcher()
        matcher.advance([ord("a")])
        assert is_complete(matcher)
        assert allowed(matcher, vocabulary).tolist() == [ord("b")]
        matcher.advance([ord("b")])
        assert matcher.is_terminated
        assert allowed(matcher, vocabulary).tolist() == []
    finally:
        compiler.close()


def test_forced_text_is_split_as_the_model_is_used_to_unless_that_spells_another_text():
    tokenizer = sentence_piece()
    tokens = [tokenizer.token_bytes(one) for one in range(tokenizer.vocab_size)]
    wrapped = LibraryVocabulary(
        Vocabulary(
            tokens, tokenizer.special_ids, (2,), lambda text: tokenizer.encode(text, add_special_tokens=False)
        )
    )
    for text in ("yes", " yes", "</s>", "naïve"):
        ids = wrapped(text)
        assert b"".join(tokens[one] for one in ids) == text.encode()
        assert not tokenizer.special_ids.intersection(ids)

"""The tokenizer built from GGUF metadata agrees with the one that the metadata was made from."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from quire.core.errors import ModelError
from quire.weights.builtin import BUILTIN
from quire.weights.gguf import GgufSource
from quire.weights.gguf_file import GgufFile
from quire.weights.gguf_tokenizer import tokenizer_text
from tests.weights.gguf_writing import bare_llama, roberta_tokenizer, tokenizer_metadata, xlmr_tokenizer

CORPUS = [
    "it's 12345 o'clock, and THEY'RE here!\r\n\n  Voilà — größer 日本語 \t tab  ",
    "a quick brown fox 99",
    "abba baab abab aabb bbaa babb aaab abbb baba aaaa bbbb abaa bbab",
] * 4
LETTER = st.one_of(
    st.sampled_from("ab c'stTre0123 \n\t\r.,!日ßé<|>Å\u0301"), st.characters(exclude_categories=["Cs"])
)
# Loose letters try the splitting of words; pieces of the corpus and words of two letters try the merges.
PIECE = st.builds(
    lambda line, at, size: line[at : at + size], st.sampled_from(CORPUS), *[st.integers(0, 30)] * 2
)
TEXT = st.lists(st.one_of(st.text(LETTER, max_size=12), PIECE, st.text("ab ")), max_size=6).map("".join)
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+@|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*@|"
SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# As the tokenizer.json of these families has them.
SPLITS = {
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "tekken": CASED.replace("@", "") + r"\p{N}" + SLASHED,
    "gpt-4o": CASED.replace("@", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"\p{N}{1,3}" + SLASHED,
}
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(pre: str) -> Tokenizer:
    """A tokenizer as the family named by `pre` publishes it, trained on a few lines."""
    inner = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        inner.pre_tokenizer = plain
    elif pre == "smollm":
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif pre == "falcon":
        words = (
            pre_tokenizers.Punctuation("contiguous"),
            plain,
            pre_tokenizers.Digits(individual_digits=False),
        )
        three = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([*words, three])
    else:
        digits = r"\p{N}" if pre == "qwen2" else r"\p{N}{1,3}"
        pattern = SPLITS.get(pre, LETTERS + digits + REST)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    special = [AddedToken("<|end|>", special=True), AddedToken("<|im|>", special=True)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    if pre in ("llama-bpe", "tekken"):
        inner.post_processor = processors.TemplateProcessing(
            single="<|im|> $A", pair="<|im|> $A <|im|> $B", special_tokens=[("<|im|>", 1)]
        )
    return inner


def metadata(inner: Tokenizer, **more: Any) -> dict[str, Any]:
    document = json.loads(inner.to_str())
    tokens = sorted(document["model"]["vocab"], key=document["model"]["vocab"].get)
    special = {token["content"] for token in document["added_tokens"]}
    types = [3 if token in special else 6 if token.startswith("<0x") else 1 for token in tokens]
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in document["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


PAIRS: dict[str, tuple[Tokenizer, Tokenizer]] = {}


def pair(pre: str) -> tuple[Tokenizer, Tokenizer]:
    if pre not in PAIRS:
        theirs = byte_level(pre)
        PAIRS[pre] = theirs, Tokenizer.from_str(tokenizer_text(metadata(theirs, model="gpt2", pre=pre)))
    return PAIRS[pre]


@pytest.mark.parametrize(
    "pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "dbrx", "falcon", "bloom", "tekken", "gpt-4o"]
)
@given(text=TEXT)
def test_byte_level_tokenizers_agree(pre: str, text: str) -> None:
    theirs, ours = pair(pre)
    for with_special in (True, False):
        ids = theirs.encode(text, add_special_tokens=with_special).ids
        assert ours.encode(text, add_special_tokens=with_special).ids == ids
    assert ours.decode(ids) == theirs.decode(ids)
    marked = f"<|im|>{text}<|end|>"
    assert ours.encode(marked).ids == theirs.encode(marked).ids


@pytest.mark.parametrize(("pre", "said"), [("default", "gpt-2"), ("llama3", "llama-bpe")])
def test_spellings_of_one_family_are_one(pre: str, said: str) -> None:
    facts = metadata(byte_level(said), model="gpt2")
    one, other = (tokenizer_text(facts | {"tokenizer.ggml.pre": name}) for name in (pre, said))
    assert one == other


@pytest.fixture(scope="module")
def pieces() -> tuple[Tokenizer, Tokenizer]:
    """In SentencePiece's manner, with scores that fall with each merge learnt."""
    theirs = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    theirs.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    theirs.train_from_iterator([word for line in CORPUS for word in line.split(" ")], trainer)
    theirs.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    document = json.loads(theirs.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    theirs = Tokenizer.from_str(json.dumps(document))
    facts = metadata(theirs, model="llama", unknown_token_id=0)
    facts["tokenizer.ggml.scores"] = -np.arange(len(facts["tokenizer.ggml.tokens"]), dtype=np.float32)
    facts.pop("tokenizer.ggml.merges")
    return theirs, Tokenizer.from_str(tokenizer_text(facts))


@given(text=TEXT)
def test_sentence_piece_tokenizers_agree(pieces: tuple[Tokenizer, Tokenizer], text: str) -> None:
    theirs, ours = pieces
    ids = theirs.encode(text).ids
    assert ours.encode(text).ids == ids
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.fixture(scope="module")
def unigrams() -> tuple[Tokenizer, Tokenizer]:
    """As T5's tokenizer.json has it; the table that folds characters is left out."""
    theirs = Tokenizer(models.Unigram())
    theirs.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    )
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    theirs.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    theirs.train_from_iterator(CORPUS, trainer)
    theirs.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    document = json.loads(theirs.to_str())
    # GGUF keeps float32, in which equal cuts may differ in the last bit
    vocabulary = [[token, float(np.float32(score))] for token, score in document["model"]["vocab"]]
    document["model"]["vocab"] = vocabulary
    theirs = Tokenizer.from_str(json.dumps(document))
    facts = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.scores": np.array([score for _, score in vocabulary], np.float32),
        "tokenizer.ggml.token_type": np.array([3, 3, 2, *[1] * (len(vocabulary) - 3)], np.int32),
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.add_eos_token": True,
    }
    return theirs, Tokenizer.from_str(tokenizer_text(facts))


@given(text=TEXT)
def test_unigram_tokenizers_agree(unigrams: tuple[Tokenizer, Tokenizer], text: str) -> None:
    theirs, ours = unigrams
    ids = theirs.encode(text).ids
    assert ours.encode(text).ids == ids
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.fixture(scope="module", params=[roberta_tokenizer, xlmr_tokenizer])
def of_encoders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Tokenizer]:
    theirs = request.param(CORPUS)
    facts = tokenizer_metadata(theirs, tmp_path_factory.mktemp("tokenizer"))
    return theirs.backend_tokenizer, Tokenizer.from_str(tokenizer_text(facts))


@given(text=TEXT)
def test_tokenizers_of_encoders_agree(of_encoders: tuple[Tokenizer, Tokenizer], text: str) -> None:
    theirs, ours = of_encoders
    for texts in ((text,), (text, "a  fox\n ßÅ"), ("abba", text)):
        expected, found = theirs.encode(*texts), ours.encode(*texts)
        assert found.ids == expected.ids
        assert found.type_ids == expected.type_ids
    assert ours.decode(expected.ids) == theirs.decode(expected.ids)


def test_a_tokenizer_of_modernbert_agrees() -> None:
    theirs = byte_level("gpt-2")
    theirs.normalizer = normalizers.NFC()
    around = {"single": "<|im|> $A <|end|>", "pair": "<|im|> $A <|end|> $B:1 <|end|>:1"}
    theirs.post_processor = processors.TemplateProcessing(
        **around, special_tokens=[("<|im|>", 1), ("<|end|>", 0)]
    )
    facts = metadata(theirs, model="gpt2", pre="modern-bert", cls_token_id=1, seperator_token_id=0)
    ours = Tokenizer.from_str(tokenizer_text(facts | {"general.architecture": "modern-bert"}))
    for texts in ((CORPUS[0],), (CORPUS[1], "A\u0301 \u00c5 12")):
        expected, found = theirs.encode(*texts), ours.encode(*texts)
        assert (found.ids, found.type_ids) == (expected.ids, expected.type_ids)


def test_a_table_that_folds_characters_is_read(tmp_path: Path) -> None:
    facts = tokenizer_metadata(xlmr_tokenizer(CORPUS), tmp_path)
    normalizer = Tokenizer.from_str(tokenizer_text(facts)).normalizer
    assert normalizer.normalize_str("gr\tß Å") == "gr ss a"


def test_tokens_that_users_added_are_not_special() -> None:
    facts = metadata(byte_level("gpt-2"), model="gpt2")
    facts["tokenizer.ggml.token_type"][300] = 4
    found = json.loads(tokenizer_text(facts))["added_tokens"]
    assert [(token["id"], token["special"]) for token in found] == [(0, True), (1, True), (300, False)]


def test_start_and_end_tokens_are_added_where_the_file_asks() -> None:
    facts = metadata(byte_level("gpt-2"), model="gpt2", add_bos_token=True, add_eos_token=True)
    ids = Tokenizer.from_str(tokenizer_text(facts)).encode("a").ids
    assert (ids[0], ids[-1]) == (1, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer 'rwkv' cannot be built here"),
        ({"tokenizer.ggml.pre": "viking"}, "pre-tokenizer 'viking' is not known here"),
        ({"tokenizer.ggml.model": "llama"}, "no score per token"),
    ],
)
def test_what_cannot_be_built_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        tokenizer_text(metadata(byte_level("gpt-2"), model="gpt2") | change)


def test_a_built_tokenizer_is_kept(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {
        key: list(value) if key.endswith("type") else value
        for key, value in metadata(byte_level("gpt-2")).items()
    }
    facts["tokenizer.ggml.token_type"] = [int(kind) for kind in facts["tokenizer.ggml.token_type"]]
    path = bare_llama(tmp_path / "m.gguf", extra={**facts, "tokenizer.ggml.model": "gpt2"})
    text = GgufSource(path).tokenizer_json()
    assert text is not None
    monkeypatch.setattr("quire.weights.gguf.tokenizer_text", lambda _: pytest.fail("built again"))
    assert GgufSource(path).tokenizer_json() == text


@pytest.fixture(scope="module")
def built_in(shared: Path) -> tuple[Tokenizer, Tokenizer]:
    if not BUILTIN.path.exists():
        pytest.skip(f"the built-in model is not in the cache ({BUILTIN.path}): run make setup")
    text = tokenizer_text(GgufFile(BUILTIN.path).metadata)  # built here, not taken from the cache
    return Tokenizer.from_file(str(shared / "data/smollm2_tokenizer/tokenizer.json")), Tokenizer.from_str(
        text
    )


@given(text=TEXT)
@settings(max_examples=500)
def test_the_built_in_tokenizer_agrees_with_the_published_one(
    built_in: tuple[Tokenizer, Tokenizer], text: str
) -> None:
    theirs, ours = built_in
    ids = theirs.encode(text).ids
    assert ours.encode(text).ids == ids
    assert ours.decode(ids) == theirs.decode(ids)


def test_the_built_in_tokenizer_agrees_on_real_texts(
    built_in: tuple[Tokenizer, Tokenizer], shared: Path
) -> None:
    theirs, ours = built_in
    lines = (shared / "data/mtbench/question.jsonl").read_text().splitlines()
    texts = [turn for line in lines for turn in json.loads(line)["turns"]]
    articles = json.loads((shared / "data/xquad/xquad.en.json").read_text())["data"]
    texts += [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]
    texts += [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts[:50]]
    assert len(texts) > 400
    for text in texts:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)

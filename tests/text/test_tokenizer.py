import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from quire.core.errors import ContextExceeded, InvalidRequest, ModelError
from quire.text.load import load_tokenizer
from quire.text.prompts import prepare
from quire.text.tokenizer import Tokenizer
from quire.weights.source import open_source

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def test_nothing_is_cut_or_padded_although_the_file_asks_for_it(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("the quick brown fox")) == "the quick brown fox"
    assert len(byte_level.encode("the")) < 4


def test_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_token_id == tokenizer.token_id("<s>")
    assert tokenizer.eos_token_id == tokenizer.token_id("</s>")
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} <= tokenizer.special_ids
    ids = tokenizer.encode("Hello</s>")
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "Hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Hello</s>"
    assert tokenizer.vocab_size > max(tokenizer.special_ids)


def test_the_kind_of_vocabulary_is_seen(byte_level: Tokenizer, sentence_piece: Tokenizer) -> None:
    assert byte_level.is_byte_level
    assert not sentence_piece.is_byte_level


@given(TEXT)
def test_bytes_of_tokens_are_the_bytes_of_the_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)).decode() == byte_level.decode(ids, False)


@given(TEXT)
def test_bytes_of_pieces_are_the_bytes_of_the_text_behind_its_space(
    sentence_piece: Tokenizer, text: str
) -> None:
    ids = sentence_piece.encode(text)
    spelled = b"".join(map(sentence_piece.token_bytes, ids)).decode("utf-8", "replace")
    assert spelled.removeprefix(" ") == sentence_piece.decode(ids, False)


def test_ids_beyond_the_vocabulary_are_nothing(tokenizer: Tokenizer) -> None:
    beyond = tokenizer.vocab_size + 7
    assert tokenizer.token_bytes(beyond) == b""
    assert tokenizer.token(beyond) is None
    assert tokenizer.decode([beyond]) == ""


def test_half_a_character_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate\\) at position 3"):
        tokenizer.encode("abc\ud800")
    with pytest.raises(InvalidRequest, match="must be text, not int"):
        tokenizer.encode(5)  # type: ignore[arg-type]


def test_a_broken_file_is_refused() -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer("{}")


def test_bad_words_are_found_with_and_without_a_space(byte_level: Tokenizer) -> None:
    found = byte_level.bad_words(["dog", " dog"])
    assert [byte_level.decode(ids) for ids in found] == ["dog", " dog"]
    with pytest.raises(InvalidRequest, match="bad_words holds ' '"):
        byte_level.bad_words([" "])


class Source:
    def __init__(self, text: str | None) -> None:
        self.text = text

    def tokenizer_json(self) -> str | None:
        return self.text

    def tokenizer_config(self) -> dict:
        return {"eos_token": "</s>"}


def test_a_source_without_a_tokenizer_gives_none() -> None:
    assert load_tokenizer(Source(None)) is None  # type: ignore[arg-type]


# ---------------------------------------------------------------------- how long a text may be


def _built(**parts) -> Tokenizer:
    """A byte-level vocabulary with some long pieces behind other steps."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    merges = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    vocabulary |= {first + second: len(vocabulary) + at for at, (first, second) in enumerate(merges)}
    inner = Inner(models.BPE(vocabulary, merges))
    inner.normalizer = parts.get("normalizer")
    inner.pre_tokenizer = parts.get(
        "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens(parts.get("added", []))
    return Tokenizer(inner.to_str())


_WORDS = Inner(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
_WORDS.pre_tokenizer = pre_tokenizers.Whitespace()
LENGTHS = {
    "plain": _built(),
    "composed": _built(normalizer=normalizers.NFC()),
    "stripped": _built(normalizer=normalizers.Strip()),
    "collapsed": _built(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "shorter": _built(normalizer=normalizers.Replace("aaaa", "b")),
    "dropped": _built(normalizer=normalizers.StripAccents()),
    "without spaces": _built(pre_tokenizer=pre_tokenizers.Whitespace()),
    "greedy token": _built(added=[AddedToken("<t>", lstrip=True, rstrip=True)]),
    "words": Tokenizer(_WORDS.to_str()),
}
PIECES = st.sampled_from(
    ["a", "aaaa", " ", "        ", "\n", "\u3000", "<t>", "e\u0301", "\u1112\u1161\u11ab", "日", "\x04", "x"]
)


@pytest.mark.parametrize("name", LENGTHS)
@given(pieces=st.lists(st.tuples(PIECES, st.integers(1, 60)), max_size=6), enough=st.integers(1, 9))
def test_a_text_is_never_said_to_have_more_tokens_than_it_has(
    name: str, pieces: list[tuple[str, int]], enough: int
) -> None:
    text = "".join(piece * count for piece, count in pieces)
    assert LENGTHS[name].fewest_tokens(text, enough) <= len(
        LENGTHS[name].encode(text, add_special_tokens=False)
    )


@given(text=st.text())
def test_no_tokenizer_of_these_tests_has_fewer_tokens_than_said(
    byte_level, sentence_piece, text: str
) -> None:
    for one in (byte_level, sentence_piece):
        assert one.fewest_tokens(text * 9, 100) <= len(one.encode(text * 9, add_special_tokens=False))


def test_a_long_text_is_known_to_be_long_at_once() -> None:
    tokenizer = load_tokenizer(open_source(None))
    assert tokenizer is not None
    begun = time.process_time()
    assert tokenizer.fewest_tokens("word " * 3_000_000, 8192) >= 8192
    with pytest.raises(ContextExceeded, match="at least"):
        prepare("word " * 3_000_000, tokenizer, max_model_len=8192)
    assert time.process_time() - begun < 1  # tokenizing it takes many
    assert tokenizer.fewest_tokens("\x04" * 2_000_000 + "word " * 200_000, 8192) >= 8192
    assert LENGTHS["words"].fewest_tokens("word " * 3_000_000, 300) == 300
    assert tokenizer.fewest_tokens("\x04" * 1000, 8192) == 0  # the vocabulary does not have it

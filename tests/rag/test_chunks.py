"""Chunks and windows: their sizes, their overlap, and that nothing of a text is lost."""

import itertools

import pytest
import tokenizers

from quire.rag.chunks import check_chunking, chunk_text, windows
from quire.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Words of two letters are tokens, longer ones have pieces of one letter."""
    letters = "abcdefghijklmnopqrstuvwxyz.0123456789"
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), "ab", "cd"]
    model = tokenizers.models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return Tokenizer(inner.to_str())


def test_chunks_have_their_size_and_overlap(tokenizer: Tokenizer) -> None:
    text = " ".join(["ab"] * 2000)
    chunks = chunk_text(text, tokenizer)
    assert [len(chunk.text.split()) for chunk in chunks] == [800, 800, 800, 800]
    assert [chunk.start // 3 for chunk in chunks] == [0, 400, 800, 1200]
    assert all(chunk.text == text[chunk.start : chunk.end] for chunk in chunks)
    assert chunks[-1].end == len(text)


@pytest.mark.parametrize("overlap", [0, 50])
def test_every_word_is_in_a_chunk_and_no_word_is_cut(tokenizer: Tokenizer, overlap: int) -> None:
    words = [f"{'x' * (n % 7 + 1)}{n}" for n in range(700)]
    text = "\n".join(words)
    chunks = chunk_text(text, tokenizer, 100, overlap)
    assert {word for chunk in chunks for word in chunk.text.split()} == set(words)
    assert all(len(tokenizer.offsets(chunk.text)) <= 100 for chunk in chunks)
    assert all(later.start <= former.end + 1 for former, later in itertools.pairwise(chunks))


def test_short_and_empty_texts(tokenizer: Tokenizer) -> None:
    assert [chunk.text for chunk in chunk_text("  ab cd ", tokenizer)] == ["ab cd"]
    assert chunk_text(" \n ", tokenizer) == []
    assert windows("ab cd", tokenizer) == ["ab cd"]
    assert windows("", tokenizer) == []


def test_windows_cover_a_chunk_and_fit_the_encoder(tokenizer: Tokenizer) -> None:
    words = [f"w{n}" for n in range(400)]
    made = windows(" ".join(words), tokenizer, 254)
    sizes = [len(tokenizer.offsets(window)) for window in made]
    assert max(sizes) <= 254
    assert min(sizes) > 100  # of about equal size
    assert {word for window in made for word in window.split()} == set(words)


def test_a_long_unknown_word_counts_as_several_tokens(tokenizer: Tokenizer) -> None:
    text = "ü" * 50_000  # one token, however long
    chunks = chunk_text(text, tokenizer, 100, 0)
    assert "".join(chunk.text for chunk in chunks) == text
    assert max(len(chunk.text) for chunk in chunks) <= 3200


def test_long_texts_are_encoded_in_pieces(tokenizer: Tokenizer) -> None:
    text = "ab cd " * 40_000
    chunks = chunk_text(text, tokenizer, 4096, 0)
    assert sum(len(chunk.text.split()) for chunk in chunks) == 80_000


@pytest.mark.parametrize(
    ("max_tokens", "overlap", "words"),
    [
        (99, 0, "max_chunk_size_tokens is 99: give 100 to 4096"),
        (4097, 0, "max_chunk_size_tokens is 4097"),
        (800, 401, "chunk_overlap_tokens is 401: give 0 to 400"),
        (800, -1, "chunk_overlap_tokens is -1"),
    ],
)
def test_sizes_outside_the_limits_are_refused(max_tokens: int, overlap: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_chunking(max_tokens, overlap)
    check_chunking(100, 50)
    check_chunking(4096, 2048)

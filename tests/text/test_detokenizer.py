import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.answer import Detokenizer, StopStrings
from quire.text.tokenizer import Tokenizer

TEXT = st.text(
    st.one_of(st.sampled_from("abEND. \n日😀é"), st.characters(exclude_categories=["Cs"])), max_size=40
)
STOPS = st.lists(st.text("abEND. \n日😀é", min_size=1, max_size=6), max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Start, end and name of the stop string that ends first; of several, the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return None
    end, negative, stop = min(ends)
    return end + negative, end, stop


def cut(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """The same ids in random pieces."""
    pieces, at = [], 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        pieces.append(ids[at : at + size])
        at += size
    return pieces


def streamed(detokenizer: Detokenizer, pieces: list[list[int]]) -> str:
    return "".join([*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()])


@given(data=st.data(), text=TEXT, stops=STOPS, include=st.booleans())
def test_pieces_join_to_the_whole_text_cut_at_the_stop(
    tokenizer: Tokenizer, data: st.DataObject, text: str, stops: list[str], include: bool
) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, True, tuple(stops), include)
    shown = streamed(detokenizer, cut(data, ids))
    whole = tokenizer.decode(ids)
    found = first_stop(whole, stops)
    if found is None:
        assert shown == whole
        assert not detokenizer.stopped
        assert detokenizer.num_tokens == len(ids)
    else:
        start, end, stop = found
        assert shown == whole[: end if include else start]
        assert detokenizer.stop_reason == stop


@given(data=st.data(), skip=st.booleans())
def test_any_tokens_at_all_give_what_decoding_them_gives(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    assert streamed(Detokenizer(tokenizer, skip), cut(data, ids)) == tokenizer.decode(ids, skip)


@given(data=st.data())
def test_byte_tokens_between_pieces_give_what_decoding_them_gives(
    sentence_piece: Tokenizer, data: st.DataObject
) -> None:
    some = st.sampled_from([sentence_piece.token_id(f"<0x{byte:02X}>") for byte in "é日😀a".encode()])
    ids = data.draw(st.lists(st.one_of(some, st.integers(0, sentence_piece.vocab_size)), max_size=30))
    assert streamed(Detokenizer(sentence_piece), cut(data, ids)) == sentence_piece.decode(ids)


@given(data=st.data(), prompt=TEXT, text=TEXT)
def test_an_answer_behind_a_prompt_is_what_follows_it_in_the_whole_text(
    tokenizer: Tokenizer, data: st.DataObject, prompt: str, text: str
) -> None:
    """SentencePiece's first piece keeps its space there; only the start of the whole text loses it."""
    before, answer = tokenizer.encode(f"{prompt}.", False), tokenizer.encode(text, False)
    detokenizer = Detokenizer(tokenizer, context_id=tokenizer.context_id(before))
    shown = streamed(detokenizer, cut(data, answer))
    assert tokenizer.decode(before) + shown == tokenizer.decode([*before, *answer])


def test_a_stop_string_that_begins_with_a_space_is_found_at_the_first_token(
    sentence_piece: Tokenizer,
) -> None:
    (dog,) = sentence_piece.encode("dog", False)
    before = sentence_piece.encode("the quick", False)
    detokenizer = Detokenizer(sentence_piece, stop=(" dog",), context_id=sentence_piece.context_id(before))
    assert detokenizer.push([dog]) == ""
    assert detokenizer.stop_reason == " dog"
    assert sentence_piece.token_text(dog) == " dog"


def test_a_character_is_never_split(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("🤔 and 𒀀")
    assert len(ids) > 7
    shown = [detokenizer.push([token_id]) for token_id in ids]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) + detokenizer.flush() == "🤔 and 𒀀"


def test_broken_bytes_show_as_replacement_at_the_end(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    half = byte_level.encode("🤔")[:-1]
    assert detokenizer.push(half) == ""
    assert detokenizer.flush() == byte_level.decode(half) == "\ufffd"


def test_a_stop_string_across_tokens_is_held_back_and_cut(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("Hello, END of the")
    detokenizer = Detokenizer(byte_level, stop=("END of",))
    shown = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(shown) == "Hello, "
    assert detokenizer.stopped
    assert detokenizer.stop_reason == "END of"
    assert byte_level.decode(ids[: detokenizer.num_tokens]).endswith("END of")
    assert detokenizer.flush() == ""


def test_text_that_only_began_like_a_stop_string_comes_later(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, stop=("dog!",))
    assert detokenizer.push(byte_level.encode("the dog")) == "the "
    assert detokenizer.push(byte_level.encode(" ran")) == "dog ran"
    assert detokenizer.push(byte_level.encode(" do")) == " "
    assert detokenizer.flush() == "do"


def test_the_first_tokens_are_not_searched(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("aEND") + byte_level.encode("bEND")
    detokenizer = Detokenizer(byte_level, stop=("END",), min_tokens=len(byte_level.encode("aEND")))
    assert streamed(detokenizer, [ids]) == "aENDb"


def test_a_long_run_of_byte_tokens_still_streams(sentence_piece: Tokenizer) -> None:
    text = "日本" * 40 + " end"
    detokenizer = Detokenizer(sentence_piece)
    ids = sentence_piece.encode(text)
    shown = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(shown) + detokenizer.flush() == text
    assert max(map(len, shown)) < 30


@given(
    text=st.text("ab", max_size=60),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
@settings(max_examples=300)
def test_stop_strings_that_overlap_are_found_letter_by_letter(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops)
    shown = "".join([*(watcher.feed(letter) for letter in text), watcher.flush()])
    found = first_stop(text, stops)
    assert shown == (text if found is None else text[: found[0]])
    assert watcher.matched == (None if found is None else found[2])


@pytest.mark.parametrize("stops", [(), ("\n\nStop", "END of text")])
def test_the_cost_of_a_token_does_not_grow_with_the_text(
    tokenizer: Tokenizer, stops: tuple[str, ...]
) -> None:
    """By the processor's time, and the best of a few: other work on the machine is not ours."""
    ids = (tokenizer.encode("the quick brown fox does not mind 日本 at all. ") * 800)[:8000]

    def seconds(count: int) -> float:
        best = 1e9
        for _ in range(2 if count == len(ids) else 10):
            detokenizer = Detokenizer(tokenizer, stop=stops)
            start = time.thread_time()
            for token_id in ids[:count]:
                detokenizer.push([token_id])
            best = min(best, time.thread_time() - start)
        return best

    # sixteen times as many; a quadratic cost would be 256-fold
    assert seconds(16_000) < 8 * 16 * seconds(1000)


def test_special_tokens_that_must_be_seen_stay_where_they_are(tokenizer: Tokenizer) -> None:
    start, end = tokenizer.token_id("<s>"), tokenizer.token_id("</s>")
    assert start is not None
    assert end is not None
    ids = [start, *tokenizer.encode("the dog", False), start, *tokenizer.encode("größer", False), end]
    shown = streamed(Detokenizer(tokenizer, kept_ids=frozenset([start])), [[one] for one in ids])
    assert shown.replace("<s> ", "<s>") == "<s>the dog<s>größer"

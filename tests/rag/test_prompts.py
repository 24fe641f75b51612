"""The prompt of `quire ask`: it fits the context, and the best passage is next to the question."""

from quire.rag.library import CitedPassage
from quire.rag.prompts import INSTRUCTION, ask_prompt


def passage(text: str) -> CitedPassage:
    return CitedPassage("a.txt", text, 1.0, 0, len(text), 1, None, {})


def test_the_best_passage_is_next_to_the_question() -> None:
    messages, sources = ask_prompt("Why?", [passage("best\n one"), passage("second")], None, 1000)
    assert messages[0]["content"] == f"{INSTRUCTION}\n\nPassages:\n[2] second\n[1] best one\n\nQuestion: Why?"
    assert [source.text for source in sources] == ["best\n one", "second"]


def test_passages_that_do_not_fit_are_cut_or_left_out() -> None:
    messages, sources = ask_prompt("Why?", [passage("word " * 100), passage("more " * 100)], None, 300)
    assert len(sources) == 1
    cut = messages[0]["content"]
    assert cut.count("word") > 50
    assert "more" not in cut
    assert len(cut) // 2 < 300


def test_without_passages_the_prompt_says_so() -> None:
    messages, sources = ask_prompt("Why?", [], None, 1000)
    assert "Passages:\n(none)" in messages[0]["content"]
    assert sources == []

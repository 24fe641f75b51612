"""Which passage an answer is taken from."""

import pytest

from quire.rag.prompts import Citation, citations, with_passages

GROK = "Grok-0 is the first model of xAI. It has 33 billion parameters."
TEA = "Green tea is brewed with water of eighty degrees."


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Grok-0 has 33 billion parameters.", [Citation(33, 0)]),
        ("Tea is brewed. Grok-0 has 33 billion parameters.", [Citation(14, 1), Citation(48, 0)]),
        ("It has 1.2 trillion neurons.", []),
        ("It is large [1], and tea is green [2].", [Citation(15, 0), Citation(37, 1)]),
        ("It is large【1†source】.", [Citation(21, 0)]),
        ("No such passage [7].", []),
        ("", []),
        ("...", []),
    ],
)
def test_marks_first_then_words(answer: str, expected: list[Citation]) -> None:
    assert citations(answer, [GROK, TEA]) == expected


def test_no_more_citations_than_the_limit_and_none_without_passages() -> None:
    assert len(citations("[1] " * 1000, [GROK])) == 64
    assert citations("Grok-0 has 33 billion parameters.", []) == []


def test_passages_are_numbered_behind_the_instructions() -> None:
    made = with_passages("Be brief.", [GROK, TEA])
    assert made.startswith("Be brief.\n\nAnswer from these passages")
    assert f"[1] {GROK}\n\n[2] {TEA}" in made

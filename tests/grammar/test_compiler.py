"""Compiling: once per grammar, refused by name, and never longer or larger than its bounds."""

import threading
import time
from concurrent.futures import wait

import pytest

from quire.core.errors import QueueFull
from quire.core.structured import StructuredOutput
from quire.grammar import compiler as module
from quire.grammar import sandbox
from quire.grammar.compiler import Compiler
from quire.grammar.matcher import GrammarError, GrammarFault
from tests.grammar.conftest import LETTERS, allowed

ENDLESS = StructuredOutput.json({"type": "integer", "multipleOf": 9_999_999})  # takes minutes and gigabytes
BOTTOMLESS = StructuredOutput.grammar(  # overflows the stack
    "\n".join(f"a{i}: a{i + 1}" for i in range(8000)) + '\na8000: "x"\nstart: a0'
)


def test_a_grammar_is_compiled_once_whoever_asks(letters_compiler):
    form = StructuredOutput.regex("a+", param="regex")
    again = StructuredOutput.regex("a+", param="structured_outputs")
    assert letters_compiler.submit(form) is letters_compiler.submit(again)
    strict, lenient = (
        StructuredOutput.json({"type": "object"}),
        StructuredOutput.json({"type": "object"}, strict=False),
    )
    assert letters_compiler.submit(strict) is not letters_compiler.submit(lenient)


def test_the_cache_forgets_what_was_not_used_lately():
    compiler = Compiler(lambda: LETTERS, max_cached=3)
    try:
        first = compiler.submit(StructuredOutput.regex("a"))
        futures = [compiler.submit(StructuredOutput.regex(f"a{i}")) for i in range(5)]
        wait([first, *futures])
        compiler.submit(StructuredOutput.regex("b"))
        assert len(compiler._grammars) == 3
        assert compiler.submit(StructuredOutput.regex("a4")) is futures[4]
        assert compiler.submit(StructuredOutput.regex("a")) is not first
        assert first.result().matcher().fork()  # who has it keeps it
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (
            StructuredOutput.json({"properties": {"tags": {"type": "array", "uniqueItems": True}}}),
            "#/properties/tags/uniqueItems",
        ),
        (StructuredOutput.json({"not": {"type": "string"}}), "#/not"),
        (StructuredOutput.json({"oneOf": [{"type": "string"}, {"maxLength": 3}]}), "oneOf"),
        (StructuredOutput.json({"items": {"format": "shoe-size"}}), "shoe-size"),
        (StructuredOutput.json({"$ref": "https://example.com/schema"}), "https://example.com/schema"),
        (StructuredOutput.json({"$ref": "#"}), "matches no text"),
        (StructuredOutput.json({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (StructuredOutput.json(False), "false"),
        (StructuredOutput.json({"pattern": "(a"}), "unclosed group"),
        (StructuredOutput.regex("(a"), "unclosed group"),
        (StructuredOutput.regex(r"(a)\1"), "backreferences"),
        (StructuredOutput.regex("a(?=b)"), "look"),
        (StructuredOutput.grammar("start: nowhere"), "nowhere"),
        (StructuredOutput.grammar('start: "a'), "cannot be enforced"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(letters_compiler, form, named):
    with pytest.raises(GrammarError) as refusal:
        letters_compiler.submit(form).result(30)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert letters_compiler.submit(form).done(), "the same is refused at once"


def test_without_strict_the_rest_of_a_schema_is_honoured(letters_compiler):
    form = StructuredOutput.json({"type": "array", "items": {"const": 1}, "uniqueItems": True}, strict=False)
    matcher = letters_compiler.submit(form).result(30).matcher()
    matcher.advance([byte + 1 for byte in b"[1,1"])
    assert set(allowed(matcher, LETTERS)) <= {byte + 1 for byte in b",] \n"}


def test_a_grammar_without_end_or_bottom_fails_alone_and_in_time(monkeypatch):
    monkeypatch.setattr(sandbox, "WALL_TIME_FACTOR", 60)  # CPU time decides, on a busy machine too
    compiler = Compiler(lambda: LETTERS, seconds=1)
    try:
        endless = compiler.submit(ENDLESS)
        others = [compiler.submit(StructuredOutput.regex(f"a{{{i}}}")) for i in range(1, 4)]
        for other in others:
            assert other.result(90).matcher()
        assert not endless.done(), "others did not wait for it"
        with pytest.raises(GrammarError, match=r"longer than 1 s .*simplify"):
            endless.result(90)
        with pytest.raises(GrammarError, match="stack"):
            compiler.submit(BOTTOMLESS).result(90)
        assert compiler.submit(StructuredOutput.regex("b")).result(90), "it goes on after both"
    finally:
        compiler.close()


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|a)*b",
        "((a*)*)*b",
        "((a{1,1000}){1,1000}){1,1000}",
        "(a?){3000}a{3000}",
        "(.|\n)*a(.|\n){300}",
        ".{100000}",
        "(\\w{1,500}\\s){1,500}",
        "|".join(f"w{i * 7919 % 100003}x" for i in range(10000)),
    ],
    ids=lambda pattern: pattern[:24],
)
def test_a_catastrophic_regex_is_refused_or_costs_little_per_token(real_compiler, real_vocabulary, pattern):
    started = time.monotonic()
    try:
        matcher = real_compiler.submit(StructuredOutput.regex(pattern)).result(30).matcher()
        for _ in range(40):
            ids = allowed(matcher, real_vocabulary)
            if matcher.is_terminated:
                break
            matcher.advance([int(ids[len(ids) // 2])])
    except GrammarError:
        pass  # it passed a bound, and says so
    assert time.monotonic() - started < 60  # what is not bounded takes hours


def test_too_many_grammars_at_once_are_refused_for_now(monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    go_on = threading.Event()
    compiler = Compiler(lambda: go_on.wait(30) and LETTERS)
    try:
        for i in range(3):
            compiler.submit(StructuredOutput.regex(f"a{i}"))
        with pytest.raises(QueueFull, match="3 grammars"):
            compiler.submit(StructuredOutput.regex("b"))
        assert compiler.submit(StructuredOutput.regex("a1")), "one that is known costs nothing"
        go_on.set()
    finally:
        go_on.set()
        compiler.close()


def test_a_fault_of_ours_is_tried_again():
    vocabularies = [RuntimeError("disk on fire"), LETTERS]

    def make():
        made = vocabularies.pop(0)
        if isinstance(made, Exception):
            raise GrammarFault(str(made))
        return made

    compiler = Compiler(make)
    try:
        with pytest.raises(GrammarFault, match="fire"):
            compiler.submit(StructuredOutput.regex("a")).result(30)
        assert compiler.submit(StructuredOutput.regex("a")).result(30)
    finally:
        compiler.close()


def test_closing_ends_what_is_being_compiled():
    compiler = Compiler(lambda: LETTERS, seconds=60)
    future = compiler.submit(ENDLESS)
    time.sleep(0.5)
    started = time.monotonic()
    compiler.close()
    compiler.close()
    assert time.monotonic() - started < 20  # far from what the compiler may take
    assert future.done()

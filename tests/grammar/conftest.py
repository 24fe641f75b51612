"""A vocabulary of single letters, whose texts can be counted out, and the built-in model's real one."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from quire.core.structured import StructuredOutput
from quire.grammar.compiler import Compiler
from quire.grammar.matcher import Matcher
from quire.grammar.vocabulary import Vocabulary
from quire.text.load import load_tokenizer
from quire.weights.source import open_source

LETTERS = Vocabulary(
    tokens=[
        b"",
        *(bytes([byte]) for byte in range(256)),
        b"ab",
        b"abc",
        b"bc",
        b"ca",
        b'":',
        b"<|end|>",
        b"",
    ],
    special_ids=frozenset({262}),
    end_ids=(262,),
)


@pytest.fixture(scope="session")
def real_vocabulary() -> Vocabulary:
    tokenizer = load_tokenizer(open_source(None))
    assert tokenizer is not None
    return Vocabulary(
        tokens=[tokenizer.token_bytes(one) for one in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_ids,
        end_ids=(2, 0),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


@pytest.fixture(scope="session")
def real_compiler(real_vocabulary: Vocabulary) -> Iterator[Compiler]:
    compiler = Compiler(lambda: real_vocabulary)
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def letters_compiler() -> Iterator[Compiler]:
    compiler = Compiler(lambda: LETTERS)
    yield compiler
    compiler.close()


@pytest.fixture
def start(real_compiler: Compiler) -> Callable[[StructuredOutput], Matcher]:
    return lambda form: real_compiler.submit(form).result(30).matcher()


def allowed(matcher: Matcher, vocabulary: Vocabulary) -> np.ndarray:
    """The ids that may come next."""
    bits = np.zeros(vocabulary.num_words, np.uint32)
    matcher.fill(bits)
    found = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert not len(found) or found[-1] < len(vocabulary.tokens)
    return found


def is_complete(matcher: Matcher) -> bool:
    """Whether the text so far is complete, by llguidance's own word rather than by the mask."""
    return bool(matcher._inner.is_accepting())

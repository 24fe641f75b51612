"""Matcher: the state of one sequence in its grammar, compiled by llguidance.

llguidance is imported by the first request that needs it.
"""

import importlib
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.core.errors import QuireError
from quire.core.structured import StructuredOutput
from quire.grammar.vocabulary import LibraryVocabulary, Vocabulary

# Between JSON's tokens: nothing, a blank, or a new line and its indent. A weak model that may write any number of
# blanks writes nothing else.
WHITESPACE = r" |\n[ \t]{0,40}"
# Cost limits of one grammar: seconds to compile, tens of milliseconds per mask, 40 MB. llguidance's defaults otherwise.
_LIMITS = {"max_lexer_states": 20_000, "max_grammar_size": 200_000, "verbose_errors": False}
MAX_MESSAGE = 400


class GrammarError(QuireError):
    """The grammar itself is invalid or too expensive: the client must change it, and a retry fails again."""


class GrammarFault(QuireError):
    """Compiling failed for a reason outside the grammar; a retry may succeed."""


class Matcher:
    """Not thread-safe, but forks are independent of each other. Unusable after a GrammarError."""

    def __init__(self, inner: Any, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._vocabulary = vocabulary
        # end tokens after a text that was complete already, which llguidance does not consume
        self._num_ends = 0
        library_words = -(-(len(vocabulary.tokens) + (not vocabulary.end_ids)) // 32)
        self._wide = np.zeros(library_words, np.uint32) if library_words > vocabulary.num_words else None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consumes `token_ids`; GrammarError if the grammar does not allow them, or a limit is exceeded."""
        for token_id in token_ids:
            if token_id in self._vocabulary.end_ids and self.is_terminated:
                self._num_ends += 1
            elif not self._inner.consume_token(token_id):
                raise self._error()

    def fill(self, bits: np.ndarray) -> None:
        """Writes the mask of allowed next tokens to bits [num_words] uint32: token t is bit t % 32 of word t // 32.

        End tokens are allowed where the text is complete, and are the only ones once nothing else can follow.
        """
        target = bits if self._wide is None else self._wide
        self._inner.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        if self._inner.is_error():
            raise self._error()
        if self._wide is not None:
            bits[:] = self._wide[: len(bits)]

    def accepted(self, token_ids: Sequence[int]) -> int:
        """Length of the longest prefix of the draft `token_ids` that the grammar allows. Changes no state."""
        if self.is_terminated:
            return int(bool(token_ids) and token_ids[0] in self._vocabulary.end_ids and not self._num_ends)
        return self._inner.validate_tokens(list(token_ids))

    def rollback(self, num_tokens: int) -> None:
        """Removes the last `num_tokens` tokens."""
        ends = min(num_tokens, self._num_ends)
        self._num_ends -= ends
        if num_tokens > ends and not self._inner.rollback(num_tokens - ends):
            raise self._error()

    def fork(self) -> "Matcher":
        fork = Matcher(self._inner.deep_copy(), self._vocabulary)
        fork._num_ends = self._num_ends
        return fork

    @property
    def is_terminated(self) -> bool:
        """Whether only an end token can follow, or has followed."""
        return self._inner.is_stopped() and not self._inner.is_error()

    def _error(self) -> GrammarError:
        reason = " ".join(self._inner.get_error().replace("<non-verbose/>", "").split())
        return GrammarError(f"the grammar stopped the answer: {reason or 'the token is not allowed'}")


def load() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise GrammarFault(
            f"structured output needs the llguidance package ({error}): pip install llguidance"
        ) from None


def make_tokenizer(vocabulary: Vocabulary) -> Any:
    """llguidance's tokenizer: some tenths of a second to make, shared by all grammars."""
    library, wrapped = load(), LibraryVocabulary(vocabulary)
    return library.LLTokenizer(wrapped, eos_token=wrapped.end_ids)


def compile_matcher(tokenizer: Any, structured: StructuredOutput) -> Any:
    """A matcher at the beginning of a text; GrammarError says which part of the grammar is not supported.

    This may be slow, use much memory, or crash: see GrammarSandbox.
    """
    library = load()
    try:
        definition = _definition(library, structured)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_readable(str(error), structured)) from None
    matcher = library.LLMatcher(tokenizer, definition, log_level=0, limits=library.LLParserLimits(**_LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()  # fails if no text matches; the mask of the first token is cached
    if matcher.is_error():
        raise GrammarError(_readable(matcher.get_error(), structured))
    return matcher


def _definition(library: Any, structured: StructuredOutput) -> str:
    matcher = library.LLMatcher
    match structured.kind:
        case "json_object":
            return matcher.grammar_from_json_schema('{"type":"object"}', overrides=_json_options(True))
        case "json_schema":
            text = {"true": "{}", "false": '{"allOf":[false]}'}.get(structured.text.strip(), structured.text)
            return matcher.grammar_from_json_schema(text, overrides=_json_options(structured.strict))
        case "regex":
            return matcher.grammar_from_regex(structured.text)
        case "choice":
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(structured.text))
            return matcher.grammar_from_lark("start: " + " | ".join(choices))
    converter = importlib.import_module("llguidance.gbnf_to_lark")
    try:
        return matcher.grammar_from_lark(converter.any_to_lark(structured.text))
    except Exception as error:  # the converter raises many kinds
        raise ValueError(f"it can be read neither as Lark's notation nor as GBNF ({error})") from None


def _json_options(strict: bool) -> dict[str, Any]:
    return {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": not strict}


def _readable(message: str, structured: StructuredOutput) -> str:
    """llguidance's message in one line, with a JSON pointer to the schema keyword it names."""
    if "NoExtension" in message:
        return f"the {structured.kind} matches no text at all: check it for contradictions and endless references"
    if structured.kind == "regex" and (match := re.search(r"^error: (.+)$", message, re.MULTILINE)):
        message = match[1]
    lines = message.replace("<non-verbose/>", "").splitlines()
    lines = [line for line in lines if not re.match(r"\s*(\d+ \||\^)", line)]  # without quotes of the source
    message = " ".join(" ".join(lines).split())
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + " …"
    where = ""
    if structured.kind == "json_schema":
        named = re.findall(r'"([^"]+)"', message) if "Unimplemented keys" in message else []
        named += re.findall(r"(\w+) constraints are not supported", message)
        named += re.findall(r"Unknown (format)", message)
        path = _pointer(json.loads(structured.text), named[0]) if named else None
        where = f" (at {path})" if path else ""
    return f"the {structured.kind} cannot be enforced: {message}{where}"


def _pointer(schema: Any, keyword: str) -> str | None:
    """The JSON pointer of the first `keyword` in the schema."""
    pending: list[tuple[str, Any]] = [("#", schema)]
    while pending:
        path, value = pending.pop(0)
        if isinstance(value, dict):
            if keyword in value and not path.endswith("/properties"):
                return f"{path}/{keyword}"
            pending += [(f"{path}/{name}", inner) for name, inner in value.items()]
        elif isinstance(value, list):
            pending += [(f"{path}/{index}", inner) for index, inner in enumerate(value)]
    return None

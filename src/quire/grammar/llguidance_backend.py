"""Compiles grammars with llguidance, which is imported by the first request that needs it."""

import importlib
import json
import re
from typing import Any

from quire.core.structured import StructuredOutput
from quire.grammar.errors import GrammarError, GrammarFault
from quire.grammar.vocabulary import LibraryVocabulary, Vocabulary

# Between JSON's tokens: nothing, a blank, or a new line and its indent. A weak model that may write any number of
# blanks writes nothing else.
WHITESPACE = r" |\n[ \t]{0,40}"
# Cost limits of one grammar: seconds to compile, tens of milliseconds per mask, 40 MB. llguidance's defaults otherwise.
_LIMITS = {"max_lexer_states": 20_000, "max_grammar_size": 200_000, "verbose_errors": False}
MAX_MESSAGE = 400


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

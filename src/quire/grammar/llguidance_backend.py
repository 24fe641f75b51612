"""llguidance: the only file that calls it to compile. Imported when the first request needs it."""

import importlib
import json
import re
from typing import Any

from quire.core.structured import StructuredOutput
from quire.grammar.errors import GrammarError, GrammarFault
from quire.grammar.vocabulary import LibraryVocabulary, Vocabulary

# Between JSON's tokens: nothing, a blank, or a new line and its indent. More is never needed, and a weak model
# that is allowed any number of blanks writes nothing else.
WHITESPACE = r" |\n[ \t]{0,40}"
# What one grammar may cost: some seconds to prepare, some tens of milliseconds for a mask, 40 MB in all.
# The library's own defaults where none is given here.
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
    """The library's view of a vocabulary: takes some tenths of a second, and is shared by all grammars."""
    library, wrapped = load(), LibraryVocabulary(vocabulary)
    return library.LLTokenizer(wrapped, eos_token=wrapped.end_ids)


def compile_matcher(tokenizer: Any, structured: StructuredOutput) -> Any:
    """A matcher at the beginning of a text; GrammarError says what in the grammar cannot be honoured.

    This may take long, take much memory, or crash: see `trial`.
    """
    library = load()
    try:
        definition = _definition(library, structured)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_readable(str(error), structured)) from None
    matcher = library.LLMatcher(tokenizer, definition, log_level=0, limits=library.LLParserLimits(**_LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds out whether any text fits at all, and is there for the first token
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
            choices = (json.dumps(one, ensure_ascii=False) for one in json.loads(structured.text))
            return matcher.grammar_from_lark("start: " + " | ".join(choices))
    converter = importlib.import_module("llguidance.gbnf_to_lark")
    try:
        return matcher.grammar_from_lark(converter.any_to_lark(structured.text))
    except Exception as error:  # whatever a converter of free text may raise
        raise ValueError(f"it can be read neither as Lark's notation nor as GBNF ({error})") from None


def _json_options(strict: bool) -> dict[str, Any]:
    return {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": not strict}


def _readable(message: str, structured: StructuredOutput) -> str:
    """The library's message in one line, with the place in the schema where it can be found."""
    if "NoExtension" in message:
        return f"the {structured.kind} matches no text at all: check it for contradictions and endless references"
    if structured.kind == "regex" and (found := re.search(r"^error: (.+)$", message, re.MULTILINE)):
        message = found[1]
    lines = message.replace("<non-verbose/>", "").splitlines()
    told = [line for line in lines if not re.match(r"\s*(\d+ \||\^)", line)]  # the source is the caller's own
    message = " ".join(" ".join(told).split())
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + " …"
    place = ""
    if structured.kind == "json_schema":
        named = re.findall(r'"([^"]+)"', message) if "Unimplemented keys" in message else []
        named += re.findall(r"(\w+) constraints are not supported", message)
        named += re.findall(r"Unknown (format)", message)
        path = _place(json.loads(structured.text), named[0]) if named else None
        place = f" (at {path})" if path else ""
    return f"the {structured.kind} cannot be enforced: {message}{place}"


def _place(schema: Any, keyword: str) -> str | None:
    """Where the keyword stands, as a JSON pointer."""
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

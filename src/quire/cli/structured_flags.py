"""The form of an answer as flags: --json-schema, --regex, --grammar, --choice."""

import argparse
from pathlib import Path
from typing import Any

from quire.cli.parser import Collect, Parser
from quire.core.errors import InvalidRequest
from quire.core.structured import StructuredOutput


def add_structured_flags(parser: Parser) -> None:
    group = parser.add_argument_group("structured output", "one of these, or any text will do")
    group.add_argument("--json-schema", metavar="FILE", help="answers are JSON that this schema describes")
    group.add_argument("--json-object", action="store_true", help="answers are JSON objects")
    group.add_argument("--regex", metavar="TEXT", help="answers match this regular expression as a whole")
    group.add_argument(
        "--grammar", metavar="FILE", help="answers follow this grammar, in Lark's notation or GBNF"
    )
    group.add_argument(
        "--choice", action=Collect, metavar="TEXT", help="answers are one of these (repeatable)"
    )


def structured_from(arguments: argparse.Namespace) -> StructuredOutput | None:
    """InvalidRequest names a flag that cannot be."""
    given: dict[str, Any] = {
        "--json-schema": arguments.json_schema,
        "--json-object": arguments.json_object or None,
        "--regex": arguments.regex,
        "--grammar": arguments.grammar,
        "--choice": arguments.choice,
    }
    flags = [flag for flag, value in given.items() if value is not None]
    if not flags:
        return None
    if len(flags) > 1:
        raise InvalidRequest(f"{flags[0]} and {flags[1]} both say what answers look like: give one of them")
    (flag,) = flags
    value = given[flag]
    match flag:
        case "--json-schema":
            return StructuredOutput.json(_content(flag, value), param=flag)
        case "--json-object":
            return StructuredOutput.json(param=flag)
        case "--grammar":
            return StructuredOutput.grammar(_content(flag, value), param=flag)
        case "--regex":
            return StructuredOutput.regex(value, param=flag)
    return StructuredOutput.choice(value, param=flag)


def _content(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{flag} {path}: cannot be read ({error})") from error

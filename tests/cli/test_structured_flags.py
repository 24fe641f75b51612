"""Flags that say what answers look like: one of them, and clear words about a wrong one."""

import pytest

from quire.cli.flags import add_structured_flags, structured_from
from quire.cli.parser import Parser
from quire.core.errors import InvalidRequest
from quire.core.structured import StructuredOutput


def read(*flags: str) -> StructuredOutput | None:
    parser = Parser()
    add_structured_flags(parser)
    return structured_from(parser.parse_args(flags))


def test_each_flag_is_a_form(tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "a"')
    assert read() is None
    assert read("--json-schema", str(schema)) == StructuredOutput.json('{"type": "object"}')
    assert read("--json-object") == StructuredOutput.json()
    assert read("--regex", "a+") == StructuredOutput.regex("a+")
    assert read("--grammar", str(grammar)) == StructuredOutput.grammar('start: "a"')
    assert read("--choice", "yes", "--choice", "no") == StructuredOutput.choice(["yes", "no"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--regex", "a", "--choice", "b"), "--regex and --choice"),
        (("--json-schema", "nowhere.json"), "--json-schema nowhere.json: cannot be read"),
        (("--regex", ""), "empty"),
    ],
)
def test_a_wrong_flag_is_named(flags, said):
    with pytest.raises(InvalidRequest, match=said):
        read(*flags)

"""Forms that make a grammar write calls of tools: of one tool, of any, or of any instead of an answer."""

import json
from collections.abc import Sequence
from typing import Any

from quire.core.structured import StructuredOutput
from quire.grammar.llguidance_backend import WHITESPACE
from quire.text.tools.hermes import CLOSE, OPEN

Tools = Sequence[dict[str, Any]]
# What a schema may have that gives names to more arguments than its `properties` do.
_OPENING = frozenset(
    (
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "if",
    )
)


def parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of the arguments. Where it only lists them, there are no others; without one, there are none."""
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    if "properties" in schema and _OPENING.isdisjoint(schema):
        schema["additionalProperties"] = False
    return schema


def arguments_form(function: dict[str, Any]) -> StructuredOutput:
    """One call's arguments, and nothing else."""
    return StructuredOutput.json(parameters_of(function), strict=bool(function.get("strict")), param="tools")


def calls_form(tools: Tools, max_calls: int | None) -> StructuredOutput:
    """An array of calls."""
    calls, defined = _call_schemas(tools, "parameters")
    schema: dict[str, Any] = {"$defs": defined, "type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return StructuredOutput.json(schema, strict=_all_strict(tools), param="tools")


def answer_or_calls_form(answer: StructuredOutput, tools: Tools, max_calls: int | None) -> StructuredOutput:
    """Calls as Hermes writes them, or JSON by the answer's own form. Other forms are left as they are."""
    if answer.kind not in ("json_schema", "json_object"):
        return answer
    schema = json.loads(answer.text) if answer.text else {"type": "object"}
    calls, defined = _call_schemas(tools, "arguments")
    more = '("\\n" call)*' if max_calls is None else ""
    lines = (
        "start: answer | calls",
        f"answer: %json {_with_options(schema, answer.strict)}",
        f"calls: call {more}",
        f"call: {json.dumps(OPEN)} NEWLINE object NEWLINE {json.dumps(CLOSE)}",
        f"object: %json {_with_options({'$defs': defined, 'anyOf': calls}, _all_strict(tools))}",
        r"NEWLINE: /\n/",
    )
    return StructuredOutput("grammar", "\n".join(lines), param=answer.param)


def _call_schemas(tools: Tools, key: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A schema for each tool's calls, and the definitions that these refer to."""
    calls, defined = [], {}
    for index, tool in enumerate(tools):
        function, place = tool["function"], f"tool_{index}"
        defined[place] = _moved(parameters_of(function), f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, key: {"$ref": f"#/$defs/{place}"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return calls, defined


def _all_strict(tools: Tools) -> bool:
    return all(tool["function"].get("strict") for tool in tools)


def _with_options(schema: Any, strict: bool) -> str:
    """A schema within a grammar, with what would be said beside it if it stood alone."""
    if not isinstance(schema, dict):
        return json.dumps(schema)
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": not strict}
    return json.dumps({**schema, "x-guidance": options})


def _moved(schema: Any, place: str) -> Any:
    """A schema for a place within another: its references to itself go on meaning the same."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }

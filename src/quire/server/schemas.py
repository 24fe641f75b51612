"""JSON schemas of requests as the grammar gets them: closed, bounded, and relaxed where they cannot be enforced."""

import json
import re
from dataclasses import replace
from typing import Any

from quire.core.structured import StructuredOutput

# Characters in a row within a string: a weak model that may write any number writes nothing else.
MAX_WHITESPACE = 64
_BOUNDED_TEXT = rf"^(\s{{0,{MAX_WHITESPACE}}}\S)*\s{{0,{MAX_WHITESPACE}}}$"
# Keywords that llguidance does not enforce, and the only formats that it knows.
_UNENFORCED = frozenset(
    (
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef"),
    )
)
_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri", "unknown"),
    )
)
# Word bounds, lookarounds, references.
_UNENFORCED_REGEX = re.compile(r"\\[bBAZzGk1-9]|\(\?(?:=|!|<=|<!|>|P=)")
# Keywords that may allow more than `properties` lists, or already say what more is allowed.
_OPENING = frozenset(
    (
        *("additionalProperties", "unevaluatedProperties", "patternProperties"),
        *("$ref", "allOf", "anyOf", "oneOf", "if"),
    )
)
_TEXT_BOUNDS = frozenset(("pattern", "format", "minLength", "maxLength", "enum", "const"))
# Where schemas lie within a schema: by name, in a choice, or alone or in a list.
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_CHOICES = frozenset(("anyOf", "oneOf", "allOf", "if", "then", "else", "not"))
_SCHEMAS = _CHOICES | {"items", "prefixItems", "additionalProperties", "additionalItems", "contains"}


def served_form(form: StructuredOutput) -> tuple[StructuredOutput, list[str]]:
    """The form with its schema as `served_schema` makes it, and the warnings."""
    if form.kind != "json_schema":
        return form, []
    schema, warnings = served_schema(json.loads(form.text), form.strict, form.param)
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return replace(form, text=text), warnings


def served_schema(schema: Any, strict: bool, param: str) -> tuple[Any, list[str]]:
    """A new schema for the grammar, and a warning for each part that it does not enforce.

    Objects that list properties and do not mention others have no others. Strings without bounds have at most
    MAX_WHITESPACE blanks in a row. Unless `strict`, patterns that cannot be enforced are left out; the grammar
    itself leaves out the other parts, and refuses all of them if it is strict.
    """
    if not isinstance(schema, dict):
        return schema, []
    warnings: list[str] = []
    served = _served(schema, "#", not _composes(schema), strict, warnings)
    return served, [f"{param}: {warning}" for warning in warnings]


def _served(
    schema: dict[str, Any], path: str, closes: bool, strict: bool, warnings: list[str]
) -> dict[str, Any]:
    made = dict(schema)
    if not strict:
        _relax(made, path, warnings)
    if closes and isinstance(made.get("properties"), dict) and _OPENING.isdisjoint(made):
        made["additionalProperties"] = False
    if _is_text(made.get("type")) and _TEXT_BOUNDS.isdisjoint(made):
        made["pattern"] = _BOUNDED_TEXT
    # a choice beside `properties` is about the same object: closed, it would forbid these
    closes_choices = closes and "properties" not in made

    def inner(value: Any, where: str, key: str) -> Any:
        if not isinstance(value, dict):
            return value
        closes_inner = closes_choices if key in _CHOICES else closes
        return _served(value, f"{path}/{where}", closes_inner, strict, warnings)

    for key, value in made.items():
        if key in _BY_NAME and isinstance(value, dict):
            made[key] = {name: inner(part, f"{key}/{name}", key) for name, part in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            made[key] = [inner(part, f"{key}/{index}", key) for index, part in enumerate(value)]
        elif key in _SCHEMAS:
            made[key] = inner(value, key, key)
    return made


def _is_text(kind: Any) -> bool:
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _relax(schema: dict[str, Any], path: str, warnings: list[str]) -> None:
    """Notes what of this schema is not enforced, and removes the patterns, which would be refused."""
    for name in sorted(_UNENFORCED.intersection(schema)):
        if schema[name] is not False:
            warnings.append(f"{path}/{name} is not enforced")
    if isinstance(schema.get("oneOf"), list) and "discriminator" not in schema:
        warnings.append(f"{path}/oneOf is enforced as anyOf")
    given = schema.get("format")
    if isinstance(given, str) and given not in _FORMATS and schema.get("type") in (None, "string"):
        warnings.append(f"{path}/format {given[:40]!r} is not enforced")
    if _is_unenforced(schema.get("pattern")):
        warnings.append(f"{path}/pattern {schema.pop('pattern')[:80]!r} is not enforced")
    named = schema.get("patternProperties")
    if isinstance(named, dict) and any(map(_is_unenforced, named)):
        warnings.append(f"{path}/patternProperties is not enforced")
        del schema["patternProperties"]
        schema.setdefault("additionalProperties", True)


def _is_unenforced(pattern: Any) -> bool:
    return isinstance(pattern, str) and _UNENFORCED_REGEX.search(pattern.replace(r"\\", "")) is not None


def _composes(schema: Any) -> bool:
    """Whether several schemas describe one object together: closed, each would forbid what the others list."""
    if isinstance(schema, list):
        return any(map(_composes, schema))
    if not isinstance(schema, dict):
        return False
    together = isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    return together or ("$ref" in schema and "properties" in schema) or any(map(_composes, schema.values()))

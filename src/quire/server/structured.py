"""The form that a request wants its answer in, however it says so: OpenAI's way, vLLM's two, or a plain field."""

from typing import Any

from quire.core.errors import InvalidRequest
from quire.core.structured import StructuredOutput
from quire.server.protocol.sampling import SamplingFields

_PLAIN = {  # field -> what StructuredOutput.of calls it
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "regex": "regex",
    "grammar": "grammar",
}


def structured_output(body: SamplingFields) -> StructuredOutput | None:
    """None: any text will do. InvalidRequest names the field that is wrong, or two that contradict."""
    found = [_from_format(body.response_format)] if body.response_format is not None else []
    if body.structured_outputs is not None:
        found.append(StructuredOutput.of(body.structured_outputs, "structured_outputs"))
    for name, kind in _PLAIN.items():
        value = getattr(body, name)
        if value is not None:
            found.append(StructuredOutput.of({kind: value}, name))
    forms = [form for form in found if form is not None]
    if len(forms) > 1:
        raise InvalidRequest(
            f"{forms[0].param} and {forms[1].param} both say what the answer must look like: send one of them",
            forms[1].param,
        )
    return forms[0] if forms else None


def _from_format(response_format: dict[str, Any]) -> StructuredOutput | None:
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object", "schema": dict(schema)}:  # as some servers spell a schema
            return StructuredOutput.json(schema, param="response_format")
        case {"type": "json_object"}:
            return StructuredOutput.json(param="response_format")
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **rest}}:
            strict = rest.get("strict")
            if not isinstance(strict, (bool, type(None))):
                raise _wrong(f"json_schema.strict is {_shown(strict)}: give true or false")
            # Only an express false says that an answer beside the schema is better than a refusal.
            return StructuredOutput.json(schema, strict=strict is not False, param="response_format")
        case {"type": "json_schema"}:
            raise _wrong("of type json_schema needs json_schema.schema, an object")
    kind = _shown(response_format.get("type"))
    raise _wrong(f"has the type {kind}: give 'text', 'json_object' or 'json_schema'")


def _wrong(problem: str) -> InvalidRequest:
    return InvalidRequest(f"response_format {problem}", "response_format")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 64 else shown[:64] + "…"

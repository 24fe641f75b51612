"""StructuredOutput: the schema, regex or grammar of an answer. Its size is checked here; `grammar` compiles it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from quire.core.errors import InvalidRequest

Kind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]
KINDS: tuple[str, ...] = get_args(Kind)
MAX_BYTES = 128 * 1024  # of schema, regex or grammar: compile time grows with it
MAX_DEPTH = 128  # nesting of a schema's JSON
MAX_CHOICES = 4096
_DEPTH_REMEDY = f"nested deeper than {MAX_DEPTH} levels: flatten it, or use $ref"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the whole text of an answer must match.

    `text` is a JSON schema, a regular expression, a grammar in Lark's notation, or a JSON list of strings to
    choose from; a `json_object` needs none. With `strict=False`, parts of a schema that cannot be enforced are
    ignored; otherwise the schema is refused. `param` is the request's field, which errors name; it takes no part
    in comparisons.
    """

    kind: Kind
    text: str = ""
    strict: bool = True
    param: str = field(default="structured", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise self._refusal(f"kind={self.kind!r} is not known: choose one of {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise self._refusal(f"the {self.kind} must be text, not {type(self.text).__name__}")
        self._check_size()
        match self.kind:
            case "json_object":
                if self.text:
                    raise self._refusal("a json_object takes no text: for a schema use json_schema")
            case "json_schema":
                self._check_schema()
            case "choice":
                self._check_choices()
            case _:
                if not self.text:
                    raise self._refusal(f"the {self.kind} is empty: no text could match it")

    # ------------------------------------------------------------------ constructors

    @classmethod
    def json(
        cls, schema: Any = None, *, strict: bool = True, param: str = "structured"
    ) -> "StructuredOutput":
        """JSON by a schema: a mapping, its JSON text, or a pydantic class. Without one, any JSON object."""
        if schema is None:
            return cls("json_object", param=param)
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            return cls("json_schema", schema, strict, param)
        if not isinstance(schema, (Mapping, bool)):
            raise InvalidRequest(
                f"a JSON schema must be an object, not {type(schema).__name__}: give a mapping, JSON text or a "
                "pydantic class",
                param,
            )
        return cls("json_schema", _dumped(schema, param), strict, param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "structured") -> "StructuredOutput":
        """Text that a regular expression matches as a whole."""
        return cls("regex", pattern, param=param)

    @classmethod
    def grammar(cls, text: str, *, param: str = "structured") -> "StructuredOutput":
        """Text that a context-free grammar in Lark's notation derives from its rule `start`."""
        return cls("grammar", text, param=param)

    @classmethod
    def choice(cls, choices: Sequence[str], *, param: str = "structured") -> "StructuredOutput":
        """Exactly one of these strings."""
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise InvalidRequest(f"choice must be a list of strings, not {type(choices).__name__}", param)
        return cls("choice", _dumped(list(choices), param), param=param)

    @classmethod
    def of(cls, given: Mapping[str, Any], param: str = "structured") -> "StructuredOutput":
        """From {"json": …}, {"json_object": true}, {"regex": …}, {"grammar": …} or {"choice": […]}."""
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        unknown = [
            name for name in given if name not in ("json", "json_object", "regex", "grammar", "choice")
        ]
        if unknown or len(given) != 1:
            what = f"has {str(unknown[0])[:40]!r}" if unknown else f"has {len(given)} of them"
            raise InvalidRequest(
                f"{{param}} {what}: give exactly one of json, json_object, regex, grammar and choice", param
            )
        ((name, value),) = given.items()
        if name == "json_object":
            return cls("json_object", param=param)
        maker: Any = {"json": cls.json, "regex": cls.regex, "grammar": cls.grammar, "choice": cls.choice}[
            name
        ]
        made: StructuredOutput = maker(value, param=param)
        return made

    # ------------------------------------------------------------------ checks

    def _check_size(self) -> None:
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError:
            raise self._refusal(f"the {self.kind} holds half of a character: send valid Unicode") from None
        if num_bytes > MAX_BYTES:
            raise self._refusal(f"the {self.kind} has {num_bytes} bytes, more than {MAX_BYTES}: shorten it")

    def _check_schema(self) -> None:
        schema = self._parsed()
        if not isinstance(schema, (dict, bool)):
            raise self._refusal(f"a JSON schema must be an object, not {type(schema).__name__}")
        if nests_deeper([schema], MAX_DEPTH):
            raise self._refusal(f"the schema is {_DEPTH_REMEDY}")

    def _check_choices(self) -> None:
        choices = self._parsed()
        if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
            raise self._refusal("choice must be a list of strings that are not empty")
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise self._refusal(f"choice has {len(choices)} strings: give 1 to {MAX_CHOICES}")

    def _parsed(self) -> Any:
        try:
            return json.loads(self.text)
        except RecursionError:
            raise self._refusal(f"the {self.kind} is {_DEPTH_REMEDY}") from None
        except ValueError as error:
            raise self._refusal(f"the {self.kind} is no valid JSON ({error})") from None

    def _refusal(self, message: str) -> InvalidRequest:
        return InvalidRequest(message, self.param)


def _dumped(value: Any, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequest(f"the schema is {_DEPTH_REMEDY}", param) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{{param}} cannot be written as JSON ({error})", param) from None


def nests_deeper(values: list[Any], depth: int) -> bool:
    """Whether JSON values hold more than `depth` levels of brackets; level by level, so that no recursion can fail."""
    level = values
    for _ in range(depth):
        level = [
            inner
            for value in level
            if isinstance(value, (dict, list))
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    return bool(level)

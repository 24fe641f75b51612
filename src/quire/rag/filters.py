"""Filters on attributes, in OpenAI's form: `{"key", "type", "value"}`, and `{"type": "and"|"or", "filters"}` of those.

`Filter.matches` is the definition; an index that evaluates filters itself must agree with it. A number never equals a
text or a bool; `ne` and `nin` are the exact opposites of `eq` and `in`, so they match where the attribute is missing.
"""

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Value = str | float | bool
Attributes = Mapping[str, Value]

MAX_DEPTH = 8
MAX_FILTERS = 256  # comparisons and groups of one filter
MAX_VALUES = 1000  # of `in` and `nin`
MAX_ALL_VALUES = 2000  # of one filter: each is compared for every distinct set of attributes
MAX_KEY, MAX_TEXT = 64, 512  # characters
MAX_ATTRIBUTES = 16
_RANGES = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}
_LISTS = ("in", "nin")
_GROUPS = ("and", "or")


class Filter(Protocol):
    def matches(self, attributes: Attributes) -> bool: ...


@dataclass(frozen=True, slots=True)
class Comparison:
    type: str  # eq ne gt gte lt lte in nin
    key: str
    values: tuple[Value, ...]  # one, or those of `in` and `nin`; numbers are floats

    def matches(self, attributes: Attributes) -> bool:
        present = attributes.get(self.key)
        if self.type in _RANGES:
            if isinstance(present, bool) or not isinstance(present, int | float):
                return False
            return bool(_RANGES[self.type](float(present), float(self.values[0])))
        equal = present is not None and any(_equal(present, value) for value in self.values)
        return equal == (self.type in ("eq", "in"))


@dataclass(frozen=True, slots=True)
class CompoundFilter:
    type: str  # and, or
    filters: tuple["Comparison | CompoundFilter", ...]

    def matches(self, attributes: Attributes) -> bool:
        found = (inner.matches(attributes) for inner in self.filters)
        return all(found) if self.type == "and" else any(found)


def _equal(present: Value, value: Value) -> bool:
    if isinstance(present, str) or isinstance(value, str):
        return present == value
    if isinstance(present, bool) or isinstance(value, bool):
        return present is value
    return float(present) == float(value)


def parse_filter(content: Any) -> Comparison | CompoundFilter:
    """The filter that this JSON describes. ValueError names the field that is wrong."""
    return _Parser().parse(content, "filters", 1)


class _Parser:
    def __init__(self) -> None:
        self._num_filters = self._num_values = 0

    def parse(self, content: Any, path: str, depth: int) -> Comparison | CompoundFilter:
        if not isinstance(content, Mapping):
            raise ValueError(f"{path} is {_shown(content)}: give an object with type, key and value")
        self._num_filters += 1
        if depth > MAX_DEPTH or self._num_filters > MAX_FILTERS:
            raise ValueError(
                f"{path}: a filter may be {MAX_DEPTH} levels deep and have {MAX_FILTERS} parts: simplify it"
            )
        kind = content.get("type")
        if kind in _GROUPS:
            return self._group(content, kind, path, depth)
        if kind in ("eq", "ne", *_RANGES, *_LISTS):
            comparison = _comparison(content, kind, path)
            self._num_values += len(comparison.values)
            if self._num_values > MAX_ALL_VALUES:
                raise ValueError(f"{path}: a filter may have {MAX_ALL_VALUES} values in all: simplify it")
            return comparison
        raise ValueError(f"{path}.type is {_shown(kind)}: give eq, ne, gt, gte, lt, lte, in, nin, and or or")

    def _group(self, content: Mapping[str, Any], kind: str, path: str, depth: int) -> CompoundFilter:
        _only(content, ("type", "filters"), path)
        inner = content.get("filters")
        if not isinstance(inner, list) or not inner:
            raise ValueError(f"{path}.filters is {_shown(inner)}: give a list of at least one filter")
        parts = (self.parse(part, f"{path}.filters[{at}]", depth + 1) for at, part in enumerate(inner))
        return CompoundFilter(kind, tuple(parts))


def _comparison(content: Mapping[str, Any], kind: str, path: str) -> Comparison:
    _only(content, ("type", "key", "value"), path)
    key, value = content.get("key"), content.get("value")
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY:
        raise ValueError(f"{path}.key is {_shown(key)}: give an attribute's name, 1 to {MAX_KEY} characters")
    if kind in _LISTS:
        if not isinstance(value, list) or len(value) > MAX_VALUES:
            raise ValueError(f"{path}.value is {_shown(value)}: {kind} needs a list of up to {MAX_VALUES}")
        values = tuple(_value(part, f"{path}.value[{at}]") for at, part in enumerate(value))
        return Comparison(kind, key, values)
    if kind in _RANGES and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{path}.value is {_shown(value)}: {kind} compares numbers, give one")
    return Comparison(kind, key, (_value(value, f"{path}.value"),))


def check_attributes(content: Any) -> dict[str, Value]:
    """Attributes as they are kept: up to 16 texts, numbers and bools. ValueError names the field that is wrong."""
    if not isinstance(content, Mapping):
        raise ValueError(f"attributes is {_shown(content)}: give an object")
    if len(content) > MAX_ATTRIBUTES:
        raise ValueError(
            f"attributes has {len(content)} entries, and {MAX_ATTRIBUTES} are allowed: leave some out"
        )
    for key in content:
        if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY:
            raise ValueError(f"attributes has the key {_shown(key)}: give 1 to {MAX_KEY} characters")
    return {key: _value(value, f"attributes.{key}") for key, value in content.items()}


def _value(value: Any, path: str) -> Value:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise ValueError(f"{path} has {len(value)} characters, and {MAX_TEXT} are allowed: shorten it")
        return value
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise ValueError(f"{path} is {_shown(value)}: give a text, a finite number or a bool")


def _only(content: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    unknown = next((name for name in content if name not in known), None)
    if unknown is not None:
        raise ValueError(f"{path}.{str(unknown)[:40]} is no field of a filter: it has {', '.join(known)}")


def _shown(value: Any) -> str:
    try:
        return repr(value)[:60]
    except (RecursionError, ValueError):  # very deep, or an integer of thousands of digits
        return type(value).__name__

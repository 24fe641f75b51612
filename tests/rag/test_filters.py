"""Filters: what they match, and which field is named when one is wrong."""

import random
from pathlib import Path
from typing import Any

import numpy
import pytest

from quire.rag.filters import check_attributes, parse_filter
from quire.rag.index import open_index
from quire.rag.ranking import IndexQuery, Point


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("eq", 2, "two"),
        ("eq", 2.0, "two"),
        ("eq", "2", "text"),
        ("eq", True, "yes"),
        ("eq", 1, "one"),
        ("ne", 2, "one text yes none"),
        ("gt", 1, "two"),
        ("gte", 1, "one two"),
        ("lt", 2, "one"),
        ("lte", 2, "one two"),
        ("in", [1, "2"], "one text"),
        ("in", [], ""),
        ("nin", [1, "2"], "two yes none"),
        ("nin", [], "one two text yes none"),
    ],
)
def test_a_comparison_matches_values_of_its_kind(kind: str, value: Any, expected: str) -> None:
    rows = {"one": {"a": 1}, "two": {"a": 2}, "text": {"a": "2"}, "yes": {"a": True}, "none": {"b": 2}}
    wanted = parse_filter({"type": kind, "key": "a", "value": value})
    assert [name for name, attributes in rows.items() if wanted.matches(attributes)] == expected.split()


def test_groups() -> None:
    two, big = {"type": "eq", "key": "a", "value": 2}, {"type": "gt", "key": "b", "value": 10}
    both, either = (parse_filter({"type": kind, "filters": [two, big]}) for kind in ("and", "or"))
    assert both.matches({"a": 2, "b": 11})
    assert not both.matches({"a": 2})
    assert either.matches({"b": 11})
    assert not either.matches({})


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "eq", "key": "a", "value": 1}
    for _ in range(depth - 1):
        inner = {"type": "and", "filters": [inner]}
    return inner


def many(count: int) -> dict[str, Any]:
    return {"type": "in", "key": "a", "value": list(range(count))}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], r"^filters is \[\]: give an object"),
        ({"type": "like", "key": "a", "value": 1}, r"^filters\.type is 'like': give eq, ne"),
        ({"key": "a", "value": 1}, r"^filters\.type is None"),
        ({"type": "eq", "value": 1}, r"^filters\.key is None"),
        ({"type": "eq", "key": "k" * 65, "value": 1}, r"^filters\.key is .*1 to 64"),
        ({"type": "eq", "key": "a"}, r"^filters\.value is None: give a text, a finite number or a bool"),
        ({"type": "eq", "key": "a", "value": float("nan")}, r"^filters\.value is nan"),
        ({"type": "eq", "key": "a", "value": 10**400}, r"^filters\.value is 1000"),
        ({"type": "eq", "key": "a", "value": "x" * 513}, r"^filters\.value has 513 characters, and 512"),
        ({"type": "gt", "key": "a", "value": "x"}, r"^filters\.value is 'x': gt compares numbers"),
        ({"type": "gt", "key": "a", "value": True}, r"^filters\.value is True: gt compares numbers"),
        ({"type": "in", "key": "a", "value": "x"}, r"^filters\.value is 'x': in needs a list"),
        ({"type": "in", "key": "a", "value": [1] * 1001}, r"up to 1000"),
        ({"type": "in", "key": "a", "value": [1, None]}, r"^filters\.value\[1\] is None"),
        ({"type": "eq", "key": "a", "value": 1, "or": []}, r"^filters\.or is no field of a filter"),
        ({"type": "and", "filters": []}, r"^filters\.filters is \[\]: give a list of at least one"),
        ({"type": "or", "filters": [nested(1), 5]}, r"^filters\.filters\[1\] is 5"),
        (nested(9), r"8 levels deep"),
        ({"type": "or", "filters": [nested(1)] * 256}, r"256 parts"),
        ({"type": "or", "filters": [many(1000), many(1000), many(1)]}, r"2000 values in all"),
        (nested(5000), r"8 levels deep"),
    ],
)
def test_a_wrong_filter_names_its_field(content: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_filter(content)


def test_limits_are_allowed() -> None:
    assert parse_filter(nested(8)).matches({"a": 1})
    assert parse_filter({"type": "or", "filters": [nested(1)] * 255}).matches({"a": 1})
    assert parse_filter({"type": "or", "filters": [many(1000)] * 2}).matches({"a": 1})


def test_attributes_are_texts_numbers_and_bools() -> None:
    assert check_attributes({"a": 1, "b": "x", "c": True}) == {"a": 1.0, "b": "x", "c": True}
    for wrong, words in (
        ({"a": None}, r"attributes\.a is None"),
        ({"a": [1]}, r"attributes\.a is \[1\]"),
        ({str(n): n for n in range(17)}, "17 entries, and 16"),
        ({"": 1}, "the key ''"),
        ("x", "attributes is 'x'"),
    ):
        with pytest.raises(ValueError, match=words):
            check_attributes(wrong)


class RandomFilters:
    KEYS = ("a", "b.c", "d[0]", 'e"f', "ü")

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def value(self) -> Any:
        texts, numbers = ("x", "y", "", "1", "True"), (0, 1, 2, -1, 1.5, 1e18, 1e-9)
        return self._random.choice((self._random.choice(texts), self._random.choice(numbers), True, False))

    def attributes(self) -> dict[str, Any]:
        return check_attributes({key: self.value() for key in self.KEYS if self._random.random() < 0.6})

    def filter(self, depth: int = 3) -> dict[str, Any]:
        if depth and self._random.random() < 0.5:
            inner = [self.filter(depth - 1) for _ in range(self._random.randrange(1, 4))]
            return {"type": self._random.choice(("and", "or")), "filters": inner}
        kind = self._random.choice(["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"])
        if kind in ("in", "nin"):
            value: Any = [self.value() for _ in range(self._random.randrange(4))]
        else:
            value = self.value() if kind in ("eq", "ne") else self._random.choice((0, 1, 2, -1, 1.5, 1e18))
        return {"type": kind, "key": self._random.choice(self.KEYS), "value": value}


@pytest.mark.parametrize("kind", ["exact", "hnsw"])
def test_ten_thousand_filters_agree_with_the_definition(tmp_path: Path, kind: Any) -> None:
    if kind == "hnsw":
        pytest.importorskip("qdrant_edge")
    made = RandomFilters(seed=20)
    vectors = numpy.eye(4, dtype=numpy.float32)
    points = [Point(n, [vectors[n % 4]], "word", made.attributes()) for n in range(1, 41)]
    index = open_index(tmp_path, 4, kind)
    index.upsert(points)
    for point in points[:10]:  # attributes that change are searched as they are now
        attributes = made.attributes()
        index.set_attributes([point.chunk_id], attributes)
        point.attributes.clear()
        point.attributes.update(attributes)
    for _ in range(10_000):
        content = made.filter()
        wanted = parse_filter(content)
        expected = {point.chunk_id for point in points if wanted.matches(point.attributes)}
        hits = index.search(IndexQuery(vectors[0], "", 100, wanted, ranker="none"))
        assert {hit.chunk_id for hit in hits} == expected, content
    index.close()

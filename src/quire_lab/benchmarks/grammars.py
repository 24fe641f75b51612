"""llguidance and xgrammar side by side on schemas as people send them: compiling, masks, and what is not honoured.

usage: python -m quire_lab.benchmarks.grammars [--rounds N] [--output FILE]

A library that is not installed is left out. Each schema is compiled N times from nothing and its example walked
token by token in the built-in model's vocabulary, one mask for each token. The second list holds schemas with an
example that they forbid: a library may refuse the schema, enforce it, or let the example through.
"""

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quire.bench.machine import describe_origin
from quire.core.structured import StructuredOutput
from quire.grammar.matcher import GrammarError, Matcher, compile_matcher, make_tokenizer
from quire.grammar.vocabulary import Vocabulary
from quire.text.load import load_tokenizer
from quire.weights.source import open_source

TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name", "children"],
            "additionalProperties": False,
        }
    },
}
CUSTOMER = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "name": {"type": "string", "minLength": 1, "maxLength": 80},
        "email": {"type": "string", "format": "email"},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["DE", "FR", "US", "JP"]},
            },
            "required": ["street", "city", "country"],
            "additionalProperties": False,
        },
        "orders": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                    "price": {"type": "number", "minimum": 0},
                },
                "required": ["sku", "quantity", "price"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 10,
        },
    },
    "required": ["id", "name", "address", "orders"],
    "additionalProperties": False,
}
FUNCTION = {  # as OpenAI's documents show a tool
    "type": "object",
    "properties": {
        "location": {"type": "string", "description": "City and country e.g. Bogotá, Colombia"},
        "units": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": ["integer", "null"]},
    },
    "required": ["location", "units", "days"],
    "additionalProperties": False,
}
CALLS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": f"tool_{i}"}, "parameters": FUNCTION},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for i in range(12)
        ]
    },
}
OPEN = {"type": "object", "properties": {"title": {"type": "string"}, "tags": {"type": "array"}}}
STEPS = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                "required": ["explanation", "output"],
                "additionalProperties": False,
            },
        },
        "final_answer": {"type": "string"},
    },
    "required": ["steps", "final_answer"],
    "additionalProperties": False,
}
EXAMPLES: dict[str, tuple[Any, Any]] = {
    "math steps": (
        STEPS,
        {"steps": [{"explanation": "add 3 to both sides", "output": "x = 7"}] * 3, "final_answer": "7"},
    ),
    "function call": (FUNCTION, {"location": "Bogotá, Colombia", "units": "celsius", "days": None}),
    "12 tools": (
        CALLS,
        [{"name": "tool_7", "parameters": {"location": "Oslo", "units": "celsius", "days": 3}}] * 2,
    ),
    "customer": (
        CUSTOMER,
        {
            "id": 4711,
            "name": "Ada Lovelace",
            "email": "ada@example.com",
            "address": {"street": "12 St James's Square", "city": "London", "zip": "12345", "country": "FR"},
            "orders": [{"sku": "ABC-1234", "quantity": 3, "price": 9.99}] * 3,
        },
    ),
    "tree": (TREE, {"name": "root", "children": [{"name": "leaf", "children": []}] * 4}),
    "enum of 500": (
        {
            "type": "array",
            "items": {"enum": [f"category {i:03d}" for i in range(500)]},
            "minItems": 2,
            "maxItems": 5,
        },
        ["category 123", "category 456", "category 007"],
    ),
    "open object": (OPEN, {"title": "Notes", "tags": ["a", 1, {"b": [True]}], "more": {"x": "y"}}),
    "union": (
        {
            "anyOf": [
                {"type": "string", "maxLength": 20},
                {"type": "number"},
                {"type": "array", "items": FUNCTION},
            ]
        },
        [{"location": "Rome", "units": "fahrenheit", "days": 12}],
    ),
    "dates": (
        {
            "type": "object",
            "properties": {
                "at": {"type": "string", "format": "date-time"},
                "id": {"type": "string", "format": "uuid"},
            },
            "required": ["at", "id"],
            "additionalProperties": False,
        },
        {"at": "2026-02-28T12:30:00Z", "id": "123e4567-e89b-12d3-a456-426614174000"},
    ),
}
FORBIDDEN: dict[str, tuple[Any, Any]] = {
    "minimum, maximum": ({"type": "integer", "minimum": 10, "maximum": 20}, 30),
    "number minimum": ({"type": "number", "minimum": 0.5}, 0.25),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, 7),
    "maxLength": ({"type": "string", "maxLength": 3}, "abcd"),
    "maxItems": ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [1, 2, 3]),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, "abcd"),
    "pattern and maxLength": ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 3}, "abca"),
    "format date": ({"type": "string", "format": "date"}, "yesterday"),
    "unknown format": ({"type": "string", "format": "shoe-size"}, "forty"),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1]),
    "not": ({"not": {"type": "string"}}, "text"),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 8}]}, 3),
    "oneOf overlapping": ({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 0}]}, 5),
    "required, unordered": ({"type": "object", "required": ["a"]}, {"b": 1}),
    "additionalProperties": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": {"type": "integer"},
        },
        {"a": 1, "b": "x"},
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        {"n_a": "x"},
    ),
    "minProperties": ({"type": "object", "minProperties": 2}, {"a": 1}),
    "if, then": ({"if": {"type": "integer"}, "then": {"minimum": 5}}, 3),
    "contains": ({"type": "array", "contains": {"const": 1}}, [2]),
    "remote $ref": ({"$ref": "https://example.com/schema.json"}, 1),
}


class Walk(Protocol):
    """A place in a grammar."""

    def fill(self) -> None: ...

    def advance(self, token_id: int) -> bool: ...

    def may_end(self) -> bool: ...


@dataclass(frozen=True)
class Library:
    version: str
    compile: Callable[[str], Walk]  # raises on a schema that it refuses


# ---------------------------------------------------------------------- the two libraries


class GuidanceWalk:
    def __init__(self, inner: Any, vocabulary: Vocabulary) -> None:
        self._inner = inner
        self._matcher = Matcher(inner, vocabulary)
        self._bits = np.zeros(vocabulary.num_words, np.uint32)

    def fill(self) -> None:
        self._matcher.fill(self._bits)

    def advance(self, token_id: int) -> bool:
        try:
            self._matcher.advance([token_id])
        except GrammarError:
            return False
        return True

    def may_end(self) -> bool:
        return self._inner.is_accepting()


def guidance(vocabulary: Vocabulary) -> Library:
    tokenizer = make_tokenizer(vocabulary)

    def compile(schema: str) -> Walk:
        inner = compile_matcher(tokenizer, StructuredOutput.json(schema))
        return GuidanceWalk(inner, vocabulary)

    return Library(importlib.metadata.version("llguidance"), compile)


class XgrammarWalk:
    def __init__(self, xgrammar: Any, compiled: Any, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)

    def fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self._bits)

    def advance(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def may_end(self) -> bool:
        return self._matcher.is_completed()


def xgrammar(vocabulary: Vocabulary) -> Library:
    import xgrammar as library

    size = len(vocabulary.tokens)
    tokens = [b"" if i in vocabulary.special_ids else token for i, token in enumerate(vocabulary.tokens)]
    info = library.TokenizerInfo(tokens, vocab_size=size, stop_token_ids=list(vocabulary.end_ids))
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(schema: str) -> Walk:
        return XgrammarWalk(library, compiler.compile_json_schema(schema, strict_mode=False), size)

    return Library(importlib.metadata.version("xgrammar"), compile)


# ---------------------------------------------------------------------- measuring


def walk(library: Library, schema: Any, token_ids: Sequence[int], rounds: int) -> dict[str, Any]:
    text = json.dumps(schema)
    compile_seconds, mask_seconds, first_seconds = [], [], []
    for _ in range(rounds):
        started = time.perf_counter()
        try:
            state = library.compile(text)
        except Exception as error:
            return {"refused": " ".join(str(error).split())[:160]}
        compile_seconds.append(time.perf_counter() - started)
        for position, token_id in enumerate(token_ids):
            started = time.perf_counter()
            state.fill()
            (mask_seconds if position else first_seconds).append(time.perf_counter() - started)
            if not state.advance(token_id):
                return {"rejected": f"its own example, at token {position} of {len(token_ids)}"}
        assert state.may_end()
    return {
        "compile_ms": round(1e3 * float(np.median(compile_seconds)), 2),
        "first_mask_ms": round(1e3 * float(np.median(first_seconds)), 3),
        "mask_p50_ms": round(1e3 * float(np.percentile(mask_seconds, 50)), 4),
        "mask_p99_ms": round(1e3 * float(np.percentile(mask_seconds, 99)), 4),
    }


def verdict(library: Library, schema: Any, token_ids: Sequence[int]) -> str:
    try:
        place = library.compile(json.dumps(schema))
    except Exception:
        return "refused"
    accepted = all(place.advance(token_id) for token_id in token_ids) and place.may_end()
    return "let through" if accepted else "enforced"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(open_source(None))
    assert tokenizer is not None
    vocabulary = Vocabulary(
        tokens=[tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_ids,
        end_ids=(2,),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
    results: dict[str, Any] = {**describe_origin(), "rounds": arguments.rounds, "libraries": {}}
    for name, make in (("llguidance", guidance), ("xgrammar", xgrammar)):
        started = time.perf_counter()
        try:
            library = make(vocabulary)
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        seconds = time.perf_counter() - started
        print(f"\n{name} {library.version}: {seconds:.2f} s to import and to read the vocabulary")
        measured = {}
        for what, (schema, example) in EXAMPLES.items():
            token_ids = vocabulary.encode(json.dumps(example, ensure_ascii=False))
            measured[what] = walk(library, schema, token_ids, arguments.rounds)
            print(f"  {what:16} {measured[what]}")
        verdicts = {
            what: verdict(library, schema, vocabulary.encode(json.dumps(example)))
            for what, (schema, example) in FORBIDDEN.items()
        }
        for kind in ("refused", "let through"):
            print(f"  {kind}: {', '.join(what for what, got in verdicts.items() if got == kind) or 'none'}")
        results["libraries"][name] = {
            "version": library.version,
            "start_seconds": round(seconds, 2),
            "schemas": measured,
            "forbidden": verdicts,
        }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

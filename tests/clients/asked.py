"""What every client asks for: one question, one tool, one schema, the same texts.

Answers of the small built-in model make little sense: tests look at shapes, types and equalities. Schemas have a few
possible values only, so that every answer is short.
"""

import json
from typing import Literal

import pydantic
import pytest

from tests.server.running import MODEL as MODEL

EMBEDDER = "all-MiniLM-L6-v2"
QUESTION = "What is the capital of France?"
LONG_QUESTION = "Name the seven days of the week."  # 65 tokens: even a busy machine streams them in pieces
TOOL_QUESTION = "What is the weather in Paris?"
RESULT = "Sunny, 21 degrees."
TEXTS = ["The cat sat on the mat.", "A dog ran."]
TOO_LONG = "word " * 9_000  # the built-in model takes 8,192 tokens
UNKNOWN = "no-such-model"


class City(pydantic.BaseModel):
    """A city and its size."""

    name: Literal["Paris", "Rome"]
    large: bool


class Weather(pydantic.BaseModel):
    """The weather of a city for some days."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2]


def weather(city: Literal["Paris", "Rome"], days: Literal[1, 2]) -> str:
    """The weather of a city for some days."""
    return RESULT


def check_arguments(arguments: str | dict[str, object]) -> None:
    """Arguments of a call of `weather`, as JSON or as a dict, match its schema."""
    Weather.model_validate(json.loads(arguments) if isinstance(arguments, str) else arguments)


def check_vectors(found: list[list[float]], vectors: list[list[float]]) -> None:
    for one, vector in zip(found, vectors, strict=True):
        assert one == pytest.approx(vector, abs=1e-6)

"""Whatever the served OpenAPI document allows, and whatever it forbids, is answered in a known shape: never a 5xx."""

import json
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import hypothesis
import hypothesis.strategies as st
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from schemathesis import APIOperation, Case, GenerationMode

from tests.server.running import RunningServer

EXAMPLES = 8  # for each endpoint, as many again that break its rules
SECONDS = 15.0  # for all of them together, shared fairly
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "tokens": [1, 2]}
ASKED |= {"text_1": "Hi", "text_2": ["Hi"], "query": "Hi", "documents": ["Hi"]}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Enough(BaseException):
    """Not a failure, so not an Exception, which would be looked into."""


def test_no_request_breaks_the_server(server: RunningServer):
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json").json())
    deadline = time.monotonic() + SECONDS
    asked: dict[str, Counter[int]] = {}
    operations = sorted((found.ok() for found in schema.get_all_operations()), key=lambda one: one.method)
    trials = [(operation, mode) for operation in operations for mode in GenerationMode]
    for number, (operation, mode) in enumerate(trials):
        now = time.monotonic()
        share = (deadline - now) / (len(trials) - number)
        asked[f"{operation.label} {mode.value}"] = _try(operation, mode, server.url, now + share)
    for operation in operations:
        assert asked[f"{operation.label} positive"], asked
    server.wait_idle()


def tried(operation: APIOperation, mode: GenerationMode, url: str, seconds: float) -> Counter[int]:
    """As `_try`, for so long."""
    return _try(operation, mode, url, time.monotonic() + seconds)


def _try(operation: APIOperation, mode: GenerationMode, url: str, deadline: float) -> Counter[int]:
    """How many requests were made, by the status of their answers."""
    answered: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        verbosity=Verbosity.quiet,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode), most=st.integers(0, 6), plain=st.booleans())
    def ask(case: Case, most: int, plain: bool) -> None:
        if answered and time.monotonic() > deadline:  # one each, however slow the machine
            raise Enough
        if mode is GenerationMode.POSITIVE:
            _simplify(case.body, most, plain)
        _shorten(case.body)
        response = case.call(base_url=url, timeout=60)
        answered[response.status_code] += 1
        _check(case, response)

    with suppress(
        Enough, hypothesis.errors.Unsatisfiable
    ):  # an endpoint without fields has no rules to break
        ask()
    return answered


def _simplify(body: Any, most: int, plain: bool) -> None:
    """Of thirty fields one is always refused: with a few of them some requests get as far as the engine."""
    if isinstance(body, dict):
        body.pop("model", None)  # a random name is a 404
        for name in [name for name in body if name not in ASKED][most:]:
            del body[name]
        if plain:
            body.update({name: ASKED[name] for name in ASKED if name in body})


def _shorten(body: Any) -> None:
    """Long answers would only cost time."""
    if isinstance(body, dict):
        for name in LENGTHS:
            if not isinstance(body.get(name), int) or body[name] > 2:
                body[name] = 2


def _check(case: Case, response: schemathesis.Response) -> None:
    shown = f"{case.as_curl_command()}\n{response.status_code} {response.text[:500]}"
    assert response.status_code < 500, shown
    if response.status_code >= 400:
        error = json.loads(response.text)["error"]
        assert isinstance(error["message"], str), shown
        assert isinstance(error["type"], str), shown
    elif response.headers["content-type"][0].startswith("text/event-stream"):
        assert '"server_error"' not in response.text, shown
    elif response.headers["content-type"][0].startswith("application/json"):
        json.loads(response.text)

"""Traces without a server: addresses, the missing library, what a span says. Real ones are in test_operations.py."""

import sys
import time

import pytest

from quire.core.errors import ConfigError
from quire.server.access import RequestContext
from quire.server.errors import ApiError
from quire.server.traces import FLUSH_SECONDS, OtlpTraces, attributes, open_traces, with_path


def test_without_an_endpoint_nothing_is_imported_and_nothing_sent():
    assert open_traces(None) is None


def test_the_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[otel\]'"):
        open_traces("http://127.0.0.1:4318")


def test_a_collectors_address_gets_the_usual_path():
    assert with_path("http://c:4318") == with_path("http://c:4318/") == "http://c:4318/v1/traces"
    assert with_path("https://c/other/path") == "https://c/other/path"
    for wrong in ("c:4318", "grpc://c:4317", "http://"):
        with pytest.raises(ConfigError, match="is no address"):
            with_path(wrong)


def test_a_failed_request_says_how():
    context = RequestContext("r1")
    context.note_error(ApiError(429, "full", code="queue_full"))
    found = attributes(context, "POST", "/v1/completions", 429)
    assert (found["error.type"], found["http.response.status_code"]) == ("queue_full", 429)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert "gen_ai.usage.input_tokens" not in found


def test_a_collector_that_is_gone_costs_a_moment_at_the_end_and_no_request():
    traces = OtlpTraces("http://127.0.0.1:9")
    traces.note(RequestContext("r1"), "POST", "/v1/completions", 200, [(b"traceparent", b"nonsense")])
    started = time.monotonic()
    traces.close()
    assert time.monotonic() - started < 10 * FLUSH_SECONDS

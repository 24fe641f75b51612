"""Traces: one OpenTelemetry span for each request, sent to a collector over HTTP. Off unless an endpoint is named."""

import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from quire import __version__
from quire.core.errors import ConfigError
from quire.server.access import RequestContext

PATH = "/v1/traces"  # where collectors listen
FLUSH_SECONDS = 2.0  # at the end; a collector that is gone must not hold up the shutdown
OPERATIONS = {  # by route, in the words of the gen_ai conventions
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
# The log line's facts under the names of the gen_ai conventions; latencies have vLLM's names.
_ATTRIBUTES = {
    "id": "gen_ai.response.id",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "first_token": "gen_ai.latency.time_to_first_token",
    "queued": "gen_ai.latency.time_in_queue",
}


class OtlpTraces:
    """Makes a span when a request has ended; a thread of OpenTelemetry sends it, so no request waits.

    OpenTelemetry is imported by its methods only: it is an optional dependency.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"--otlp-traces-endpoint needs OpenTelemetry ({error}): install it with pip install 'quire[otel]'"
            ) from error
        self._exporter = OTLPSpanExporter(endpoint=with_path(endpoint))
        self._provider = TracerProvider(resource=Resource.create(_resource()))
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("quire", __version__)

    def note(
        self, context: RequestContext, method: str, route: str, status: int, headers: Iterable[Any]
    ) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now = time.time_ns()
        began = now - int((time.monotonic() - context.arrival) * 1e9)
        operation = OPERATIONS.get(route)
        model = context.facts.get("model")
        span = self._tracer.start_span(
            f"{operation} {model}" if operation and model else f"{method} {route}",
            context=TraceContextTextMapPropagator().extract(_carrier(headers)),
            kind=SpanKind.SERVER,
            attributes=attributes(context, method, route, status),
            start_time=began,
        )
        broke_off = status < 400 and "error" in context.facts  # a stream that had begun
        if status >= 500 or broke_off:
            span.set_status(StatusCode.ERROR, str(context.facts.get("error", "")) or None)
        span.end(now)

    def close(self) -> None:
        flushing = threading.Thread(target=self._provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            self._exporter.shutdown()  # ends what it tries again and again
        self._provider.shutdown()


def open_traces(endpoint: str | None) -> OtlpTraces | None:
    return None if endpoint is None else OtlpTraces(endpoint)


def attributes(context: RequestContext, method: str, route: str, status: int) -> dict[str, Any]:
    """A span's attributes. Never a prompt's or an answer's text."""
    facts = context.facts
    values: dict[str, Any] = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "quire.request_id": context.request_id,
    }
    if route in OPERATIONS:
        values["gen_ai.operation.name"] = OPERATIONS[route]
        values["gen_ai.provider.name"] = "quire"
        values["gen_ai.latency.e2e"] = time.monotonic() - context.arrival
    values.update({name: facts[fact] for fact, name in _ATTRIBUTES.items() if fact in facts})
    if "model" in facts:
        values["gen_ai.response.model"] = facts["model"]
    if "finish" in facts:
        values["gen_ai.response.finish_reasons"] = str(facts["finish"]).split(",")
    if status >= 400 or "error" in facts:
        values["error.type"] = str(facts.get("error", status))
    return values


def with_path(endpoint: str) -> str:
    """A collector's address, with the path where it takes traces if none was given."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} is no address: write it as http://HOST:4318{PATH}"
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + PATH


def _resource() -> Mapping[str, Any]:
    return {"service.name": os.environ.get("OTEL_SERVICE_NAME", "quire"), "service.version": __version__}


def _carrier(headers: Iterable[Any]) -> dict[str, str]:
    wanted = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in wanted}

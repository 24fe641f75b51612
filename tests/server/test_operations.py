"""What operators switch on: TLS, rates per key, keep-alives, traces, bounded templates. One server has it all."""

import json
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import trustme
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.server.running import MODEL, RunningServer

pytestmark = pytest.mark.e2e
KEYS = ("rates", "debts", "waits", "traces", "templates")
HI = [{"role": "user", "content": "Hi"}]


@dataclass
class Collector:
    """Takes traces as an OpenTelemetry collector does."""

    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)

    def take(self, data: bytes) -> None:
        for one in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resources.append({a.key: a.value.string_value for a in one.resource.attributes})
            for scope in one.scope_spans:
                self.spans += scope.spans

    def find(self, name: str, trace_id: str) -> Span:
        deadline = time.monotonic() + 30
        while True:
            for span in self.spans:
                if (span.name, span.trace_id.hex()) == (name, trace_id):
                    return span
            assert time.monotonic() < deadline, [span.name for span in self.spans]
            time.sleep(0.05)


@dataclass
class Operated:
    server: RunningServer
    trusted: ssl.SSLContext
    collector: Collector

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.server.url,
            verify=self.trusted,
            headers={"Authorization": f"Bearer {key}"},
            timeout=60,
        )

    def openai(self, key: str) -> openai.OpenAI:
        return self.server.client(api_key=key, http_client=openai.DefaultHttpxClient(verify=self.trusted))


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder: Path = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    collector = Collector()
    listening = _listening(collector)
    server = RunningServer(
        *("--ssl-certfile", str(folder / "both.pem"), "--ssl-keyfile", str(folder / "both.pem")),
        *(word for key in KEYS for word in ("--api-key", key)),
        *("--max-requests-per-minute-per-key", "12", "--max-tokens-per-minute-per-key", "400"),
        *("--sse-keep-alive", "0.1", "--max-num-seqs", "1", "--trust-request-chat-template"),
        *("--otlp-traces-endpoint", f"http://127.0.0.1:{listening.server_port}"),
        OTEL_BSP_SCHEDULE_DELAY="100",
    )
    try:
        yield Operated(server.wait_ready(), trusted, collector)
    finally:
        server.close()
        listening.shutdown()


def _listening(collector: Collector) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    return listening


def test_tls_is_served_and_nothing_else(operated: Operated):
    assert operated.server.url.startswith("https://")
    with operated.client("rates") as client:
        assert client.get("/health").json() == {"status": "ready"}
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{operated.server.url}/health")
    with pytest.raises(httpx.TransportError):
        httpx.get(operated.server.url.replace("https", "http") + "/health")


def test_a_key_has_its_requests_per_minute_and_hears_how_many_are_left(operated: Operated):
    with operated.client("rates") as client:
        assert client.get("/v1/models").headers["x-ratelimit-remaining-requests"] == "12"  # looking is free
        first = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "12"
        assert first.headers["x-ratelimit-remaining-requests"] == "11"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        assert first.headers["x-ratelimit-limit-tokens"] == "400"
        answers = [client.post("/detokenize", json={"tokens": [1]}) for _ in range(30)]
        last = answers[-1]
        assert (answers[0].status_code, last.status_code) == (200, 429)
        error = last.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert 1 <= int(last.headers["Retry-After"]) <= 5
        assert last.headers["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(openai.RateLimitError):
        _ask_on(operated.openai("rates"))
    with operated.client("debts") as other:
        assert other.post("/detokenize", json={"tokens": [1]}).status_code == 200


def _ask_on(client: openai.OpenAI) -> None:
    """More than once: a slow machine may have earned another request by now."""
    for _ in range(4):
        client.completions.create(model=MODEL, prompt="a", max_tokens=1)


def test_a_keys_tokens_per_minute_count_prompt_and_answer(operated: Operated):
    with operated.client("debts") as client:
        hopeless = client.post("/v1/completions", json={"prompt": [1] * 401})
        assert (hopeless.status_code, hopeless.headers["x-should-retry"]) == (429, "false")
        fits = {"prompt": [1] * 390, "max_tokens": 160, "ignore_eos": True}  # far more than a second's tokens
        assert client.post("/v1/completions", json=fits).status_code == 200
        refused = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["code"]) == (429, "tokens", "rate_limit_exceeded")
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert int(refused.headers["Retry-After"]) <= 24


def test_a_stream_that_waits_is_kept_alive_and_clients_do_not_notice(operated: Operated):
    running = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    short = {"prompt": "One, two,", "max_tokens": 3, "temperature": 0}
    kept_alive = threading.Event()

    def lines() -> list[str]:
        asked, received = {**short, "stream": True}, []
        with operated.client("waits") as c, c.stream("POST", "/v1/completions", json=asked) as response:
            for line in response.iter_lines():
                received.append(line)
                if received.count(": keep-alive") >= 2:
                    kept_alive.set()
        return received

    def text() -> str:
        chunks = operated.openai("waits").completions.create(model=MODEL, **short, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    def said() -> str:
        client = anthropic.Anthropic(
            api_key="waits",
            base_url=operated.server.url,
            max_retries=0,
            http_client=anthropic.DefaultHttpxClient(verify=operated.trusted),
        )
        with client.messages.stream(model=MODEL, max_tokens=3, messages=HI) as stream:
            return stream.get_final_text()

    with (
        operated.client("waits") as client,
        ThreadPoolExecutor(3) as pool,
        client.stream("POST", "/v1/completions", json=running) as first,
    ):
        begun = first.iter_lines()
        next(begun)
        waiting = [pool.submit(ask) for ask in (lines, text, said)]
        kept_alive.wait(60)
        first.close()  # the only place is free: the requests that wait run now
        raw, whole, answer = [one.result() for one in waiting]
    assert raw[0] == ": keep-alive"
    assert raw.count(": keep-alive") >= 2
    assert raw[-2:] == ["data: [DONE]", ""]
    assert whole
    assert isinstance(answer, str)


def test_a_request_becomes_a_span_under_its_callers_trace(operated: Operated):
    with operated.client("traces") as client:
        headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        body = {"messages": HI, "max_tokens": 4, "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json=body, headers=headers).json()
        client.post("/v1/completions", json={"prompt": "a", "temperature": -1}, headers=headers)
    span = operated.collector.find(f"chat {MODEL}", "ab" * 16)
    assert span.parent_span_id.hex() == "cd" * 8
    assert span.kind == Span.SPAN_KIND_SERVER
    found = {a.key: a.value for a in span.attributes}
    assert found["gen_ai.operation.name"].string_value == "chat"
    assert found["gen_ai.request.model"].string_value == MODEL
    assert found["gen_ai.response.id"].string_value == answer["id"]
    assert found["gen_ai.usage.input_tokens"].int_value == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"].int_value == 4
    assert [v.string_value for v in found["gen_ai.response.finish_reasons"].array_value.values] == ["length"]
    first, whole = (found[f"gen_ai.latency.{name}"].double_value for name in ("time_to_first_token", "e2e"))
    assert 0 < first <= whole
    assert found["gen_ai.latency.time_in_queue"].double_value < first
    lasted = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert whole - 0.01 <= lasted < whole + 5  # until the last byte was sent, which a busy machine may delay
    refused = operated.collector.find("POST /v1/completions", "ab" * 16)
    assert {a.key: a.value for a in refused.attributes}["http.response.status_code"].int_value == 400
    assert operated.collector.resources[0]["service.name"] == "quire"


def test_an_endless_template_costs_its_own_request_only(operated: Operated):
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = 1 %}{% endfor %}{% endfor %}"
    body = {"messages": HI, "max_tokens": 1}
    with operated.client("templates") as client, ThreadPoolExecutor(1) as pool:
        # one that had to wait would find it ended each time; a busy machine does now and then
        for _ in range(3):
            hanging = pool.submit(
                client.post, "/v1/chat/completions", json={**body, "chat_template": endless}
            )
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            waited = hanging.done()
            refused = hanging.result()
            if not waited:
                break
        assert not waited
        assert refused.status_code == 400
        assert "took longer than 2 s" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "chat_template"
        giant = client.post("/v1/chat/completions", json={**body, "chat_template": "{{ 'a' * 10**9 }}"})
        assert (giant.status_code, "memory" in giant.text) == (400, True)


def test_the_plan_says_what_a_server_takes_once_its_pool_is_full(
    start_server: Callable[..., RunningServer],
) -> None:
    flags = ("--kv-cache-memory-bytes", "64M", "--max-num-seqs", "16")
    server = start_server(*flags)
    for first in range(8):  # more tokens than the pool has
        prompt = [100 + first * 1000 + position for position in range(480)]
        answer = server.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    command = [sys.executable, "-m", "quire", "plan", *flags, "--bandwidth", "10G", "--json"]
    planned = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["server_bytes"]
    pids = (server.process.pid, server.engine_pid())
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    used = sum(
        int(line.split()[1]) * 1024 for text in statuses for line in text.splitlines() if "VmRSS" in line
    )
    assert abs(planned - used) < 0.15 * used, (planned, used)

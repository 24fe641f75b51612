"""Keys, limits and faults, where they are not those of chats: kept responses are their key's own, Anthropic's header
is read, and a stream that breaks says so in its own API's words."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.server.running import MODEL, RunningServer

HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    keys = ("--api-key", "one", "--api-key", "two", "--max-concurrent-per-key", "2")
    running = RunningServer(*keys, "--max-stored-responses", "2", "--max-body-bytes", "4096")
    try:
        yield running.wait_ready()
    finally:
        running.close()


def anthropic_client(server: RunningServer, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=60, **options)


@pytest.mark.e2e
def test_responses_belong_to_their_keys_and_are_bounded(keyed: RunningServer):
    one, two = keyed.client(api_key="one"), keyed.client(api_key="two")
    asked: Any = {"model": MODEL, "input": "Hi", "max_output_tokens": 1}
    first = one.responses.create(**asked)
    assert one.responses.retrieve(first.id) == first
    for forbidden in (
        lambda: two.responses.retrieve(first.id),
        lambda: two.responses.delete(first.id),
        lambda: two.responses.input_items.list(first.id),
        lambda: two.responses.create(**asked, previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            forbidden()
    later = [two.responses.create(**asked) for _ in range(2)]
    with pytest.raises(openai.NotFoundError):
        one.responses.retrieve(first.id)
    assert [two.responses.retrieve(one.id).id for one in later] == [one.id for one in later]
    assert keyed.metric("stored_responses") == 2


@pytest.mark.e2e
def test_anthropics_header_is_a_key_and_its_errors_have_its_shape(keyed: RunningServer):
    asked: Any = {"model": MODEL, "max_tokens": 1, "messages": HI}
    assert anthropic_client(keyed, api_key="one").messages.create(**asked).content
    assert anthropic_client(keyed, auth_token="two").messages.create(**asked).content
    with pytest.raises(anthropic.AuthenticationError) as refused:
        anthropic_client(keyed, api_key="three").messages.create(**asked)
    assert refused.value.body["error"]["type"] == "authentication_error"
    assert refused.value.request_id
    one = anthropic_client(keyed, api_key="one")
    with pytest.raises(anthropic.RequestTooLargeError) as large:
        one.messages.create(**asked, system="x" * 5000)
    assert large.value.body["error"]["type"] == "request_too_large"


@pytest.mark.e2e
def test_limits_and_broken_streams_are_told_in_each_apis_words(keyed: RunningServer):
    headers = {"Authorization": "Bearer one"}
    endless = {"ignore_eos": True, "stream": True}
    response = {**endless, "input": "Hi", "max_output_tokens": 4000}
    message = {**endless, "messages": HI, "max_tokens": 4000}
    with (
        httpx.Client(base_url=keyed.url, headers=headers, timeout=60) as client,
        client.stream("POST", "/v1/responses", json=response) as first,
        client.stream("POST", "/v1/messages", json=message) as second,
    ):
        lines, others = first.iter_lines(), second.iter_lines()
        assert [next(lines), next(others)] == ["event: response.created", "event: message_start"]
        assert any("response.output_text.delta" in line for line in lines)  # a text has begun
        refused = client.post("/v1/messages", json=message)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["Retry-After"]
        os.kill(keyed.engine_pid(), signal.SIGKILL)
        failed, error = [json.loads([*rest][-2].removeprefix("data: ")) for rest in (lines, others)]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"][0]["content"][0]["text"]
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")


@pytest.mark.e2e
def test_fair_shares_are_among_keys():
    """One key's queue does not come before another key's first request."""
    keys = ("--api-key", "one", "--api-key", "two")
    server = RunningServer(*keys, "--schedule", "fair", "--max-num-seqs", "1")
    ended: list[str] = []
    asked: Any = {"model": MODEL, "prompt": "Of:", "temperature": 0, "extra_body": {"ignore_eos": True}}

    def ask(client: openai.OpenAI) -> None:
        client.completions.create(**asked, max_tokens=20)
        ended.append(client.api_key)

    def reach(metric: str, count: int) -> None:
        deadline = time.monotonic() + 30
        while server.metric(metric) < count:
            assert time.monotonic() < deadline, metric
            time.sleep(0.005)

    try:
        server.wait_ready()
        first, *others, last = (server.client(api_key=key, timeout=60) for key in ["one"] * 6 + ["two"])
        asking = [threading.Thread(target=ask, args=(client,)) for client in (*others, last)]
        with first.completions.create(**asked, max_tokens=8000, stream=True) as running:
            next(running)  # runs until all others wait
            for thread in asking[:5]:
                thread.start()
            reach("num_requests_waiting", 5)
            asking[5].start()
            reach("num_requests_waiting", 6)
        for thread in asking:
            thread.join(60)
    finally:
        server.close()
    assert sorted(ended) == ["one"] * 5 + ["two"]
    assert ended.index("two") <= 1  # behind, at most, the one whose turn had come

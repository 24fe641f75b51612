"""Keys, limits and faults, where they are not those of chats: kept responses are their key's own, Anthropic's header
is read, and a stream that breaks says so in its own API's words."""

import json
import os
import signal
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
        refused = client.post("/v1/messages", json=message)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["Retry-After"]
        os.kill(keyed.engine_pid(), signal.SIGKILL)
        failed, error = [json.loads([*rest][-2].removeprefix("data: ")) for rest in (lines, others)]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"][0]["content"][0]["text"]
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")

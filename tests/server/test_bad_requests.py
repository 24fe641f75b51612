"""Whatever is wrong with a request, its error has OpenAI's shape and names the field."""

import asyncio
import gzip
import time

import httpx
import openai
import pytest

from tests.server.running import MODEL, PATIENCE, RunningServer

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "Hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 17, "temperature": 0}, "n"),
        ({"n": 2, "best_of": 3, "temperature": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 200}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {str(10**40): 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"seed": 2**65}, "seed"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_a_400_that_names_it(server: RunningServer, fields: dict, param: str):
    error = server.chat_error(**fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**33]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_completion_is_a_400_that_names_the_field(server: RunningServer, fields: dict, param: str):
    error = server.error("/v1/completions", 400, json=fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_a_prompt_longer_than_the_context_is_refused_by_its_number(server: RunningServer):
    error = server.chat_error(messages=[{"role": "user", "content": "word " * 9000}])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "8192" in error["message"]


def test_a_request_that_could_never_fit_the_pool_says_so(server: RunningServer):
    error = server.error("/v1/completions", 400, json={"prompt": [1] * 6000, "max_tokens": 2000, "n": 16})
    assert "the whole pool" in error["message"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "no valid JSON"),
        *((content, "must be a JSON object") for content in (b"", b"[]", b"null", b'"x"')),
        (b"\xff\xfe", "no valid JSON"),  # the marks of UTF-16
        (b'{"messages": "\xe9"}', "no valid utf-8 at byte 14"),
        (gzip.compress(b'{"messages": []}', mtime=0), "uncompressed"),
        (b'{"messages": ' + b"[" * 100_000, "nests too deeply"),
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(server: RunningServer, content: bytes, reason: str):
    headers = {"Content-Type": "application/json"}
    error = server.error("/v1/chat/completions", 400, content=content, headers=headers)
    assert error["type"] == "invalid_request_error"
    assert reason in error["message"]


@pytest.mark.parametrize("depth", [300, 480, 700, 950, 5000])
def test_values_that_nest_deeply_are_taken_or_refused_but_break_nothing(server: RunningServer, depth: int):
    deep = "[" * depth + "]" * depth
    hi = '{"role": "user", "content": "Hi"'
    for body in (
        f'{{"messages": [{hi}}}], "chat_template_kwargs": {{"x": {deep}}}, "max_tokens": 1}}',
        f'{{"messages": [{hi}, "x": {deep}}}], "max_tokens": 1}}',
        f'{{"messages": {deep}}}',
    ):
        answer = server.post(
            "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code in (200, 400), answer.text


def test_half_a_character_is_refused_and_never_breaks_an_answer(server: RunningServer):
    headers = {"Content-Type": "application/json"}
    for body in (
        rb'{"prompt": "\ud800"}',
        rb'{"prompt": "a", "stop": "\ud800"}',
        rb'{"prompt": "a", "cache_salt": "\ud800"}',
        rb'{"prompt": "a", "bad_words": ["\ud800"]}',
        rb'{"prompt": "a", "model": "\ud800"}',
    ):
        answer = server.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["message"]


def test_a_body_without_its_content_type_is_told_so(server: RunningServer):
    error = server.error("/v1/completions", 400, content=b'{"prompt": "a"}')
    assert "application/json" in error["message"]


def test_unknown_models_paths_and_methods_are_named(server: RunningServer):
    assert server.chat_error(404, model="gpt-17")["code"] == "model_not_found"
    nothing = server.error("/v1/nothing", 404)
    assert nothing["code"] == "not_found"
    assert "no /v1/nothing here: GET /docs" in nothing["message"]
    assert server.error("/v1/models", 405)["code"] == "method_not_allowed"
    with pytest.raises(openai.NotFoundError):
        server.client().chat.completions.create(model="gpt-17", messages=HI)


def test_request_ids_go_in_and_out(server: RunningServer):
    body = {"prompt": "a", "max_tokens": 1}
    named = server.post("/v1/completions", json=body, headers={"X-Request-Id": "my-id.1"})
    assert named.headers["X-Request-Id"] == "my-id.1"
    server.wait_for_line("my-id.1", "status=200")
    for bad in ("x" * 200, "a b", "a\tb"):
        given = server.post("/v1/completions", json=body, headers={"X-Request-Id": bad}).headers[
            "X-Request-Id"
        ]
        assert given.startswith("req-")
    assert server.get("/v1/nothing").headers["X-Request-Id"]


def test_clients_that_leave_have_their_requests_aborted_at_once(server: RunningServer):
    body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}  # takes a minute, if nobody ends it

    async def stream_and_leave(client: httpx.AsyncClient) -> None:
        url = f"{server.url}/v1/completions"
        async with client.stream("POST", url, json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                return

    async def wait_and_leave(client: httpx.AsyncClient) -> None:
        await client.post(f"{server.url}/v1/completions", json=body, timeout=120)
        pytest.fail("it was answered")

    async def stay(client: openai.AsyncOpenAI) -> str:
        chunks = await client.completions.create(
            model=MODEL, prompt="One, two,", max_tokens=40, temperature=0, stream=True
        )
        return "".join([c.choices[0].text async for c in chunks])

    async def run() -> list[str]:
        async with httpx.AsyncClient(timeout=30) as client, server.async_client() as stayer:
            waiting = [asyncio.create_task(wait_and_leave(client)) for _ in range(4)]
            leavers = [stream_and_leave(client) for _ in range(4)]
            stayed = await asyncio.gather(*(stay(stayer) for _ in range(8)), *leavers)
            deadline = time.monotonic() + PATIENCE
            while (await asyncio.to_thread(server.pool))["requests_open"] != 4:  # those that wait
                assert time.monotonic() < deadline
            for one in waiting:
                one.cancel()
            await asyncio.wait(waiting)
            return stayed[:8]

    before = server.metric("requests_disconnected_total")
    texts = asyncio.run(run())
    server.wait_idle()
    assert len(set(texts)) == 1
    server.wait_metric(before + 8, "requests_disconnected_total")

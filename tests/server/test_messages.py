"""/v1/messages through Anthropic's client, against the real server and the real model."""

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.running import MODEL, RunningServer

PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=60)


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 30, "messages": PARIS, "temperature": 0, **more}


def ask(**more: Any) -> dict[str, Any]:
    """The same for the client, which has no parameters for sampling any more; the API still does."""
    asked = body(**more)
    sampling = {"temperature", "top_p", "top_k", "cache_salt"} & set(asked)
    extra = {name: asked.pop(name) for name in sampling}
    return {**asked, "extra_body": extra}


def test_a_question_gets_its_answer_and_an_honest_bill(client: anthropic.Anthropic):
    asked = ask(cache_salt="messages")
    message = client.messages.create(**asked)
    assert [block.text for block in message.content] == [ANSWER]
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message._request_id
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (37, 0, 8)
    usage = client.messages.create(**asked).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (5, 32)


def test_system_and_turns_are_the_chat_that_they_stand_for(
    server: RunningServer, client: anthropic.Anthropic
):
    turns: Any = [
        *PARIS,
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
        {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]},
    ]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(**ask(messages=turns, system=system))
    chat = server.client().chat.completions.create(
        model=MODEL,
        temperature=0,
        max_tokens=30,
        messages=[
            {"role": "system", "content": "Be brief."},
            *PARIS,
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "And of Italy?"},
        ],
    )
    assert message.content[0].text == chat.choices[0].message.content
    counted = client.messages.count_tokens(model=MODEL, messages=turns, system=system)
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_a_stream_has_anthropics_events_and_the_same_message(
    server: RunningServer, client: anthropic.Anthropic
):
    with client.messages.stream(**ask()) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (ANSWER, "end_turn")
    assert final.usage.output_tokens == 8
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == 37
    events = list(client.messages.create(**ask(), stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0].message.usage
    assert start.input_tokens + start.cache_read_input_tokens == 37
    raw = server.post("/v1/messages", json=body(stream=True, max_tokens=1)).text
    assert "event: ping\n" in raw
    for block in raw.strip().split("\n\n"):
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_the_async_client_works_too(server: RunningServer):
    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="any", max_retries=0) as client:
            whole, streamed = await asyncio.gather(client.messages.create(**ask()), in_pieces(client))
            assert whole.content[0].text == streamed == ANSWER

    async def in_pieces(client: anthropic.AsyncAnthropic) -> str:
        async with client.messages.stream(**ask()) as stream:
            return "".join([text async for text in stream.text_stream])

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_ends_the_message_before_it_and_is_named(client: anthropic.Anthropic, stream: bool):
    asked = ask(stop_sequences=["never", " France"])
    if stream:
        with client.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert message.content[0].text == "The capital of"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " France")


def test_limits_and_begun_answers_work(client: anthropic.Anthropic):
    message = client.messages.create(**ask(max_tokens=3))
    assert (message.content[0].text, message.stop_reason) == ("The capital of", "max_tokens")
    begun = [*PARIS, {"role": "assistant", "content": "The capital of France is"}]
    assert client.messages.create(**ask(messages=begun)).content[0].text == " Paris."
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    tolerated = ask(thinking=thinking, metadata={"user_id": "me"}, max_tokens=2, top_k=5, top_p=0.9)
    assert client.messages.create(**tolerated).content


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        (
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            "prompt is too long: 9031 tokens > 8191",
        ),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_wrong_field_is_a_400_in_anthropics_shape(server: RunningServer, fields: dict, named: str):
    answer = server.post("/v1/messages", json=body(**fields))
    assert answer.status_code == 400, answer.text
    said = answer.json()
    assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
    assert named in said["error"]["message"]
    assert said["request_id"] == answer.headers["request-id"]


def test_unknown_models_paths_and_methods_have_anthropics_shape_too(
    server: RunningServer, client: anthropic.Anthropic
):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**ask(model="claude-17"))
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert server.post("/v1/messages/other", json={}).json()["error"]["type"] == "not_found_error"
    assert server.get("/v1/messages").json()["type"] == "error"
    for content in (b"{", b"[]", rb'{"max_tokens": 1, "messages": [{"role": "user", "content": "\ud800"}]}'):
        answer = server.post("/v1/messages", content=content, headers={"Content-Type": "application/json"})
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_client_that_leaves_ends_its_generation(server: RunningServer):
    asked = body(stream=True, max_tokens=8000, ignore_eos=True)  # takes a minute
    with httpx.stream("POST", f"{server.url}/v1/messages", json=asked, timeout=30) as response:
        next(response.iter_lines())
    server.wait_idle()

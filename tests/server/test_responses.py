"""/v1/responses through the official client, against the real server and the real model."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.server.running import MODEL, RunningServer

PARIS = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client(timeout=60)


def test_a_question_gets_its_answer_and_an_honest_bill(client: openai.OpenAI):
    response = client.responses.create(
        model=MODEL, input=PARIS, temperature=0, metadata={"a": "b"}, extra_body={"cache_salt": "responses"}
    )
    assert response.output_text == ANSWER
    assert (response.object, response.status, response.model) == ("response", "completed", MODEL)
    assert response.id.startswith("resp_")
    assert response.metadata == {"a": "b"}
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (37, 8, 45)
    assert usage.input_tokens_details.cached_tokens == 0
    assert response.error is None
    assert response.incomplete_details is None


def test_instructions_and_items_are_the_chat_that_they_stand_for(client: openai.OpenAI):
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": PARIS}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": ANSWER}]},
        {"role": "user", "content": "And of Italy?"},
    ]
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": PARIS},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And of Italy?"},
    ]
    response = client.responses.create(
        model=MODEL, instructions="Be brief.", input=items, temperature=0, max_output_tokens=20
    )
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    counted = client.responses.input_tokens.count(model=MODEL, instructions="Be brief.", input=items)
    assert counted.input_tokens == chat.usage.prompt_tokens


def test_a_conversation_goes_on_from_a_kept_response(client: openai.OpenAI):
    first = client.responses.create(
        model=MODEL, input=PARIS, temperature=0, instructions="Be brief.", max_output_tokens=20
    )
    second = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=20
    )
    messages: Any = [
        {"role": "user", "content": PARIS},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=20)
    assert second.output_text == chat.choices[0].message.content
    # the first one's instructions are not carried over
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model=MODEL, input="Hm?", previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    kept = client.responses.retrieve(second.id)
    assert kept == second
    assert [part.text for item in client.responses.input_items.list(second.id) for part in item.content] == [
        "And of Italy?",
        first.output_text,
        PARIS,
    ]
    page = client.responses.input_items.list(second.id, limit=2, order="asc")
    assert (page.data[0].content[0].text, page.has_more) == (PARIS, True)
    assert len(list(page)) == 3  # it turns the page by itself
    third = client.responses.create(
        model=MODEL, input="And Spain?", previous_response_id=second.id, temperature=0, max_output_tokens=16
    )
    assert third.usage.input_tokens > second.usage.input_tokens


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI):
    response = client.responses.create(model=MODEL, input=PARIS, store=False, max_output_tokens=1)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete("resp_nothing")


def test_a_limit_makes_a_response_incomplete(client: openai.OpenAI):
    response = client.responses.create(model=MODEL, input=PARIS, temperature=0, max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "The capital of")
    assert response.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(
        model=MODEL, input=PARIS, temperature=0, max_output_tokens=3, stream=True
    )
    assert last.type == "response.incomplete"
    assert last.response.output_text == "The capital of"


def test_a_stream_tells_everything_in_typed_events(client: openai.OpenAI):
    events = list(client.responses.create(model=MODEL, input=PARIS, temperature=0, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == ANSWER
    response = events[-1].response
    assert response.output_text == ANSWER
    assert response.usage.output_tokens == 8
    assert client.responses.retrieve(response.id) == response


def test_logprobs_come_when_they_are_included(client: openai.OpenAI):
    asked: Any = {
        "model": MODEL,
        "input": PARIS,
        "temperature": 0,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    }
    whole = client.responses.create(**asked).output[0].content[0].logprobs
    assert len(whole) == 8
    assert "".join(token.token for token in whole[:-1]) == ANSWER
    assert all(len(token.top_logprobs) == 2 for token in whole)
    events = list(client.responses.create(**asked, stream=True))
    streamed = [t.token for e in events if e.type == "response.output_text.delta" for t in e.logprobs]
    assert streamed == [token.token for token in whole]
    assert events[-1].response.output[0].content[0].logprobs == whole


def test_the_clients_stream_helper_works_both_ways(server: RunningServer, client: openai.OpenAI):
    with client.responses.stream(model=MODEL, input=PARIS, temperature=0) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == ANSWER
        assert stream.get_final_response().output_text == ANSWER

    async def run() -> None:
        async with server.async_client() as aclient:
            created = await aclient.responses.create(model=MODEL, input=PARIS, temperature=0)
            async with aclient.responses.stream(
                model=MODEL, input="And of Italy?", previous_response_id=created.id, temperature=0
            ) as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_response()
            assert final.output_text
            kept = await aclient.responses.retrieve(final.id)
            assert kept.output_text == final.output_text
            await aclient.responses.delete(final.id)

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_generation_and_keeps_nothing(server: RunningServer):
    before = server.metric("stored_responses")
    body = {"input": "Hi", "stream": True, "max_output_tokens": 8000, "ignore_eos": True}  # takes a minute
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=30) as response:
        next(response.iter_lines())
    server.wait_idle()
    assert server.metric("stored_responses") == before


def test_too_long_a_conversation_is_refused_or_loses_its_oldest_turns(client: openai.OpenAI):
    items: Any = [
        {"role": "user", "content": "word " * 9000},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Hm."},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": PARIS},
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input=items)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    settings: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 2}
    response = client.responses.create(input=items, truncation="auto", **settings)
    assert (
        response.usage.input_tokens == client.responses.create(input=items[2:], **settings).usage.input_tokens
    )
    assert len(client.responses.input_items.list(response.id).data) == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": "\0", "max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c", "previous_response_id": "r"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"include": "x"}, "include"),
        ({"text": {"format": {"type": "lark"}}}, "text.format"),
    ],
    ids=str,
)
def test_a_wrong_field_is_a_400_that_names_it(server: RunningServer, fields: dict, param: str):
    error = server.error("/v1/responses", 400, json={"input": "Hi", "max_output_tokens": 2, **fields})
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_half_characters_and_towers_of_brackets_break_nothing(server: RunningServer):
    deep = "[" * 900 + "]" * 900
    for body in (
        rb'{"input": "\ud800"}',
        rb'{"input": [{"role": "user", "id": "\ud800", "content": "a"}]}',
        rb'{"input": "a", "metadata": {"a": "\ud800"}}',
        rb'{"input": "a", "previous_response_id": "\ud800"}',
        b'{"input": "a", "max_output_tokens": 1, "tools": [{"type": "function", "name": "f", "parameters": {"x": '
        + deep.encode()
        + b"}}]}",
        b'{"input": ' + deep.encode() + b"}",
    ):
        answer = server.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400, 404), answer.text


def test_wrong_questions_about_kept_responses_are_named(server: RunningServer, client: openai.OpenAI):
    response = client.responses.create(model=MODEL, input=PARIS, max_output_tokens=1)
    for query, param in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
    ):
        answer = server.get(f"/v1/responses/{response.id}/input_items?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert server.get(f"/v1/responses/{response.id}?stream=true").status_code == 400
    missing = server.get("/v1/responses/resp_x/input_items")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "response_not_found")
    assert client.models.list().data[0].id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-17", input="Hi")


def test_a_background_stream_outlives_its_reader_and_is_cancelled(
    server: RunningServer, client: openai.OpenAI
):
    settings: Any = {"max_output_tokens": 6000, "extra_body": {"ignore_eos": True}}  # takes a minute
    stream = client.responses.create(model=MODEL, input="Hi", background=True, stream=True, **settings)
    created = next(stream)
    assert next(stream).type == "response.queued"
    stream.close()
    again = client.responses.retrieve(created.response.id, stream=True, starting_after=1)
    assert (event := next(again)).type == "response.in_progress"
    assert event.sequence_number == 2
    assert client.responses.retrieve(event.response.id).status == "in_progress"
    assert client.responses.cancel(event.response.id).status == "cancelled"
    assert [event.type for event in again][-1] == "response.cancelled"
    assert client.responses.retrieve(event.response.id).status == "cancelled"
    server.wait_idle()

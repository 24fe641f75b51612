"""State that OpenAI's own client keeps with the server: stored chats, conversations, responses in the background."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import openai
import pytest

from quire.core.errors import EngineDead, InvalidRequest
from quire.server import conversations
from quire.server.responses import background
from tests.server.scripted import ScriptedEngine, scripted_app, update
from tests.server.test_transcripts import CALLING, PARSERS, TOOLS, plain

Client = openai.AsyncOpenAI
HI: Any = [{"role": "user", "content": "Hi"}]
ASKED: Any = {"model": "scripted", "input": "Hi"}


def run(
    scene: Callable[[Client], Awaitable[None]],
    script: Sequence[Any] = (),
    fault: Exception | None = None,
    **settings: Any,
) -> None:
    engine = ScriptedEngine(script or plain("Hel", "lo", ""), fault)
    app = scripted_app(engine, **settings)

    async def main() -> None:
        async with openai.AsyncOpenAI(
            base_url="http://test/v1",
            api_key="one",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=httpx.ASGITransport(app)),
        ) as client:
            await asyncio.wait_for(scene(client), 20)

    asyncio.run(main())


async def ended(client: Client, response_id: str) -> Any:
    while (response := await client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.005)
    return response


# Chat completions


def test_a_stored_chat_is_listed_retrieved_updated_and_deleted():
    async def scene(client: Client) -> None:
        chats = client.chat.completions
        asked: Any = {"model": "scripted", "messages": HI}
        await chats.create(**asked)
        first = await chats.create(**asked, store=True, metadata={"a": "1", "b": "2"})
        second = await chats.create(**asked, store=True)
        assert [one.id for one in (await chats.list()).data] == [first.id, second.id]
        assert [one.id for one in (await chats.list(order="desc", limit=1)).data] == [second.id]
        assert [one.id async for one in await chats.list(limit=1)] == [first.id, second.id]
        assert [one.id for one in (await chats.list(metadata={"a": "1"})).data] == [first.id]
        assert (await chats.list(metadata={"a": "2"})).data == []
        assert (await chats.list(model="other")).data == []
        stored = await chats.retrieve(first.id)
        assert (stored.choices, stored.usage, stored.model) == (first.choices, first.usage, "scripted")
        assert (await chats.update(first.id, metadata={"c": "3"})).metadata == {"c": "3"}
        assert (await chats.list(metadata={"c": "3"})).data[0].id == first.id
        assert (await chats.delete(first.id)).deleted
        for call in (chats.retrieve, chats.delete, chats.messages.list):
            with pytest.raises(openai.NotFoundError, match="no chat completion"):
                await call(first.id)

    run(scene)


def test_a_stored_stream_has_its_messages_and_the_ids_of_its_calls():
    async def scene(client: Client) -> None:
        said: Any = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        ]
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="scripted", messages=said, tools=TOOLS, stream=True, store=True
            )
        ]
        stored = await client.chat.completions.retrieve(chunks[0].id)
        (call,) = stored.choices[0].message.tool_calls
        streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or () if call.id]
        assert (call.id, call.function.name) == (streamed[0].id, "get_weather")
        first, second = (await client.chat.completions.messages.list(stored.id)).data
        assert (first.id, first.content, first.content_parts) == (f"{stored.id}-0", "Be brief.", None)
        assert (second.content, second.content_parts[0].text) == (None, "Hi")

    run(scene, plain(*CALLING), **PARSERS)


def test_chats_count_their_input_tokens():
    async def scene(client: Client) -> None:
        whole = await client.chat.completions.create(model="scripted", messages=HI)
        counted = await client.post(
            "/chat/completions/input_tokens", body={"messages": HI}, cast_to=httpx.Response
        )
        assert counted.json() == {
            "object": "response.input_tokens",
            "input_tokens": whole.usage.prompt_tokens,
        }

    run(scene)


# Conversations


def test_a_response_continues_a_conversation_and_adds_to_it():
    async def scene(client: Client) -> None:
        made = await client.conversations.create(
            items=[{"role": "user", "content": "Before"}], metadata={"a": "1"}
        )
        assert (await client.conversations.retrieve(made.id)) == made
        response = await client.responses.create(**ASKED, conversation=made.id)
        assert response.conversation.id == made.id
        again = await client.responses.create(**ASKED, conversation={"id": made.id}, stream=True)
        assert [event async for event in again][-1].response.conversation.id == made.id
        items = (await client.conversations.items.list(made.id, order="asc")).data
        texts = [(item.role, item.content[0].text) for item in items]
        turn = [("user", "Hi"), ("assistant", "Hello")]
        assert texts == [("user", "Before"), *turn, *turn]
        alone = await client.responses.input_tokens.count(**ASKED)
        counted = await client.responses.input_tokens.count(**ASKED, conversation=made.id)
        assert counted.input_tokens > alone.input_tokens
        assert (await client.conversations.items.retrieve(items[1].id, conversation_id=made.id)) == items[1]
        assert (await client.conversations.items.delete(items[1].id, conversation_id=made.id)).id == made.id
        added = await client.conversations.items.create(made.id, items=[{"role": "user", "content": "More"}])
        listed = [item.id for item in (await client.conversations.items.list(made.id)).data]
        assert (listed[0], len(listed)) == (added.data[0].id, 5)
        with pytest.raises(openai.NotFoundError, match="no item"):
            await client.conversations.items.retrieve(items[1].id, conversation_id=made.id)
        assert (await client.conversations.update(made.id, metadata={"b": "2"})).metadata == {"b": "2"}
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError, match="no conversation"):
            await client.responses.create(**ASKED, conversation=made.id)

    run(scene)


def test_a_conversation_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "MAX_CONVERSATION_BYTES", 500)

    async def scene(client: Client) -> None:
        item: Any = {"role": "user", "content": "x" * 300}
        made = await client.conversations.create(items=[item])
        with pytest.raises(openai.BadRequestError, match="larger than 500 bytes"):
            await client.conversations.items.create(made.id, items=[item])
        with pytest.raises(openai.BadRequestError, match="larger than 500 bytes"):
            await client.conversations.create(items=[item, item])
        with pytest.raises(openai.BadRequestError, match="at most 20"):
            await client.conversations.create(items=[{"role": "user", "content": "x"}] * 21)

    run(scene)


def test_an_item_is_referred_to_by_its_id():
    async def scene(client: Client) -> None:
        first = await client.responses.create(**ASKED)
        said = first.output[0].id
        asked: Any = [{"type": "item_reference", "id": said}, {"role": "user", "content": "And?"}]
        response = await client.responses.create(model="scripted", input=asked)
        items = (await client.responses.input_items.list(response.id, order="asc")).data
        assert [item.content[0].text for item in items] == ["Hello", "And?"]
        assert items[0].id == said
        await client.responses.create(model="scripted", input=[{"id": said}, *asked[1:]])
        with pytest.raises(openai.NotFoundError, match="msg_none"):
            await client.responses.create(
                model="scripted", input=[{"type": "item_reference", "id": "msg_none"}]
            )

    run(scene)


# In the background


def test_a_response_in_the_background_is_polled():
    async def scene(client: Client) -> None:
        response = await client.responses.create(**ASKED, background=True)
        assert (response.status, response.background, response.output) == ("queued", True, [])
        with pytest.raises(openai.BadRequestError, match="still runs"):
            await client.responses.create(**ASKED, previous_response_id=response.id)
        assert len((await client.responses.input_items.list(response.id)).data) == 1
        response = await ended(client, response.id)
        assert (response.status, response.output_text, response.usage.output_tokens) == (
            "completed",
            "Hello",
            5,
        )
        assert (await client.responses.cancel(response.id)).status == "completed"
        with pytest.raises(openai.BadRequestError, match="stream: true"):
            await client.responses.retrieve(response.id, stream=True)
        foreground = await client.responses.create(**ASKED)
        with pytest.raises(openai.BadRequestError, match="background: true"):
            await client.responses.cancel(foreground.id)

    run(scene)


def test_a_stream_in_the_background_is_resumed_where_it_broke_off():
    async def scene(client: Client) -> None:
        stream = await client.responses.create(**ASKED, background=True, stream=True)
        events = [event async for event in stream]
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "queued", "in_progress"]
        assert [event.response.status for event in events[:3]] == ["queued", "queued", "in_progress"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        rid = events[0].response.id
        for after in (None, 0, 4, len(events) - 2, len(events) - 1, 1000):
            query: Any = {} if after is None else {"starting_after": after}
            again = [event async for event in await client.responses.retrieve(rid, stream=True, **query)]
            assert again == events[0 if after is None else after + 1 :]
        with pytest.raises(openai.BadRequestError, match="starting_after"):
            await client.responses.retrieve(rid, stream=True, starting_after=-1)

    run(scene)


def test_a_response_is_cancelled_while_it_runs():
    async def scene(client: Client) -> None:
        response = await client.responses.create(**ASKED, background=True)
        while not response.output:
            await asyncio.sleep(0.005)
            response = await client.responses.retrieve(response.id)
        assert response.status == "in_progress"
        response = await client.responses.cancel(response.id)
        assert (response.status, response.output_text) == ("cancelled", "Hel")
        assert (await client.responses.cancel(response.id)).status == "cancelled"
        running = await client.responses.create(**ASKED, background=True)
        await client.responses.delete(running.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(running.id)

    run(scene, [[update("Hel")]])


def test_a_response_that_breaks_in_the_background_says_so():
    async def scene(client: Client) -> None:
        response = await client.responses.create(**ASKED, background=True)
        response = await ended(client, response.id)
        assert (response.status, response.error.message) == ("failed", "the engine died")

    run(scene, [[update("Hel")]], EngineDead("the engine died"))


def test_the_background_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "MAX_RUNNING", 1)

    async def scene(client: Client) -> None:
        first = await client.responses.create(**ASKED, background=True)
        with pytest.raises(openai.RateLimitError, match="in the background already"):
            await client.responses.create(**ASKED, background=True)
        await client.responses.cancel(first.id)
        both = [client.responses.create(**ASKED, background=True) for _ in range(2)]  # at the same time
        started = await asyncio.gather(*both, return_exceptions=True)
        assert sum(isinstance(one, openai.RateLimitError) for one in started) == 1
        for one in started:
            if not isinstance(one, BaseException):
                await client.responses.cancel(one.id)
        second = await client.responses.create(**ASKED, background=True)
        await client.responses.cancel(second.id)
        with pytest.raises(openai.RateLimitError, match="bytes of input"):
            await client.responses.create(model="scripted", input="x" * 3000, background=True)

    run(scene, [[update("Hel")]], max_stored_responses_bytes=3000)


def test_a_key_holds_its_place_until_its_background_response_ends():
    async def scene(client: Client) -> None:
        first = await client.responses.create(**ASKED, background=True)
        with pytest.raises(openai.RateLimitError, match="under way"):
            await client.responses.create(**ASKED)
        assert (await client.responses.retrieve(first.id)).status in ("queued", "in_progress")
        assert (await client.responses.cancel(first.id)).status == "cancelled"
        second = await client.responses.create(**ASKED, background=True)
        await client.responses.delete(second.id)

    run(scene, [[update("Hel")]], api_keys=("one",), max_concurrent_per_key=1)


def test_events_that_are_too_old_are_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "MAX_EVENT_BYTES", 100)
    events = background.EventLog()
    for number in range(10):
        events.add(b'event: x\ndata: {"sequence_number":%d}\n\n' % number)
    assert (events.first, events.end_number) == (8, 10)
    kept = background.ended_log(events.encoded())
    assert kept is not None
    assert (kept.first, kept.since(9)) == (8, events.since(9))
    with pytest.raises(InvalidRequest, match="before 8 are no longer kept"):
        kept.since(7)


def test_a_store_that_is_too_small_says_so_and_loses_nothing():
    async def scene(client: Client) -> None:
        item: Any = {"role": "user", "content": "x" * 300}
        made = await client.conversations.create(items=[item])
        with pytest.raises(openai.BadRequestError, match="cannot keep"):
            await client.conversations.items.create(made.id, items=[item, item])
        assert len((await client.conversations.items.list(made.id)).data) == 1

    run(scene, max_stored_responses_bytes=1200)


def test_what_is_stored_and_what_runs_belongs_to_its_key():
    async def scene(client: Client) -> None:
        other = client.with_options(api_key="two")
        chat = await client.chat.completions.create(model="scripted", messages=HI, store=True)
        made = await client.conversations.create(items=[{"role": "user", "content": "Hi"}])
        (item,) = (await client.conversations.items.list(made.id)).data
        running = await client.responses.create(**ASKED, background=True)
        reference: Any = [{"type": "item_reference", "id": item.id}]
        assert (await other.chat.completions.list()).data == []
        for call in (
            other.chat.completions.retrieve(chat.id),
            other.chat.completions.update(chat.id, metadata={}),
            other.chat.completions.messages.list(chat.id),
            other.conversations.retrieve(made.id),
            other.conversations.items.list(made.id),
            other.responses.create(**ASKED, conversation=made.id),
            other.responses.create(model="scripted", input=reference),
            other.responses.retrieve(running.id),
            other.responses.cancel(running.id),
            other.responses.delete(running.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert (await ended(client, running.id)).status == "completed"
        assert (await client.responses.create(model="scripted", input=reference)).output_text == "Hello"

    run(scene, api_keys=("one", "two"))


# Compaction


def test_a_conversation_is_compacted_and_goes_on():
    async def scene(client: Client) -> None:
        said: Any = [
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Two"},
            {"role": "user", "content": "Three"},
        ]
        compacted = await client.responses.compact(model="scripted", input=said)
        assert compacted.object == "response.compaction"
        assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
        assert compacted.usage.output_tokens == 5
        output: Any = [item.to_dict() for item in compacted.output]
        more = [*output, {"role": "user", "content": "Go on"}]
        response = await client.responses.create(model="scripted", input=more)
        assert response.output_text == "Hello"
        await client.responses.compact(model="scripted", previous_response_id=response.id)
        foreign = {"type": "compaction", "encrypted_content": "gAAAAAB"}
        with pytest.raises(openai.BadRequestError, match="did not make"):
            await client.responses.create(model="scripted", input=[foreign])
        with pytest.raises(openai.BadRequestError, match="input is empty"):
            await client.responses.compact(model="scripted", input=[])

    run(scene)

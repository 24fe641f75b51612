"""SseWriter alone: comments keep a silent stream alive, and never get between an event and its client."""

import asyncio
from typing import Any

from quire.server.reply import COMMENT, SseWriter, TextEvent, event


class Client:
    """Takes ASGI messages; `reads` says whether it takes body messages now."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.is_offered = asyncio.Event()  # a message, taken or not
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        self.is_offered.set()
        await self.reads.wait()
        self.messages.append(dict(message))

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if "body" in message]


def test_a_silent_stream_begins_with_a_comment():
    async def run() -> None:
        client = Client()
        async with SseWriter(client.send, [], 0.01) as writer:
            await asyncio.wait_for(client.is_offered.wait(), 30)
            await writer.send(b"data: 1\n\n")
        assert client.messages[0]["type"] == "http.response.start"
        assert set(client.bodies[:-1]) == {COMMENT}
        assert client.bodies[-1] == b"data: 1\n\n"

    asyncio.run(run())


def test_a_client_that_reads_slowly_gets_no_comments_behind_its_event():
    async def run() -> None:
        client = Client()
        async with SseWriter(client.send, [], 0.01) as writer:
            await writer.send(b"data: 1\n\n")
            client.reads.clear()
            sending = asyncio.create_task(writer.send(b"data: 2\n\n"))
            await asyncio.sleep(0.1)
            client.reads.set()
            await sending
        assert client.bodies == [b"data: 1\n\n", b"data: 2\n\n"]

    asyncio.run(run())


def test_an_event_waits_for_a_comment_that_is_on_its_way():
    async def run() -> None:
        client = Client()
        client.reads.clear()
        async with SseWriter(client.send, [], 0.01) as writer:
            # the comment that begins the response waits for the client
            await asyncio.wait_for(client.is_offered.wait(), 30)
            sending = asyncio.create_task(writer.send(b"data: 1\n\n"))
            await asyncio.sleep(0)
            client.reads.set()
            await sending
        assert [message["type"] for message in client.messages].count("http.response.start") == 1
        assert client.bodies[:2] == [COMMENT, b"data: 1\n\n"]

    asyncio.run(run())


def test_a_text_event_is_the_event_with_its_text():
    payload = {"id": 'a"b', "choices": [{"delta": {"content": ""}, "more": None}]}
    filled = TextEvent(payload, "content")
    for text in ("", "a long text, longer than any before", "x", '"\\\n\u2028', "日本😀"):
        whole = {"id": 'a"b', "choices": [{"delta": {"content": text}, "more": None}]}
        assert filled.encode(text) == event(whole)

"""A stream gives its updates in order, once, and ends with what ended it."""

import asyncio

import pytest

from quire.core.errors import EngineDead
from quire.core.step import SequenceUpdate
from quire.engine.streams import OpenStreams, Stream


def update(token_id: int) -> SequenceUpdate:
    return SequenceUpdate("a", 0, (token_id,))


def test_updates_that_nobody_took_yet_come_together():
    async def run():
        stream = Stream(["a"], lambda _: None)
        waiting = asyncio.create_task(stream.updates())
        await asyncio.sleep(0)
        stream.push(update(1))
        assert await waiting == [update(1)]
        stream.push(update(2))
        stream.push(update(3))
        assert await stream.updates() == [update(2), update(3)]

    asyncio.run(run())


def test_a_fault_aborts_at_once_and_reaches_the_consumer_after_what_came_before():
    async def run():
        closed = []
        stream = Stream(["a"], closed.append)
        stream.push(update(1))
        stream.fail(EngineDead("gone"))
        assert closed == [stream]
        assert await stream.updates() == [update(1)]
        with pytest.raises(EngineDead, match="gone"):
            await stream.updates()

    asyncio.run(run())


def test_the_first_fault_is_the_one_that_counts():
    async def run():
        stream = Stream(["a"], lambda _: None)
        waiting = asyncio.create_task(stream.updates())
        await asyncio.sleep(0)
        stream.fail(EngineDead("first"))
        stream.fail(EngineDead("second"))
        with pytest.raises(EngineDead, match="first"):
            await waiting

    asyncio.run(run())


def test_closing_twice_leaves_the_next_stream_of_that_id_alone():
    """Its first close came from an abort by id, the second from its consumer, who comes to it later."""
    aborted, ended = [], []
    streams = OpenStreams(aborted.append, ended.append)
    first = streams.open(["same"])
    first.fail(EngineDead("aborted"))
    second = streams.open(["same"])
    first.close()
    assert streams.get("same") is second
    assert aborted == [["same"]]
    assert ended == ["same"]
    second.done("same")
    second.close()
    assert len(streams) == 0
    assert aborted == [["same"]]
    assert ended == ["same", "same"]

"""/v1/batches with OpenAI's client and /v1/messages/batches with Anthropic's: progress, cancel, restart."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.server.retrieval import batch_jobs
from tests.server.running import MODEL, PATIENCE, RunningServer
from tests.server.scripted import ScriptedEngine, scripted_app
from tests.server.test_transcripts import plain

anthropic = pytest.importorskip("anthropic")
HI = [{"role": "user", "content": "Hi"}]
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
def client(data_server: RunningServer) -> openai.OpenAI:
    return data_server.client(api_key="alice")


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    message = {"messages": [{"role": "user", "content": f"Say {custom_id}"}], "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**message, **body}}


def create(client: openai.OpenAI, lines: list[Any], url: Any = "/v1/chat/completions") -> Any:
    content = "\n".join(text if isinstance(text, str) else json.dumps(text) for text in lines).encode()
    file = client.files.create(file=("batch.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"a": "b"}
    )


def ended(client: openai.OpenAI, batch: Any) -> Any:
    deadline = time.monotonic() + 2 * PATIENCE
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def rows(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    lines = client.files.content(file_id).text.splitlines()
    return {row["custom_id"]: row for row in map(json.loads, lines)}


def test_every_method_of_batches(client: openai.OpenAI) -> None:
    made = create(client, [line(f"r{number}") for number in range(5)] + [line("bad", max_tokens=-1)])
    assert (made.object, made.metadata) == ("batch", {"a": "b"})
    batch = ended(client, made)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
    answers, errors = rows(client, batch.output_file_id), rows(client, batch.error_file_id)
    assert set(answers) == {f"r{number}" for number in range(5)}
    body = answers["r3"]["response"]["body"]
    assert body["choices"][0]["message"]["content"]
    assert errors["bad"]["response"]["status_code"] == 400
    usages = [row["response"]["body"]["usage"] for row in answers.values()]
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in usages) > 0
    assert batch.model == MODEL
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    other = ended(client, create(client, [line("one")]))
    listed = [entry.id for entry in client.batches.list(limit=1)]
    assert listed.index(other.id) < listed.index(batch.id)
    with pytest.raises(openai.BadRequestError, match="is completed and cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_batches_share_an_application_that_is_built_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, threads = batch_jobs.create_app, []
    monkeypatch.setattr(
        batch_jobs, "create_app", lambda *given: threads.append(threading.get_ident()) or make(*given)
    )
    app = scripted_app(ScriptedEngine(plain("Hel", "lo", "")), data_dir=str(tmp_path))

    async def ask() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            requests = [{"custom_id": "a", "params": {"max_tokens": 3, "messages": HI}}]
            batches = [client.post("/v1/messages/batches", json={"requests": requests}) for _ in range(3)]
            for made in await asyncio.gather(*batches):
                status = f"/v1/messages/batches/{made.json()['id']}"
                while (await client.get(status)).json()["processing_status"] != "ended":
                    await asyncio.sleep(0.01)
                assert (await client.get(status)).json()["request_counts"]["succeeded"] == 1

    asyncio.run(asyncio.wait_for(ask(), 2 * PATIENCE))
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([line("a"), line("a")], "duplicate_custom_id"),
        (["no json"], "invalid_line"),
        ([line("a", url="/v1/embeddings")], "mismatched_endpoint"),
        ([line("a", url="/etc/passwd")], "invalid_line"),
        ([line("a", stream=True)], "invalid_line"),
        ([""], "empty_file"),
    ],
)
def test_a_wrong_file_fails_as_a_whole(client: openai.OpenAI, lines: list[Any], code: str) -> None:
    batch = ended(client, create(client, [*lines]))
    assert batch.status == "failed"
    assert batch.errors.data[0].code == code
    assert batch.output_file_id is None


def test_wrong_batches_are_refused(client: openai.OpenAI, data_server: RunningServer) -> None:
    file = client.files.create(file=("a.txt", b"x"), purpose="assistants")
    with pytest.raises(openai.BadRequestError, match="purpose 'batch'"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/videos", completion_window="24h")
    bob = data_server.client(api_key="bob")
    batch = create(client, [line("a")])
    for call in (bob.batches.retrieve, bob.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    assert bob.batches.list().data == []
    with pytest.raises(openai.NotFoundError):
        bob.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )
    ended(client, batch)


def test_a_batch_acts_for_its_key(client: openai.OpenAI, data_server: RunningServer) -> None:
    """A file search within a batch sees the stores of the batch's owner, and no others."""
    bob = data_server.client(api_key="bob")
    store = bob.vector_stores.create(name="bob's")
    search = {"type": "file_search", "vector_store_ids": [store.id]}
    body = {
        "custom_id": "a",
        "url": "/v1/responses",
        "body": {"input": "hi", "tools": [search], "max_output_tokens": 3},
    }
    own, foreign = (ended(each, create(each, [body], "/v1/responses")) for each in (bob, client))
    assert own.request_counts.completed == 1
    assert foreign.request_counts.failed == 1


def test_cancelling_keeps_what_was_answered(client: openai.OpenAI) -> None:
    quick, slow = (
        [line(f"q{n}") for n in range(3)],
        [line(f"s{n}", max_tokens=2000, ignore_eos=True) for n in range(30)],
    )
    batch = create(client, quick + slow)
    deadline = time.monotonic() + PATIENCE
    while client.batches.retrieve(batch.id).request_counts.completed < 3:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    assert 3 <= batch.request_counts.completed < 33
    assert set(rows(client, batch.output_file_id)) >= {"q0", "q1", "q2"}


def test_message_batches(data_server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=data_server.url, api_key="alice", max_retries=0)
    messages = [{"role": "user", "content": "Hi"}]
    params = {"model": MODEL, "max_tokens": 3, "messages": messages}
    requests = [
        {"custom_id": "good", "params": params},
        {"custom_id": "bad", "params": {**params, "model": "another"}},
    ]
    batch = client.messages.batches.create(requests=requests)
    assert batch.type == "message_batch"
    deadline = time.monotonic() + 4 * PATIENCE
    while batch.processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
        batch = client.messages.batches.retrieve(batch.id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
    results = {result.custom_id: result.result for result in client.messages.batches.results(batch.id)}
    assert results["good"].message.content[0].text
    assert results["bad"].error.error.type == "not_found_error"
    assert batch.id in [entry.id for entry in client.messages.batches.list(limit=1)]
    foreign = anthropic.Anthropic(base_url=data_server.url, api_key="bob", max_retries=0)
    with pytest.raises(anthropic.NotFoundError):
        foreign.messages.batches.retrieve(batch.id)
    with pytest.raises(anthropic.BadRequestError, match="earlier request"):
        client.messages.batches.create(requests=[requests[0], requests[0]])
    long = [
        {"custom_id": f"l{n}", "params": {**params, "max_tokens": 2000, "ignore_eos": True}}
        for n in range(20)
    ]
    slow = client.messages.batches.create(requests=long)
    assert client.messages.batches.cancel(slow.id).processing_status == "canceling"
    while (slow := client.messages.batches.retrieve(slow.id)).processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert slow.request_counts.canceled == 20
    assert {result.result.type for result in client.messages.batches.results(slow.id)} == {"canceled"}
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"


def test_a_server_that_was_killed_goes_on(start_server, tmp_path: Path) -> None:
    """With its batch, and with files that were not embedded yet; a lost index is built again."""
    running = start_server("--data-dir", str(tmp_path), "--embedding-model", "builtin")
    client = running.client()
    file = client.files.create(file=("moon.txt", b"The moon is made of rock."), purpose="assistants")
    store = client.vector_stores.create(name="kept", file_ids=[file.id])
    client.vector_stores.files.poll(file.id, vector_store_id=store.id, poll_interval_ms=50)
    lines = [line(f"r{n}", max_tokens=30, ignore_eos=True) for n in range(24)]
    lines[0]["body"]["max_tokens"] = 600  # far from its end when the first is answered
    batch = create(client, lines)
    late = client.files.create(file=("sun.txt", b"The sun is made of gas. " * 4000), purpose="assistants")
    client.vector_stores.files.create(store.id, file_id=late.id)
    deadline = time.monotonic() + PATIENCE
    while not (client.batches.retrieve(batch.id).request_counts or batch.request_counts).completed:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.process.kill()
    running.process.wait()
    for path in sorted((tmp_path / "index").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    again = start_server("--data-dir", str(tmp_path), "--embedding-model", "builtin")
    client = again.client()
    assert client.vector_stores.search(store.id, query="the moon").data[0].file_id == file.id
    assert (
        client.vector_stores.files.poll(late.id, vector_store_id=store.id, poll_interval_ms=50).status
        == "completed"
    )
    done = ended(client, batch)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.total) == (24, 24)
    assert len(rows(client, done.output_file_id)) == 24
    assert again.wait_for_line("batch", batch.id, "goes on")

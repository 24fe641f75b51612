"""Every method that OpenAI's client has for files, uploads, vector stores and batches, synchronous and not."""

import asyncio
import inspect
import json
from typing import Any

import openai
import pytest

from tests.server.running import RunningServer

RESOURCES = (
    "files",
    "uploads",
    "uploads.parts",
    "vector_stores",
    "vector_stores.files",
    "vector_stores.file_batches",
    "batches",
)
POLL = {"poll_interval_ms": 50}


class Called:
    """Calls methods of either client, and notes which."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.names: set[str] = set()

    async def __call__(self, name: str, /, *values: Any, **named: Any) -> Any:
        self.names.add(name)
        made = self._method(name)(*values, **named)
        return await made if inspect.isawaitable(made) else made

    def _method(self, name: str) -> Any:
        found = self._client
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def public(self) -> set[str]:
        """All methods of the resources."""
        return {
            f"{resource}.{name}"
            for resource in RESOURCES
            for name in dir(self._method(resource))
            if not name.startswith("_") and inspect.ismethod(getattr(self._method(resource), name))
        }


async def files_and_uploads(call: Called) -> None:
    file = await call("files.create", file=("a.txt", b"the moon is far away"), purpose="user_data")
    assert await call("files.retrieve", file.id) == file
    assert (await call("files.wait_for_processing", file.id)).status == "processed"
    assert file.id in [listed.id for listed in (await call("files.list")).data]
    assert (await call("files.content", file.id)).read() == b"the moon is far away"
    assert "moon" in await call("files.retrieve_content", file.id)
    assert (await call("files.delete", file.id)).deleted
    announced = {"mime_type": "text/plain", "purpose": "assistants", "filename": "n.txt"}
    whole = await call("uploads.upload_file_chunked", file=b"0123456789", bytes=10, part_size=4, **announced)
    assert (await call("files.content", whole.file.id)).read() == b"0123456789"
    upload = await call("uploads.create", bytes=3, **announced)
    part = await call("uploads.parts.create", upload.id, data=b"abc")
    assert (await call("uploads.complete", upload.id, part_ids=[part.id])).file.bytes == 3
    other = await call("uploads.create", bytes=3, **announced)
    assert (await call("uploads.cancel", other.id)).status == "cancelled"


async def stores(call: Called) -> None:
    store = await call("vector_stores.create", name="first")
    within = {"vector_store_id": store.id}
    assert (await call("vector_stores.update", store.id, name="second")).name == "second"
    assert (await call("vector_stores.retrieve", store.id)).name == "second"
    assert store.id in [listed.id for listed in (await call("vector_stores.list")).data]

    of_files = "vector_stores.files."
    content = ("a.txt", b"the moon is far away")
    file = await call("files.create", file=content, purpose="assistants")
    added = await call(of_files + "create", store.id, file_id=file.id)
    assert (await call(of_files + "poll", added.id, **within, **POLL)).status == "completed"
    again = await call(of_files + "create_and_poll", file.id, **within, **POLL)
    assert again.status == "completed"
    uploaded = await call(of_files + "upload", vector_store_id=store.id, file=content)
    assert (await call(of_files + "upload_and_poll", file=content, **within, **POLL)).status == "completed"
    assert (await call(of_files + "update", file.id, attributes={"n": 1}, **within)).attributes == {"n": 1}
    assert (await call(of_files + "retrieve", file.id, **within)).id == file.id
    assert len((await call(of_files + "list", store.id)).data) == 3
    assert (await call(of_files + "content", file.id, **within)).data[0].text == "the moon is far away"
    assert (await call(of_files + "delete", uploaded.id, **within)).deleted
    found = await call("vector_stores.search", store.id, query="how far is the moon?")
    assert file.id in [hit.file_id for hit in found.data]

    of_batches = "vector_stores.file_batches."
    batch = await call(of_batches + "create", store.id, file_ids=[file.id])
    assert (await call(of_batches + "poll", batch.id, **within, **POLL)).file_counts.completed == 1
    assert (await call(of_batches + "create_and_poll", store.id, file_ids=[file.id], **POLL)).id != batch.id
    ended = await call(of_batches + "upload_and_poll", store.id, files=[content], **POLL)
    assert (await call(of_batches + "retrieve", ended.id, **within)) == ended
    assert len((await call(of_batches + "list_files", ended.id, **within)).data) == 1
    assert (await call(of_batches + "cancel", ended.id, **within)).status == "completed"
    assert (await call("vector_stores.delete", store.id)).deleted


async def batches(call: Called) -> None:
    line = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a text"}}
    file = await call("files.create", file=("b.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = await call(
        "batches.create", input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    assert batch.id in [listed.id for listed in (await call("batches.list")).data]
    while (batch := await call("batches.retrieve", batch.id)).status in (
        "validating",
        "in_progress",
        "finalizing",
    ):
        await asyncio.sleep(0.05)
    row = json.loads((await call("files.content", batch.output_file_id)).text)
    assert len(row["response"]["body"]["data"][0]["embedding"]) == 384
    with pytest.raises(openai.BadRequestError, match="is completed and cannot be cancelled"):
        await call("batches.cancel", batch.id)


@pytest.mark.parametrize("kind", ["client", "async_client"])
@pytest.mark.filterwarnings("ignore:The `.content\\(\\)` method should be used instead")
def test_every_method_works(data_server: RunningServer, kind: str) -> None:
    async def all_of_it() -> None:
        call = Called(getattr(data_server, kind)(api_key="alice"))
        for part in (files_and_uploads, stores, batches):
            await part(call)
        assert call.names == call.public()

    asyncio.run(all_of_it())

"""/v1/files and /v1/uploads with OpenAI's client, and what they refuse."""

import asyncio
import socket
from pathlib import Path

import httpx
import openai
import pytest

from quire.server.retrieval import multipart
from tests.server.running import RunningServer
from tests.server.scripted import ScriptedEngine, scripted_app


@pytest.fixture
def client(data_server: RunningServer) -> openai.OpenAI:
    return data_server.client(api_key="alice")


def test_every_method_of_files(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"some notes\n")
    with path.open("rb") as opened:
        file = client.files.create(file=opened, purpose="assistants")
    assert (file.object, file.filename, file.bytes, file.purpose) == ("file", "notes.txt", 11, "assistants")
    assert file.expires_at is None
    assert client.files.retrieve(file.id) == file
    assert client.files.wait_for_processing(file.id).status == "processed"
    expiry = {"anchor": "created_at", "seconds": 3600}
    other = client.files.create(file=("x.jsonl", b"{}"), purpose="batch", expires_after=expiry)
    assert other.expires_at == other.created_at + 3600
    assert next(listed.id for listed in client.files.list(purpose="batch", limit=1)) == other.id
    ids = [listed.id for listed in client.files.list(limit=1, order="asc")]  # page after page
    assert ids.index(file.id) < ids.index(other.id)
    assert client.files.content(file.id).read() == b"some notes\n"
    assert client.files.delete(other.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(other.id)


def test_every_method_of_uploads(client: openai.OpenAI) -> None:
    data = bytes(range(256)) * 40
    upload = client.uploads.create(
        bytes=len(data), filename="data.bin", mime_type="application/octet-stream", purpose="user_data"
    )
    assert (upload.status, upload.file) == ("pending", None)
    parts = [
        client.uploads.parts.create(upload.id, data=data[at : at + 4096]) for at in range(0, len(data), 4096)
    ]
    done = client.uploads.complete(upload.id, part_ids=[part.id for part in parts])
    assert done.status == "completed"
    assert done.file is not None
    assert client.files.content(done.file.id).read() == data
    with pytest.raises(openai.BadRequestError, match="is completed"):
        client.uploads.cancel(upload.id)
    again = client.uploads.create(bytes=3, filename="a.txt", mime_type="text/plain", purpose="user_data")
    part = client.uploads.parts.create(again.id, data=b"abc")
    with pytest.raises(openai.BadRequestError, match="md5"):
        client.uploads.complete(again.id, part_ids=[part.id], md5="0" * 32)
    third = client.uploads.create(bytes=3, filename="a.txt", mime_type="text/plain", purpose="user_data")
    assert client.uploads.cancel(third.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.uploads.parts.create(third.id, data=b"abc")


def test_another_key_sees_no_file_and_no_upload(data_server: RunningServer, client: openai.OpenAI) -> None:
    bob = data_server.client(api_key="bob")
    file = client.files.create(file=("secret.txt", b"secret"), purpose="assistants")
    upload = client.uploads.create(bytes=3, filename="a.txt", mime_type="text/plain", purpose="user_data")
    assert file.id not in [listed.id for listed in bob.files.list()]
    for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    with pytest.raises(openai.NotFoundError):
        bob.uploads.parts.create(upload.id, data=b"abc")
    with pytest.raises(openai.BadRequestError, match="no file of this list"):
        bob.files.list(after=file.id)
    assert client.files.content(file.id).read() == b"secret"


BOUNDARY = {"Content-Type": "multipart/form-data; boundary=b", "Authorization": "Bearer alice"}
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\ntext\r\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (FILE + b"--b--\r\n", "purpose is missing"),
        (PURPOSE + b"--b--\r\n", "file is missing"),
        (PURPOSE + FILE, "ends within a part"),
        (PURPOSE + FILE + FILE + b"--b--\r\n", "sent twice"),
        (PURPOSE.replace(b"assistants", b"theft") + FILE + b"--b--\r\n", "purpose is 'theft'"),
        (PURPOSE.replace(b"assistants", b"x" * 5000) + FILE + b"--b--\r\n", "more than 4096 bytes"),
        (PURPOSE * 20 + FILE + b"--b--\r\n", "more than 16 fields"),
        (b"no multipart at all", "no valid multipart"),
        (b"", "ends within a part"),
    ],
)
def test_a_wrong_form_is_refused(data_server: RunningServer, content: bytes, message: str) -> None:
    error = data_server.error("/v1/files", 400, content=content, headers=BOUNDARY)
    assert message in error["message"]


@pytest.mark.parametrize(("name", "limit"), [("MAX_HEADERS", 0), ("MAX_HEADER_BYTES", 50)])
def test_headers_of_a_part_are_bounded(
    name: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, name, limit)
    app = scripted_app(ScriptedEngine(()), data_dir=str(tmp_path))

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/v1/files", content=PURPOSE + FILE + b"--b--\r\n", headers=BOUNDARY)

    answer = asyncio.run(post())
    assert answer.status_code == 400
    assert "Maximum header" in answer.text


def test_a_body_that_is_no_form_is_refused(data_server: RunningServer) -> None:
    headers = {"Authorization": "Bearer alice"}
    error = data_server.error("/v1/files", 400, json={"file": "text"}, headers=headers)
    assert "multipart/form-data" in error["message"]
    error = data_server.error("/v1/files", 401, content=b"", headers={})
    assert error["code"] == "invalid_api_key"


def test_expiry_and_limits_are_checked(data_server: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="outside 3600 to 2592000"):
        client.files.create(
            file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 60}
        )
    for query in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"after": "x" * 1000}):
        response = data_server.get("/v1/files", params=query, headers={"Authorization": "Bearer alice"})
        assert response.status_code == 400, query
    with pytest.raises(openai.BadRequestError, match="bytes"):
        client.uploads.create(bytes=9 << 30, filename="a", mime_type="text/plain", purpose="user_data")


def test_a_large_file_is_refused_by_its_length(data_server: RunningServer) -> None:
    """By its length: before it is read. The next test has one that does not say how long it is."""
    host, port = httpx.URL(data_server.url).host, httpx.URL(data_server.url).port
    head = "POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer alice\r\n"
    head += "Content-Type: multipart/form-data; boundary=b\r\n"
    with socket.create_connection((host, port), 30) as connection:
        connection.sendall(f"{head}Content-Length: {1 << 40}\r\n\r\n".encode())
        answer = connection.makefile("rb").read().decode()  # until the server closes it
    assert " 413 " in answer
    assert "--max-file-bytes" in answer


def test_a_small_limit_holds_for_a_stream(start_server, tmp_path: Path) -> None:
    running = start_server("--data-dir", str(tmp_path), "--max-file-bytes", "1MiB", "--no-embeddings")

    def pieces():
        yield PURPOSE + FILE.removesuffix(b"\r\n")
        for _ in range(64):
            yield b"x" * 65536

    headers = {"Content-Type": BOUNDARY["Content-Type"]}
    response = running.post("/v1/files", content=pieces(), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "file_too_large"
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list((tmp_path / "files").iterdir()) == []
    # without an encoder, a store says what is missing
    client = running.client()
    file = client.files.create(file=("a.txt", b"text"), purpose="assistants")
    store = client.vector_stores.create(name="none")
    done = client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=50)
    assert done.status == "failed"
    assert done.last_error is not None
    assert done.last_error.code == "server_error"
    assert "embeddings are off" in done.last_error.message
    # the folder belongs to one server at a time
    process = RunningServer("--data-dir", str(tmp_path)).process
    assert process.wait(60) != 0


def test_files_are_off_where_asked(start_server) -> None:
    running = start_server("--data-dir", "none")
    response = running.get("/v1/files")
    assert response.status_code == 403
    assert "--data-dir" in response.json()["error"]["message"]

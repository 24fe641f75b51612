"""Files, stores and ingestion on disk, without a server: what survives, what is refused, what is cleaned up."""

import asyncio
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import pytest

from quire.core.errors import ConfigError, InvalidRequest, NotFound, QuireError, StorageFull
from quire.rag import ingest
from quire.rag import stores as stores_module
from quire.rag.batches import BatchRecords
from quire.rag.database import MIGRATIONS, PageQuery, RagDatabase
from quire.rag.files import FileStore, checked_disk, plain_name
from quire.rag.filters import parse_filter
from quire.rag.index import GrowingIndex
from quire.rag.ranking import IndexQuery
from quire.rag.stores import NewStoreFile, StorePassage, VectorStore, VectorStores
from quire.server.errors import as_api_error
from tests.rag.files import zip_bomb
from tests.rag.ingesting import WIDTH, DataFolder, HashEncoder, ingest_all, vector_of

ME = "owner"


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataFolder]:
    folder = DataFolder(tmp_path)
    yield folder
    folder.close()


def add_file(data: DataFolder, text: str, name: str = "a.txt") -> str:
    path = data.files.temporary()
    path.write_text(text)
    return data.files.add(ME, path, name, "assistants").id


def add_to(data: DataFolder, store: VectorStore, *file_ids: str) -> None:
    data.stores.add_files(store, [NewStoreFile(file_id, {"n": 1}, 100, 0) for file_id in file_ids])


def new_store(data: DataFolder, days: int | None = None) -> VectorStore:
    return data.stores.create(ME, "store", None, {}, days)


def search(data: DataFolder, store: VectorStore, text: str, limit: int = 5) -> list[StorePassage]:
    vector = numpy.frombuffer(vector_of(text), dtype=numpy.float32)
    return data.stores.search(data.stores.get(ME, store.id), IndexQuery(vector, text, limit))


def run(data: DataFolder, encoder: HashEncoder | None = None) -> None:
    asyncio.run(ingest_all(data, encoder or HashEncoder()))


# ---------------------------------------------------------------------- lists


def test_pages_go_both_ways_and_end(data: DataFolder) -> None:
    ids = [add_file(data, str(number)) for number in range(7)]

    def listed(**query: object) -> tuple[list[int], bool]:
        files, more = data.files.page(ME, PageQuery(**{"limit": 3, "order": "asc", **query}))
        return [ids.index(file.id) for file in files], more

    assert listed() == ([0, 1, 2], True)
    assert listed(after=ids[2]) == ([3, 4, 5], True)
    assert listed(after=ids[5]) == ([6], False)
    assert listed(before=ids[2]) == ([0, 1], False)
    assert listed(before=ids[6]) == ([3, 4, 5], True)
    assert listed(order="desc") == ([6, 5, 4], True)
    assert listed(order="desc", after=ids[5]) == ([4, 3, 2], True)
    assert listed(order="desc", before=ids[2]) == ([5, 4, 3], True)
    assert listed(after=ids[0], before=ids[3]) == ([1, 2], False)
    with pytest.raises(InvalidRequest, match="after='nothing'"):
        listed(after="nothing")
    assert data.files.page("another", PageQuery())[0] == []


# ---------------------------------------------------------------------- files


def test_a_name_loses_its_folders_and_control_characters() -> None:
    assert plain_name("../../etc/passwd") == "passwd"
    assert plain_name("C:\\temp\\a.pdf") == "a.pdf"
    assert plain_name("a\x00\nb.txt") == "ab.txt"
    assert plain_name("..") == plain_name("") == plain_name("x/") == "file"
    assert len(plain_name("x" * 5000 + ".pdf")) == 255
    assert plain_name("x" * 5000 + ".pdf").endswith(".pdf")


def test_a_file_without_a_record_is_deleted_at_start(tmp_path: Path, data: DataFolder) -> None:
    kept = add_file(data, "kept")
    (tmp_path / "files" / "file-lost").write_text("written before a crash")
    (tmp_path / "tmp" / "part-lost").write_text("arriving before a crash")
    FileStore(tmp_path, data.database)
    assert [path.name for path in (tmp_path / "files").iterdir()] == [kept]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_expired_file_is_gone_and_leaves_its_stores(data: DataFolder) -> None:
    store, file_id = new_store(data), add_file(data, "some text")
    add_to(data, store, file_id)
    run(data)
    assert search(data, store, "some text")
    data.database.change("UPDATE files SET expires_at = 1 WHERE id = ?", file_id)
    assert search(data, store, "some text") == []  # before it is swept
    with pytest.raises(NotFound):
        data.files.get(ME, file_id)
    ingest.Ingest(data.files, data.stores, None)._drop_expired()  # type: ignore[arg-type]
    assert not data.files.path(file_id).exists()
    assert data.stores.counts(store.id)[0]["total"] == 0


def test_parts_are_joined_in_the_order_that_is_asked_for(data: DataFolder) -> None:
    upload = data.files.create_upload(ME, "joined.txt", 6, "assistants", None)

    def add(text: str) -> str:
        path = data.files.temporary()
        path.write_text(text)
        return data.files.add_part(ME, upload.id, path).id

    first, second = add("abc"), add("def")
    with pytest.raises(InvalidRequest, match="7 bytes and the upload was announced with 6"):
        add("g")
    with pytest.raises(InvalidRequest, match="3 bytes and the upload was announced with 6"):
        data.files.complete_upload(ME, upload.id, [first])
    with pytest.raises(InvalidRequest, match="no part of this upload"):
        data.files.complete_upload(ME, upload.id, [first, "part_other"])
    with pytest.raises(InvalidRequest, match="twice"):
        data.files.complete_upload(ME, upload.id, [first, first])
    done, file = data.files.complete_upload(ME, upload.id, [second, first])
    assert done.status == "completed"
    assert data.files.path(file.id).read_text() == "defabc"
    with pytest.raises(InvalidRequest, match="is completed"):
        data.files.cancel_upload(ME, upload.id)
    late = data.files.create_upload(ME, "late.txt", 6, "assistants", None)
    data.database.change("UPDATE uploads SET expires_at = 1 WHERE id = ?", late.id)
    with pytest.raises(InvalidRequest, match="is expired"):
        data.files.pending_upload(ME, late.id)


def test_a_full_disk_is_said_and_leaves_nothing(data: DataFolder) -> None:
    with pytest.raises(StorageFull, match="left") as raised:
        data.files.check_room(1 << 60)
    shown = as_api_error(raised.value)
    assert (shown.status, shown.code) == (413, "storage_full")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = data.files.temporary()
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageFull, match="has no room"), checked_disk():
            path.write_bytes(b"x" * 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def test_a_database_without_room_says_so_and_goes_on(data: DataFolder) -> None:
    data.database.rows(f"PRAGMA max_page_count = {data.database.rows('PRAGMA page_count')[0][0]}")
    store_id = new_store(data).id
    with pytest.raises(StorageFull, match="has no room"):
        data.stores.create(ME, "x" * 100_000, None, {}, None)
    data.database.rows("PRAGMA max_page_count = 100000")
    assert data.stores.get(ME, store_id)
    new_store(data)


def test_few_indexes_are_open_at_a_time(data: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_module, "MAX_OPEN", 2)
    stores, file_id = [new_store(data) for _ in range(4)], add_file(data, "text")
    for store in stores:
        add_to(data, store, file_id)
    run(data)
    for store in stores * 2:
        assert search(data, store, "text")
    assert len(data.stores._open) == 2


def test_a_database_of_the_first_version_is_migrated(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "quire.db")
    old.executescript(MIGRATIONS[0])
    old.execute("INSERT INTO stores VALUES (1, 'vs_1', 'owner', 'old', NULL, '{}', 1, NULL, 1, NULL, NULL)")
    old.execute("PRAGMA user_version = 1")
    old.commit()
    old.close()
    data = DataFolder(tmp_path)
    store = data.stores.get(ME, "vs_1")
    add_to(data, store, add_file(data, "text"))
    run(data)
    assert len(search(data, store, "text")) == 1
    assert data.database.rows("PRAGMA user_version")[0][0] == len(MIGRATIONS)
    data.close()


def test_a_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    database = RagDatabase(tmp_path / "quire.db")
    database.change("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(ConfigError, match="version 99"):
        RagDatabase(tmp_path / "quire.db")
    (tmp_path / "other.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="cannot be opened"):
        RagDatabase(tmp_path / "other.db")


# ---------------------------------------------------------------------- ingestion


def test_a_completed_file_is_found_and_its_text_is_whole(data: DataFolder) -> None:
    words = " ".join(f"word{number}" for number in range(450))
    store, file_id = new_store(data), add_file(data, words)
    data.stores.add_files(store, [NewStoreFile(file_id, {"year": 2024.0}, 100, 50)])
    run(data)
    file = data.stores.file(store, file_id)
    assert file.status == "completed"
    assert file.usage_bytes > len(words)
    best = search(data, store, "word123")[0]
    assert "word123" in best.text
    assert words[best.start : best.end] == best.text
    assert best.attributes == {"year": 2024.0}
    assert data.stores.text(store, file_id) == words


def test_what_chunks_have_in_common_is_embedded_once(data: DataFolder) -> None:
    class Counting(HashEncoder):
        num_words = 0

        async def embed(self, texts: Sequence[str]) -> list[bytes]:
            self.num_words += sum(len(text.split()) for text in texts)
            return await super().embed(texts)

    words = " ".join(f"word{number}" for number in range(8000))
    store, file_id, encoder = new_store(data), add_file(data, words), Counting()
    data.stores.add_files(store, [NewStoreFile(file_id, {}, 800, 400)])
    run(data, encoder)
    assert data.stores.file(store, file_id).status == "completed"
    assert encoder.num_words < 1.2 * 8000  # chunks hold every word twice
    for number in (0, 399, 400, 799, 4321, 7999):
        best = search(data, store, f"word{number}")[0]
        assert f"word{number}" in best.text.split()


def test_what_cannot_be_read_fails_with_its_reason(data: DataFolder) -> None:
    store = new_store(data)
    reasons = {
        add_file(data, "", "empty.txt"): "invalid_file",
        add_file(data, "   \n ", "blank.txt"): "invalid_file",
        add_file(data, "\x7fELF", "program.exe"): "unsupported_file",
        add_file(data, "no pdf", "broken.pdf"): "invalid_file",
        add_file(data, "text \0", "program.txt"): "unsupported_file",
    }
    bomb = data.files.temporary()
    zip_bomb(bomb, 200)
    reasons[data.files.add(ME, bomb, "bomb.docx", "assistants").id] = "invalid_file"
    good = add_file(data, "good text")
    add_to(data, store, *reasons, good)
    began = time.monotonic()
    run(data)
    assert time.monotonic() - began < 10 * len(reasons)
    for file_id, code in reasons.items():
        file = data.stores.file(store, file_id)
        assert (file.status, file.error_code) == ("failed", code), file
        assert file.error_message
    assert data.stores.file(store, good).status == "completed"
    assert len(search(data, store, "text")) == 1


def test_a_file_that_makes_too_many_chunks_fails(data: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "MAX_CHUNKS", 3)
    store, file_id = new_store(data), add_file(data, "word " * 500)
    add_to(data, store, file_id)
    run(data)
    file = data.stores.file(store, file_id)
    assert file.status == "failed"
    assert "of at most 3" in (file.error_message or "")


def test_an_encoder_that_fails_for_good_fails_the_file(
    data: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(HashEncoder):
        async def embed(self, texts: object) -> list[bytes]:
            raise QuireError("there is no embedding model")

    store, file_id = new_store(data), add_file(data, "text")
    add_to(data, store, file_id)
    run(data, Missing())
    file = data.stores.file(store, file_id)
    assert (file.status, file.error_code) == ("failed", "server_error")
    assert file.error_message == "there is no embedding model"
    assert data.database.rows("SELECT 1 FROM chunks") == []


def test_an_encoder_that_is_restarted_is_waited_for(
    data: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "RETRY_SECONDS", 0.05)
    encoder = HashEncoder()
    encoder.is_down = True

    async def restart() -> None:
        await asyncio.sleep(0.15)
        encoder.is_down = False

    async def both() -> None:
        await asyncio.gather(ingest_all(data, encoder), restart())

    store, file_id = new_store(data), add_file(data, "text")
    add_to(data, store, file_id)
    asyncio.run(both())
    assert data.stores.file(store, file_id).status == "completed"


def test_ingestion_pauses_while_text_is_generated(data: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most its share of the time, so that decodes keep theirs."""
    monkeypatch.setattr("tests.rag.ingesting.OneEncoder.is_generating", True)
    monkeypatch.setattr(ingest, "CHUNKS_AT_ONCE", 1)
    store, file_id = new_store(data), add_file(data, "word " * 500)
    add_to(data, store, file_id)
    began = time.monotonic()
    run(data, HashEncoder(0.02))
    assert time.monotonic() - began >= 4 * 0.02 / ingest.BUSY_SHARE


def test_parsing_leaves_time_to_generation(data: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rag.ingesting.OneEncoder.is_generating", True)
    monkeypatch.setattr(ingest, "parse_file", lambda *_: time.sleep(0.02) or "text")
    store = new_store(data)
    add_to(data, store, *(add_file(data, f"text {n}") for n in range(2 * ingest.NUM_PARSERS)))
    began = time.monotonic()
    run(data)
    assert time.monotonic() - began >= 0.02 / ingest.BUSY_SHARE


def test_the_encoder_never_waits_while_chunks_do(data: DataFolder) -> None:
    """The next request comes as soon as one of the open ones is answered, not when all are."""

    class Slow(HashEncoder):
        num_calls = 0

        async def embed(self, texts: Sequence[str]) -> list[bytes]:
            self.num_calls += 1
            if self.num_calls > ingest.MAX_REQUESTS:
                next_came.set()
            elif self.num_calls > 1:
                await asyncio.wait_for(next_came.wait(), 60)
            return await super().embed(texts)

    next_came, store, encoder = asyncio.Event(), new_store(data), Slow()
    add_to(data, store, add_file(data, "word " * 100 * 5 * ingest.CHUNKS_AT_ONCE))
    run(data, encoder)
    assert data.stores.counts(store.id)[0]["completed"] == 1
    assert encoder.num_calls == 5


def test_a_batch_waits_for_no_index_within_its_transaction(
    data: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that completes files holds the index and waits for the database: the reverse order would end both."""
    within = []
    monkeypatch.setattr(
        data.stores, "_forget", lambda *_: within.append(data.database._connection.in_transaction)
    )
    store, file_id = new_store(data), add_file(data, "text")
    add_to(data, store, file_id)
    data.stores.create_batch(store, [NewStoreFile(file_id, {}, 100, 0)])
    assert within == [False, False]


def test_a_missing_index_is_built_again_at_start_with_progress(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_module, "REBUILT_AT_ONCE", 10)
    data = DataFolder(tmp_path)
    store = new_store(data)
    texts = [f"passage number {number}" for number in range(30)]
    add_to(data, store, *(add_file(data, text) for text in texts))
    run(data)
    data.close()
    for path in sorted((tmp_path / "index").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    data = DataFolder(tmp_path)
    with caplog.at_level("INFO", "quire"):
        data.stores.check_indexes()  # as at start
    assert [line for line in caplog.messages if "chunks" in line] == [
        f"index     of {store.id}: {done} of 30 chunks" for done in (10, 20, 30)
    ]
    for text in texts:
        assert search(data, store, text)[0].text == text
    data.close()
    for path in (tmp_path / "index").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    data = DataFolder(tmp_path)
    assert search(data, store, texts[3])[0].text == texts[3]
    data.close()


def test_what_is_removed_or_replaced_is_not_found(data: DataFolder) -> None:
    store, other = new_store(data), new_store(data)
    first, second = add_file(data, "first text"), add_file(data, "second text")
    for one_store in (store, other):
        add_to(data, one_store, first, second)
    run(data)
    data.stores.remove_file(store, first)
    assert [passage.file_id for passage in search(data, store, "first text")] == [second]
    assert {passage.file_id for passage in search(data, other, "first text")} == {first, second}
    data.stores.remove_everywhere(second)
    assert search(data, store, "second text") == []
    add_to(data, other, first)  # again: not to be found until it is completed again
    assert search(data, other, "first text") == []
    run(data)
    assert len(search(data, other, "first text")) == 1
    data.stores.delete(ME, other.id)
    assert data.database.rows("SELECT 1 FROM chunks") == []


def test_a_cancelled_batch_completes_nothing_more(data: DataFolder) -> None:
    store = new_store(data)
    files = [NewStoreFile(add_file(data, f"text {n}"), {}, 100, 0) for n in range(3)]
    batch = data.stores.create_batch(store, files)
    assert data.stores.cancel_batch(store, batch.id).is_cancelled
    run(data)
    assert data.stores.counts(store.id, batch.id)[0]["cancelled"] == 3
    assert search(data, store, "text 1") == []


def test_an_expired_store_is_refused_and_emptied(data: DataFolder) -> None:
    store = new_store(data, days=1)
    add_to(data, store, add_file(data, "text"))
    run(data)
    data.database.change("UPDATE stores SET last_active_at = 1")
    assert data.stores.get(ME, store.id).is_expired
    with pytest.raises(InvalidRequest, match="expired 1 days after its last use"):
        data.stores.usable(ME, store.id)
    data.stores.drop_expired()
    assert data.database.rows("SELECT 1 FROM chunks") == []


def test_attributes_change_without_embedding_again(data: DataFolder) -> None:
    store, file_id = new_store(data), add_file(data, "text")
    add_to(data, store, file_id)
    run(data)
    data.stores.set_attributes(data.stores.get(ME, store.id), file_id, {"n": 2.0})
    assert search(data, store, "text")[0].attributes == {"n": 2.0}


def test_attributes_that_the_index_did_not_get_are_found_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends, or a Qdrant server stops to answer, between the record and the index."""

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    data = DataFolder(tmp_path)
    store, file_id = new_store(data), add_file(data, "text")
    add_to(data, store, file_id)
    run(data)
    monkeypatch.setattr(GrowingIndex, "set_attributes", ended)
    with pytest.raises(KeyboardInterrupt):
        data.stores.set_attributes(store, file_id, {"n": 2.0})
    wanted = parse_filter({"type": "eq", "key": "n", "value": 2})
    query = IndexQuery(numpy.ones(WIDTH, numpy.float32), "text", 5, wanted)
    for _ in range(2):  # in this process, and in the next one
        assert [hit.attributes for hit in data.stores.search(store, query)] == [{"n": 2.0}]
        data.close()
        data = DataFolder(tmp_path)
    data.close()


# ---------------------------------------------------------------------- kill -9


def kill_rounds(folder: Path, rounds: int, seed: int) -> None:
    """Every file that said completed is found; the others resume. Each round adds files, and ends the process when a
    random number of them is completed, or a moment later."""
    choose, said, texts, interrupted = random.Random(seed), set[str](), dict[str, str](), 0
    data = DataFolder(folder)
    store = new_store(data)
    for _ in range(rounds):
        added = {}
        for number in range(len(texts), len(texts) + 24):
            words = [f"w{number}x{word}" for word in range(choose.randint(5, 600))]
            text = f"document{number} " + " ".join(words)
            added[add_file(data, text)] = text
        add_to(data, store, *added)
        texts |= added
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.rag.ingesting", str(folder)], env={**os.environ}
        )
        target = len(said) + choose.randrange(len(added))
        while data.stores.counts(store.id)[0]["completed"] < target and process.poll() is None:
            time.sleep(0.002)
        time.sleep(choose.random() * 0.05)
        process.kill()
        process.wait()
        data.close()
        data = DataFolder(folder)
        files = {file_id: data.stores.file(store, file_id).status for file_id in texts}
        completed = {file_id for file_id, status in files.items() if status == "completed"}
        assert said <= completed, "a completed file was lost"
        assert set(files.values()) <= {"completed", "in_progress"}
        interrupted += "in_progress" in files.values()
        said = completed
        for file_id in completed:
            word = texts[file_id].split()[0]
            assert file_id in {passage.file_id for passage in search(data, store, word, 50)}
            assert data.stores.text(store, file_id) == texts[file_id]
        found = {passage.file_id for passage in search(data, store, "anything", 50)}
        assert found <= completed, "a file is found that is not completed"
    run(data)
    assert data.stores.counts(store.id)[0]["completed"] == len(texts)
    assert interrupted >= rounds // 4
    data.close()


def test_kills_lose_no_completed_file(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 3, seed=1)


@pytest.mark.slow
def test_twenty_kills_lose_no_completed_file(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 20, seed=2)


def test_stores_of_another_owner_do_not_exist(data: DataFolder) -> None:
    store = new_store(data)
    assert isinstance(data.stores, VectorStores)
    with pytest.raises(NotFound):
        data.stores.get("another", store.id)
    with pytest.raises(NotFound):
        data.files.get("another", add_file(data, "text"))


def test_batches_that_ended_long_ago_are_dropped(data: DataFolder) -> None:
    records = BatchRecords(data.database)
    ended, running, recent = (records.create(ME, "openai", {}, "batch_") for _ in range(3))
    records.update(ended, "completed")
    records.update(recent, "completed")
    data.database.change("UPDATE batches SET created_at = 1 WHERE id != ?", recent.id)
    assert [batch.id for batch in records.old()] == [ended.id]
    assert [batch.id for batch in records.unfinished()] == [running.id]
    records.update(running, "cancelling")
    assert records.update(running, "in_progress").status == "cancelling"  # it stays so

"""FileStore: uploaded files on disk, their records in the database, and uploads that come in parts.

A file is written under `tmp`, renamed to its id, and then entered: a name without a record is garbage, and is deleted
when the store is opened.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.core.errors import InvalidRequest, StorageFull
from quire.rag.database import PageQuery, RagDatabase, new_id, now, record

MAX_FILENAME = 255  # characters that are kept, the last ones
UPLOAD_SECONDS = 3600  # in which an upload must be completed
MAX_PARTS = 10_000  # of an upload
BATCH_FILE_SECONDS = 30 * 86400  # for which files of purpose batch are kept, unless they say otherwise
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    owner: str
    filename: str
    bytes: int
    purpose: str
    created_at: int
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class StoredUpload:
    id: str
    owner: str
    filename: str
    bytes: int  # that all parts together must have
    purpose: str
    created_at: int
    expires_at: int
    status: str  # pending | completed | cancelled | expired
    file_seconds: int | None  # for which the file is kept
    file_id: str | None


@dataclass(frozen=True, slots=True)
class UploadPart:
    id: str
    upload_id: str
    bytes: int
    created_at: int


@contextmanager
def checked_disk() -> Iterator[None]:
    """A write that fails for want of room raises StorageFull."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageFull(
                f"the disk of --data-dir has no room for the file ({error.strerror}): delete files, or move the folder"
            ) from error
        raise


def plain_name(given: str) -> str:
    """A file's name without folders and control characters; never empty."""
    name = _CONTROL.sub("", given.replace("\\", "/").rpartition("/")[2]).strip()
    return name[-MAX_FILENAME:] if name not in ("", ".", "..") else "file"


class FileStore:
    """Calls may come from any thread. An owner sees its own files only."""

    def __init__(self, folder: Path, database: RagDatabase) -> None:
        self._database = database
        self._files, self._parts, self._temporary = (folder / name for name in ("files", "uploads", "tmp"))
        shutil.rmtree(self._temporary, ignore_errors=True)
        for made in (self._files, self._parts, self._temporary):
            made.mkdir(parents=True, exist_ok=True)
        known = {row["id"] for row in database.rows("SELECT id FROM files")}
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    def temporary(self) -> Path:
        """A path for a file that is still arriving."""
        return self._temporary / new_id("part-")

    def check_room(self, num_bytes: int) -> None:
        """Raises StorageFull if that many bytes cannot be written."""
        free = shutil.disk_usage(self._files).free
        if num_bytes > free:
            raise StorageFull(
                f"the file has {num_bytes} bytes and the disk of --data-dir has {free} left: delete files, or move "
                "the folder"
            )

    # ------------------------------------------------------------------ files

    def add(
        self, owner: str, path: Path, filename: str, purpose: str, expires_seconds: int | None = None
    ) -> StoredFile:
        """Takes the file at `path`, which is moved."""
        if expires_seconds is None and purpose == "batch":
            expires_seconds = BATCH_FILE_SECONDS
        created = now()
        file = StoredFile(
            new_id("file-"),
            owner,
            plain_name(filename),
            path.stat().st_size,
            purpose,
            created,
            None if expires_seconds is None else created + expires_seconds,
        )
        with checked_disk():
            _sync(path)
        path.rename(self._files / file.id)
        _sync(self._files)
        self._database.add("files", **asdict(file))
        return file

    def get(self, owner: str, file_id: str) -> StoredFile:
        select = "SELECT * FROM files WHERE id = ? AND owner = ? AND (expires_at IS NULL OR expires_at > ?)"
        return self._database.known(StoredFile, "file", file_id, select, file_id, owner, now())

    def page(self, owner: str, query: PageQuery, purpose: str | None = None) -> tuple[list[StoredFile], bool]:
        where, values = "owner = ? AND (expires_at IS NULL OR expires_at > ?)", [owner, now()]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        return self._database.page(StoredFile, "files", query, where, values, "file")

    def path(self, file_id: str) -> Path:
        return self._files / file_id

    def delete(self, owner: str, file_id: str) -> None:
        self.get(owner, file_id)
        self.drop(file_id)

    def drop(self, file_id: str) -> None:
        """As `delete`, of any owner, also one that expired. The record goes first: a file without one is garbage."""
        self._database.change("DELETE FROM files WHERE id = ?", file_id)
        self.path(file_id).unlink(missing_ok=True)

    def expired(self) -> list[StoredFile]:
        rows = self._database.rows("SELECT * FROM files WHERE expires_at <= ?", now())
        return [record(StoredFile, row) for row in rows]

    # ------------------------------------------------------------------ uploads

    def create_upload(
        self, owner: str, filename: str, num_bytes: int, purpose: str, file_seconds: int | None
    ) -> StoredUpload:
        self.check_room(num_bytes)
        created, upload_id = now(), new_id("upload_")
        self._database.add(
            "uploads",
            id=upload_id,
            owner=owner,
            filename=plain_name(filename),
            bytes=num_bytes,
            purpose=purpose,
            created_at=created,
            expires_at=created + UPLOAD_SECONDS,
            status="pending",
            file_seconds=file_seconds,
        )
        return self.upload(owner, upload_id)

    def upload(self, owner: str, upload_id: str) -> StoredUpload:
        select = "SELECT * FROM uploads WHERE id = ? AND owner = ?"
        upload = self._database.known(StoredUpload, "upload", upload_id, select, upload_id, owner)
        is_expired = upload.status == "pending" and upload.expires_at <= now()
        return replace(upload, status="expired") if is_expired else upload

    def pending_upload(self, owner: str, upload_id: str) -> StoredUpload:
        upload = self.upload(owner, upload_id)
        if upload.status != "pending":
            raise InvalidRequest(
                f"the upload {upload_id} is {upload.status}: create another one", "upload_id"
            )
        return upload

    def add_part(self, owner: str, upload_id: str, path: Path) -> UploadPart:
        """Takes the part at `path`, which is moved."""
        part = UploadPart(new_id("part_"), upload_id, path.stat().st_size, now())
        with self._database.transaction() as connection:
            upload = self.pending_upload(owner, upload_id)
            count, total = connection.execute(
                "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM upload_parts WHERE upload_id = ?", (upload_id,)
            ).fetchone()
            if total + part.bytes > upload.bytes or count >= MAX_PARTS:
                raise InvalidRequest(
                    f"the parts have {total + part.bytes} bytes and the upload was announced with {upload.bytes} in at "
                    f"most {MAX_PARTS} parts: create an upload for more",
                    "data",
                )
            folder = self._parts / upload_id
            folder.mkdir(exist_ok=True)
            path.rename(folder / part.id)
            self._database.add(
                "upload_parts", id=part.id, upload_id=upload_id, bytes=part.bytes, created_at=part.created_at
            )
        return part

    def complete_upload(
        self, owner: str, upload_id: str, part_ids: Sequence[str]
    ) -> tuple[StoredUpload, StoredFile]:
        """Joins the parts in the given order; raises InvalidRequest if they are not all, or have another size."""
        upload = self.pending_upload(owner, upload_id)
        select = "SELECT id, bytes FROM upload_parts WHERE upload_id = ?"
        sizes = {row["id"]: row["bytes"] for row in self._database.rows(select, upload_id)}
        unknown = next((part_id for part_id in part_ids if part_id not in sizes), None)
        if unknown is not None or len(set(part_ids)) != len(part_ids):
            raise InvalidRequest(
                f"part_ids has {str(unknown)[:80]!r}, which is no part of this upload"
                if unknown is not None
                else "part_ids names a part twice",
                "part_ids",
            )
        num_bytes = sum(sizes[part_id] for part_id in part_ids)
        if num_bytes != upload.bytes:
            raise InvalidRequest(
                f"the parts have {num_bytes} bytes and the upload was announced with {upload.bytes}: send the rest",
                "part_ids",
            )
        joined = self.temporary()
        try:
            with checked_disk(), joined.open("wb") as whole:
                for part_id in part_ids:
                    with (self._parts / upload_id / part_id).open("rb") as part:
                        shutil.copyfileobj(part, whole, 1 << 20)
            file = self.add(owner, joined, upload.filename, upload.purpose, upload.file_seconds)
        finally:
            joined.unlink(missing_ok=True)
        self._database.change(
            "UPDATE uploads SET status = 'completed', file_id = ? WHERE id = ?", file.id, upload_id
        )
        self._drop_parts(upload_id)
        return self.upload(owner, upload_id), file

    def cancel_upload(self, owner: str, upload_id: str) -> StoredUpload:
        self.pending_upload(owner, upload_id)
        self._database.change("UPDATE uploads SET status = 'cancelled' WHERE id = ?", upload_id)
        self._drop_parts(upload_id)
        return self.upload(owner, upload_id)

    def drop_old_uploads(self) -> None:
        """Deletes the parts of uploads that expired, and the records of all that ended a day ago."""
        for row in self._database.rows(
            "SELECT id FROM uploads WHERE status = 'pending' AND expires_at <= ?", now()
        ):
            self._drop_parts(row["id"])
        self._database.change("DELETE FROM uploads WHERE expires_at <= ?", now() - 86400)

    def _drop_parts(self, upload_id: str) -> None:
        self._database.change("DELETE FROM upload_parts WHERE upload_id = ?", upload_id)
        shutil.rmtree(self._parts / upload_id, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

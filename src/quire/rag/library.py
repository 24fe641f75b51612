"""Library: files, their chunks and vectors in one folder. SQLite holds the truth, the index is made again from it."""

import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from quire.core.errors import ConfigError, InvalidRequest
from quire.rag.chunks import Chunk
from quire.rag.index import open_index
from quire.rag.parsers import PAGE_END
from quire.rag.ranking import IndexFault, IndexQuery, Point, VectorIndex

FILE = "library.sqlite"
_BATCH = 1000
_TABLES = """
CREATE TABLE IF NOT EXISTS setting (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS file (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, digest TEXT, num_characters INTEGER, attributes TEXT
);
CREATE TABLE IF NOT EXISTS chunk (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file_id INTEGER REFERENCES file ON DELETE CASCADE,
    start INTEGER, end INTEGER, line INTEGER, page INTEGER, text TEXT, vectors BLOB
);
CREATE INDEX IF NOT EXISTS chunk_of_file ON chunk (file_id);
"""


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """What all vectors of a library have in common."""

    embedder: str  # its own name
    model: str | None  # what opens it; None: the built-in one
    dimension: int
    max_tokens: int  # of a chunk
    overlap: int


@dataclass(frozen=True, slots=True)
class LibraryFile:
    name: str
    digest: str
    num_characters: int
    num_chunks: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CitedPassage:
    """A chunk that was found, and where it is."""

    file: str
    text: str
    score: float  # 0 to 1
    start: int  # characters of the file's text
    end: int
    line: int
    page: int | None  # of a PDF
    attributes: dict[str, Any]

    @property
    def position(self) -> str:
        return f"line {self.line}" if self.page is None else f"page {self.page}"


def settings_in(folder: Path) -> LibrarySettings | None:
    """What the folder's library was made with, if it has one."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give the folder of an index, before any files")
    if not (folder / FILE).exists():
        return None
    with _usable(folder), closing(sqlite3.connect(f"file:{folder / FILE}?mode=ro", uri=True)) as database:
        return _settings(database)


@contextmanager
def _usable(folder: Path | None) -> Iterator[None]:
    """What SQLite says as an error of the disk, or of a folder that holds no index."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise OSError(f"the index in {folder} cannot be used ({error})") from error
    except sqlite3.DatabaseError as error:
        raise ConfigError(
            f"{folder}/{FILE} is no index ({error}): remove it, or give another folder"
        ) from error


def _settings(database: sqlite3.Connection) -> LibrarySettings | None:
    stored = {name: json.loads(value) for name, value in database.execute("SELECT name, value FROM setting")}
    return LibrarySettings(**stored) if stored else None


class Library:
    """Safe to use from several threads. In memory if `folder` is None."""

    def __init__(self, folder: Path | None, settings: LibrarySettings | None = None) -> None:
        """Opened, or made with `settings`; ConfigError if the folder was made with others, or is no library."""
        self._lock = threading.RLock()
        self._folder = folder
        is_new = folder is None or not (folder / FILE).exists()
        if is_new and settings is None:
            raise ConfigError(f"{folder} holds no index: `quire index add {folder} FILE` makes one")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        path = ":memory:" if folder is None else str(folder / FILE)
        with _usable(folder):
            self._database = sqlite3.connect(path, check_same_thread=False)
            self._database.execute("PRAGMA foreign_keys = ON")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.executescript(_TABLES)
            self.settings = self._settled(settings)
            self._index = self._filled_index()

    def files(self) -> list[LibraryFile]:
        """In the order in which they were added."""
        rows = self._database.execute(
            "SELECT name, digest, num_characters, (SELECT count(*) FROM chunk WHERE file_id = file.id), attributes"
            " FROM file ORDER BY id"
        )
        return [
            LibraryFile(name, digest, length, chunks, json.loads(attributes))
            for name, digest, length, chunks, attributes in rows
        ]

    def holds(self, name: str, digest: str) -> bool:
        """Whether the file is there with this content."""
        query = "SELECT 1 FROM file WHERE name = ? AND digest = ?"
        return self._database.execute(query, (name, digest)).fetchone() is not None

    def put(
        self,
        name: str,
        digest: str,
        text: str,
        chunks: Sequence[Chunk],
        vectors: Sequence[numpy.ndarray],
        attributes: dict[str, Any],
    ) -> None:
        """Adds a file, or replaces the one of this name. `vectors`: of each chunk, [windows, dimension]."""
        places = list(_places(text, chunks))
        written = json.dumps(attributes)
        with self._lock, _usable(self._folder):
            old = self._chunk_ids(name)
            with self._database:
                self._database.execute("DELETE FROM file WHERE name = ?", (name,))
                added = self._database.execute(
                    "INSERT INTO file (name, digest, num_characters, attributes) VALUES (?, ?, ?, ?)",
                    (name, digest, len(text), written),
                )
                self._database.executemany(
                    "INSERT INTO chunk (file_id, start, end, line, page, text, vectors) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    [
                        (added.lastrowid, chunk.start, chunk.end, line, page, chunk.text, matrix.tobytes())
                        for chunk, (line, page), matrix in zip(chunks, places, vectors, strict=True)
                    ],
                )
            self._index.delete(old)
            new = self._chunk_ids(name)
            self._index.upsert(
                [
                    Point(chunk_id, list(matrix), chunk.text, attributes)
                    for chunk_id, chunk, matrix in zip(new, chunks, vectors, strict=True)
                ]
            )

    def remove(self, name: str) -> None:
        with self._lock, _usable(self._folder):
            old = self._chunk_ids(name)
            with self._database:
                removed = self._database.execute("DELETE FROM file WHERE name = ?", (name,)).rowcount
            if not removed:
                raise InvalidRequest(f"{name!r} is not in this index: `quire index list` shows its files")
            self._index.delete(old)

    def search(self, query: IndexQuery) -> list[CitedPassage]:
        passages = []
        for hit in self._index.search(query):
            row = self._database.execute(
                "SELECT name, text, start, end, line, page, attributes FROM chunk JOIN file ON file.id = file_id"
                " WHERE chunk.id = ?",
                (hit.chunk_id,),
            ).fetchone()
            if row is not None:  # deleted meanwhile
                name, content, start, end, line, page, attributes = row
                passages.append(
                    CitedPassage(name, content, hit.score, start, end, line, page, json.loads(attributes))
                )
        return passages

    def __len__(self) -> int:
        """Chunks."""
        count: int = self._database.execute("SELECT count(*) FROM chunk").fetchone()[0]
        return count

    def close(self) -> None:
        """Calling it twice is fine."""
        with self._lock:
            self._index.close()
            self._database.close()

    def _chunk_ids(self, name: str) -> list[int]:
        query = "SELECT chunk.id FROM chunk JOIN file ON file.id = file_id WHERE name = ? ORDER BY chunk.id"
        return [row[0] for row in self._database.execute(query, (name,))]

    def _settled(self, settings: LibrarySettings | None) -> LibrarySettings:
        made_with = _settings(self._database)
        if made_with is None:
            assert settings is not None
            with self._database:
                rows = [(name, json.dumps(value)) for name, value in asdict(settings).items()]
                self._database.executemany("INSERT INTO setting VALUES (?, ?)", rows)
            return settings
        for name, value in (asdict(settings) if settings is not None else {}).items():
            if value != getattr(made_with, name):
                raise ConfigError(
                    f"{self._folder} was made with {name}={getattr(made_with, name)!r}, and now it is {value!r}: "
                    "choose another folder, or delete this one"
                )
        return made_with

    def _filled_index(self) -> VectorIndex:
        """The index beside the truth; made again if it is missing, broken or differs in size."""
        folder = None if self._folder is None else self._folder / "index"
        with suppress(IndexFault):
            index = open_index(folder, self.settings.dimension)
            if len(index) == len(self):
                return index
            index.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        index = open_index(folder, self.settings.dimension)
        for batch in self._points():
            index.upsert(batch)
        return index

    def _points(self) -> Iterator[list[Point]]:
        rows = self._database.execute(
            "SELECT chunk.id, text, vectors, attributes FROM chunk JOIN file ON file.id = file_id ORDER BY chunk.id"
        )
        while batch := rows.fetchmany(_BATCH):
            yield [
                Point(
                    chunk_id,
                    list(numpy.frombuffer(vectors, numpy.float32).reshape(-1, self.settings.dimension)),
                    text,
                    json.loads(attributes),
                )
                for chunk_id, text, vectors, attributes in batch
            ]


def _places(text: str, chunks: Sequence[Chunk]) -> Iterator[tuple[int, int | None]]:
    """Of each chunk: the line that it begins in, and the page if the text has pages."""
    line, page, counted = 1, 1, 0
    has_pages = PAGE_END in text
    for chunk in chunks:
        line += text.count("\n", counted, chunk.start)
        page += text.count(PAGE_END, counted, chunk.start)
        counted = chunk.start
        yield line, page if has_pages else None


@contextmanager
def opened_library(folder: Path) -> Iterator[Library]:
    """An existing one, closed at the end."""
    with closing(Library(folder)) as library:
        yield library

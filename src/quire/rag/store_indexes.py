"""Where the indexes of vector stores are: a folder each, or a collection each of a Qdrant server."""

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from quire.rag.index import VectorIndex, open_index
from quire.rag.qdrant_server import ServerIndex


class StoreIndexes(Protocol):
    def open(self, store_id: str, width: int) -> VectorIndex:
        """The index of a store, made if it is not there. Raises if it cannot be used."""
        ...

    def drop(self, store_id: str, width: int | None) -> None:
        """Deletes the index of a store, which must not be open; `width` is None for a store that never had one."""
        ...

    def drop_others(self, store_ids: Collection[str]) -> None:
        """Deletes what belongs to none of these stores, where that is known."""
        ...


class FolderIndexes:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, store_id: str, width: int) -> VectorIndex:
        return open_index(self._folder / store_id, width)

    def drop(self, store_id: str, width: int | None) -> None:
        shutil.rmtree(self._folder / store_id, ignore_errors=True)

    def drop_others(self, store_ids: Collection[str]) -> None:
        for path in self._folder.iterdir():
            if path.name not in store_ids:
                shutil.rmtree(path, ignore_errors=True)


class ServerIndexes:
    """Collections are named as their stores. Those of other programs, and of other data folders, are left alone."""

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self, store_id: str, width: int) -> VectorIndex:
        return ServerIndex(self._url, store_id, width)

    def drop(self, store_id: str, width: int | None) -> None:
        if width is not None:
            index = ServerIndex(self._url, store_id, width)
            index.drop()
            index.close()

    def drop_others(self, store_ids: Collection[str]) -> None:
        pass


def store_indexes(folder: Path, address: str | None) -> StoreIndexes:
    """`address` as --vector-store has it; None: in `folder`."""
    return FolderIndexes(folder) if address is None else ServerIndexes(address)

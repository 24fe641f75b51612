"""Endpoints: all that an open data folder serves."""

from pathlib import Path

from quire.server.retrieval.file_endpoints import FileEndpoints
from quire.server.retrieval.file_search import FileSearch
from quire.server.retrieval.retrieval import Retrieval
from quire.server.retrieval.store_endpoints import StoreEndpoints
from quire.server.service import Service


class Endpoints:
    def __init__(self, service: Service, retrieval: Retrieval) -> None:
        self.retrieval = retrieval
        self.files = FileEndpoints(retrieval, service.settings.max_file_bytes)
        self.stores = StoreEndpoints(retrieval)
        self.file_search = FileSearch(service, retrieval)

    @classmethod
    async def open(cls, service: Service, folder: Path) -> "Endpoints":
        return cls(service, await Retrieval.open(service, folder))

    async def close(self) -> None:
        await self.retrieval.close()

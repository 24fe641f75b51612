"""Endpoints: all that an open data folder serves."""

from pathlib import Path

from quire.server.fine_tuning.endpoints import TuningEndpoints
from quire.server.retrieval.batch_endpoints import BatchEndpoints
from quire.server.retrieval.batch_jobs import BatchJobs
from quire.server.retrieval.file_endpoints import FileEndpoints
from quire.server.retrieval.file_search import FileSearch
from quire.server.retrieval.retrieval import Retrieval
from quire.server.retrieval.store_endpoints import StoreEndpoints
from quire.server.service import Service


class Endpoints:
    def __init__(self, service: Service, retrieval: Retrieval) -> None:
        self.retrieval = retrieval
        self.files = FileEndpoints(retrieval, service.settings.max_file_bytes)
        self.stores = StoreEndpoints(service, retrieval)
        self.file_search = FileSearch(service, retrieval)
        self._jobs = BatchJobs(service, retrieval)
        self.batches = BatchEndpoints(retrieval, self._jobs)
        self.tuning = TuningEndpoints(service, retrieval)

    @classmethod
    async def open(cls, service: Service, folder: Path) -> "Endpoints":
        """Goes on with what an earlier server left in the folder."""
        endpoints = cls(service, await Retrieval.open(service, folder))
        await endpoints._jobs.resume()
        await endpoints.tuning.jobs.resume()
        return endpoints

    async def close(self) -> None:
        await self._jobs.close()
        await self.tuning.jobs.close()
        await self.retrieval.close()

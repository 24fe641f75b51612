"""Retrieval: an open data folder, with the workers that run over it and the searches of its stores."""

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy

from quire.core.errors import EngineDead, QueueFull, QuireError
from quire.core.request import EmbedRequest
from quire.rag.database import RagDatabase
from quire.rag.files import FileStore
from quire.rag.filters import Filter
from quire.rag.index import store_indexes
from quire.rag.ingest import EncoderDown, Ingest, PassageEncoder
from quire.rag.qdrant_server import StoreUnreachable
from quire.rag.stores import StorePassage, VectorStore, VectorStores
from quire.server.encoder_requests import all_pooled, new_id, token_ids
from quire.server.errors import ApiError, Unavailable
from quire.server.retrieval import DATABASE, lock_of
from quire.server.retrieval.search import SearchOptions, reranked
from quire.server.served_models import ServedModel
from quire.server.service import Service
from quire.text.encoder_texts import with_prompt

T = TypeVar("T")
PATH = "/v1/embeddings"
_PROMPTS = {"query": ("query",), "document": ("document", "passage")}  # an encoder's own names for them


class Retrieval:
    """Use it from one event loop; `run` is for calls that read or write the disk."""

    def __init__(self, service: Service, folder: Path, lock: int) -> None:
        """`lock` is a descriptor that holds the folder's lock."""
        self.folder = folder
        self._lock = lock
        self.database = RagDatabase(folder / DATABASE)
        self.files = FileStore(folder, self.database)
        self.stores = VectorStores(
            self.database, store_indexes(folder / "index", service.settings.vector_store)
        )
        self.encoders = ServedEncoders(service)
        self.ingest = Ingest(self.files, self.stores, self.encoders)
        self._service = service

    @classmethod
    async def open(cls, service: Service, folder: Path) -> "Retrieval":
        """Raises ConfigError if the folder cannot be used, or another server uses it."""
        retrieval = await asyncio.to_thread(_opened, service, folder)
        retrieval.ingest.start()
        return retrieval

    async def run(self, call: Callable[..., T], *values: Any, **named: Any) -> T:
        return await asyncio.to_thread(partial(call, *values, **named))

    async def search(
        self, store: VectorStore, queries: Sequence[str], options: SearchOptions, filter: Filter | None
    ) -> list[StorePassage]:
        """The passages that fit one of the queries best."""
        if store.model is None:
            return []
        try:
            encoder = await self.encoders.encoder(store.model)
            vectors = await encoder.embed(queries, "query")
        except EncoderDown as error:
            raise Unavailable(str(error), "engine_down") from None
        except QuireError as error:
            raise ApiError(400, f"the vector store {store.id} cannot be searched: {error}") from None
        best: dict[tuple[str, int], StorePassage] = {}
        for query, vector in zip(queries, vectors, strict=True):
            numbers = numpy.frombuffer(vector, dtype=numpy.float32)
            try:
                passages = await self.run(
                    self.stores.search, store, options.index_query(numbers, query, filter)
                )
            except StoreUnreachable as error:
                raise Unavailable(str(error), "vector_store_down") from None
            for passage in passages:
                key = (passage.file_id, passage.start)
                if key not in best or best[key].score < passage.score:
                    best[key] = passage
        passages = sorted(best.values(), key=lambda passage: -passage.score)
        if options.reranker is not None:
            passages = await reranked(self._service, options.reranker, queries[0], passages)
        kept = [passage for passage in passages if passage.score >= options.score_threshold]
        return kept[: options.max_num_results]

    async def close(self) -> None:
        await self.ingest.close()
        await asyncio.to_thread(self.stores.close)
        self.database.close()
        os.close(self._lock)


def _opened(service: Service, folder: Path) -> Retrieval:
    lock = lock_of(folder)
    try:
        return Retrieval(service, folder, lock)
    except BaseException:
        os.close(lock)
        raise


class ServedEncoder(PassageEncoder):
    """An encoder of the server, as `/v1/embeddings` uses it."""

    def __init__(self, model: ServedModel) -> None:
        tokenizer = model.prompts.tokenizer
        if tokenizer is None:
            raise QuireError(f"the embedding model {model.names[0]} has no tokenizer: choose another one")
        super().__init__(model.names[0], model.vectors.width, model.ready.max_model_len, tokenizer)
        self._model = model

    async def embed(self, texts: Sequence[str], kind: str = "document") -> list[bytes]:
        model = self._model
        name = next((name for name in _PROMPTS[kind] if name in model.vectors.prompts), None)
        prompted = with_prompt(list(texts), model.vectors, name)
        try:
            rows = await token_ids(prompted, model, self.max_tokens, param="query")
            embed = EmbedRequest(new_id("ingest"), rows)
            pooled = await all_pooled(model.client.submit([embed]), len(rows))
        except (EngineDead, QueueFull) as refusal:
            raise EncoderDown(f"the embedding model {self.name} does not answer: {refusal}") from None
        vectors = [item.vector for item in sorted(pooled, key=lambda item: item.index)]
        return vectors if model.vectors.normalize else [_normalized(vector) for vector in vectors]


def _normalized(vector: bytes) -> bytes:
    numbers = numpy.frombuffer(vector, dtype=numpy.float32)
    length = float(numpy.linalg.norm(numbers))
    return (numbers / length).astype(numpy.float32).tobytes() if length else vector


class ServedEncoders:
    """What the ingestion needs of the server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def encoder(self, name: str | None) -> ServedEncoder:
        try:
            return ServedEncoder(await self._service.models.started_encoder(name, PATH))
        except ApiError as error:
            raise QuireError(str(error)) from None

    @property
    def is_generating(self) -> bool:
        main = self._service.models.main
        return main.task == "generate" and main.is_started and main.client.has_work

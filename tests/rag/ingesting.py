"""A process that only ingests, with vectors that need no model: for tests that kill it.

Usage: python -m tests.rag.ingesting FOLDER. Adds nothing by itself; prints "idle" when nothing is left to do.
"""

import asyncio
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy
import tokenizers

from quire.rag.database import RagDatabase
from quire.rag.files import FileStore
from quire.rag.index import store_indexes
from quire.rag.ingest import EncoderDown, Ingest, PassageEncoder
from quire.rag.stores import VectorStores
from quire.text.tokenizer import Tokenizer

WIDTH = 16


def word_tokenizer() -> Tokenizer:
    """A token for each word."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return Tokenizer(inner.to_str(), {})


class HashEncoder(PassageEncoder):
    """Equal texts have equal vectors."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__("hash", WIDTH, 256, word_tokenizer())
        self.seconds = seconds
        self.is_down = False

    async def embed(self, texts: Sequence[str]) -> list[bytes]:
        await asyncio.sleep(self.seconds)
        if self.is_down:
            raise EncoderDown("the encoder is being restarted")
        return [vector_of(text) for text in texts]


def vector_of(text: str) -> bytes:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    vector = numpy.random.default_rng(seed).standard_normal(WIDTH).astype(numpy.float32)
    return (vector / numpy.linalg.norm(vector)).tobytes()


class OneEncoder:
    is_generating = False

    def __init__(self, encoder: PassageEncoder) -> None:
        self._encoder = encoder

    async def encoder(self, name: str | None) -> PassageEncoder:
        return self._encoder


class DataFolder:
    def __init__(self, folder: Path, address: str | None = None) -> None:
        self.database = RagDatabase(folder / "quire.db")
        self.files = FileStore(folder, self.database)
        self.stores = VectorStores(self.database, store_indexes(folder / "index", address))

    def close(self) -> None:
        self.stores.close()
        self.database.close()


async def ingest_all(data: DataFolder, encoder: PassageEncoder) -> None:
    """Until no file is in progress."""
    ingest = Ingest(data.files, data.stores, OneEncoder(encoder))
    ingest.start()
    try:
        while data.database.row("SELECT 1 FROM store_files WHERE status = 'in_progress'") is not None:
            await asyncio.sleep(0.01)
    finally:
        await ingest.close()


if __name__ == "__main__":
    asyncio.run(ingest_all(DataFolder(Path(sys.argv[1])), HashEncoder(0.02)))
    print("idle", flush=True)

"""Embedder: an encoder in-process. `Embedder().embed(["…"])` is the whole API for offline use."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy
from tqdm.auto import tqdm

from quire.core.config import EngineConfig
from quire.core.errors import InvalidRequest, QuireError
from quire.core.request import EmbedRequest
from quire.engine.build import Report, build_encoder
from quire.llm.progress import load_progress
from quire.text.load import choose_tokenizer
from quire.text.prompts import Prompt, as_list, cut, prepare
from quire.text.tokenizer import Tokenizer


class Embedder:
    """A model ready to embed. Settings are those of `EngineConfig`, flat: unknown names are refused.

    Without `model` it is the built-in all-MiniLM-L6-v2. Not thread-safe.
    """

    def __init__(self, model: str | None = None, *, use_tqdm: bool = True, **settings: Any) -> None:
        self.config = EngineConfig.of(model=model, **settings)
        with load_progress(use_tqdm) as progress:
            self._built = build_encoder(self.config, progress)
        self.engine = self._built.engine
        self.tokenizer: Tokenizer | None = choose_tokenizer(self.config.model, self._built.source)
        self._ids = itertools.count()

    @property
    def report(self) -> Report:
        """What was decided at start: size of vectors, limits."""
        return self._built.report

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        dimensions: int | None = None,
        truncate: bool = False,
    ) -> numpy.ndarray:
        """One row for each text, in their order: [texts, width] float32. All are checked before any is computed.

        `dimensions` keeps the first numbers of each row, of length one again; `truncate` cuts texts that are too
        long, which are refused otherwise.
        """
        assert self.report.vectors is not None
        width = self.report.vectors.width
        if dimensions is not None and not 1 <= dimensions <= width:
            raise InvalidRequest(
                f"dimensions={dimensions} is outside 1 to {width}, the model's own", "dimensions"
            )
        token_ids = [prepare(text, self.tokenizer).token_ids for text in as_list(texts)]
        if truncate:
            token_ids = [cut(text, self.report.limits.max_model_len) for text in token_ids]
        vectors = numpy.empty((len(token_ids), width), dtype=numpy.float32)
        if not token_ids:
            return vectors[:, :dimensions]
        request_id = str(next(self._ids))
        self.engine.add(EmbedRequest(request_id, token_ids))
        try:
            with tqdm(total=len(token_ids), disable=not use_tqdm, desc="embed", unit="text") as bar:
                self._drive(vectors, bar)
        except BaseException:
            self.engine.abort(request_id)  # on ctrl-C too: no text is left in the queue
            raise
        return vectors if dimensions is None else shortened(vectors, dimensions)

    def _drive(self, vectors: numpy.ndarray, bar: tqdm) -> None:
        while self.engine.has_work:
            for pooled in self.engine.step():
                if pooled.error is not None:
                    raise QuireError(pooled.error)
                vectors[pooled.index] = numpy.frombuffer(pooled.vector, dtype=numpy.float32)
                bar.update(1)

    def close(self) -> None:
        """Calling it twice is fine."""
        self.engine.close()

    def __enter__(self) -> "Embedder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shortened(vectors: numpy.ndarray, dimensions: int) -> numpy.ndarray:
    """The first `dimensions` numbers of each row, scaled to length one again; rows of zeros stay zeros."""
    kept = vectors[:, :dimensions]
    lengths = numpy.linalg.norm(kept, axis=1, keepdims=True)
    return kept / numpy.where(lengths == 0, 1, lengths)

"""Embedder: an encoder in-process. `Embedder().embed(["…"])` makes vectors; a classifier has `classify`, `score` and
`rerank`, and a model with a head for masked tokens `fill_mask`."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from tqdm.auto import tqdm

from quire.core.config import EngineConfig
from quire.core.errors import InvalidRequest, QuireError
from quire.core.request import EmbedRequest, Pooled
from quire.core.stats import VectorFormat
from quire.engine.build import Report, build_encoder
from quire.llm.one_caller import OneCaller
from quire.llm.progress import load_progress
from quire.text.encoder_texts import MaskPrediction, masked_request, pair_request, predictions_of, with_prompt
from quire.text.load import choose_tokenizer
from quire.text.prompts import Prompt, as_list, cut, prepare
from quire.text.tokenizer import Tokenizer

METHODS = {  # by the server's name for the same thing
    "/v1/embeddings": "embed",
    "/v1/classify": "classify",
    "/v1/score": "score",
    "/v1/rerank": "rerank",
    "/v1/fill-mask": "fill_mask",
}


@dataclass(frozen=True, slots=True)
class Classification:
    label: str  # of the highest score
    probs: list[float]  # in the order of the model's labels


@dataclass(frozen=True, slots=True)
class RankedDocument:
    index: int  # in the documents as they were given
    score: float


class Embedder:
    """A model ready to embed, or to classify. Settings are those of `EngineConfig`, flat: unknown names are refused.

    Without `model` it is the built-in all-MiniLM-L6-v2. Not thread-safe.
    """

    def __init__(self, model: str | None = None, *, use_tqdm: bool = True, **settings: Any) -> None:
        self.config = EngineConfig.of(model=model, **settings)
        with load_progress(use_tqdm) as progress:
            self._built = build_encoder(self.config, progress)
        self.engine = self._built.engine
        self.tokenizer: Tokenizer | None = choose_tokenizer(self.config.model, self._built.source)
        self._ids = itertools.count()
        self._one_caller = OneCaller()

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
        prompt_name: str | None = None,
    ) -> numpy.ndarray:
        """One row for each text, in their order: [texts, width] float32. All are checked before any is computed.

        `dimensions` keeps the first numbers of each row, of length one again; `truncate` cuts texts that are too
        long, which are refused otherwise. `prompt_name`: which of the model's own prompts texts begin with, such as
        "query".
        """
        self._check_kind(not self._vectors.labels)
        width = self._vectors.width
        if dimensions is not None and not (isinstance(dimensions, int) and 1 <= dimensions <= width):
            raise InvalidRequest(
                f"dimensions={dimensions!r} is outside 1 to {width}, the model's own", "dimensions"
            )
        prompted = with_prompt(as_list(texts), self._vectors, prompt_name)
        vectors = self._rows(EmbedRequest("", self._token_ids(prompted, truncate)), use_tqdm)
        return vectors if dimensions is None else shortened(vectors, dimensions)

    def classify(
        self, texts: Prompt | Sequence[Prompt], use_tqdm: bool = True, *, truncate: bool = False
    ) -> list[Classification]:
        """The classes of each text, by a model that has them; `truncate` as in `embed`."""
        self._check_kind(bool(self._vectors.labels))
        rows = self._rows(EmbedRequest("", self._token_ids(as_list(texts), truncate)), use_tqdm)
        return [Classification(self._vectors.labels[row.argmax()], row.tolist()) for row in rows]

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        truncate: bool = False,
    ) -> numpy.ndarray:
        """How well each of the `second` texts answers its `first` one: [pairs] float32. One first text goes with all.

        A classifier of one class scores each pair as a whole; an embedding model gives the cosine of two vectors.
        """
        firsts = [first] if isinstance(first, str) else list(first)
        seconds = [second] if isinstance(second, str) else list(second)
        if len(firsts) not in (1, len(seconds)):
            raise InvalidRequest(
                f"there are {len(firsts)} first and {len(seconds)} second texts: give one first text, or as many",
                "first",
            )
        self._check_kind(len(self._vectors.labels) <= 1)
        if self._vectors.labels:
            pairs = [(firsts[at % len(firsts)], text) for at, text in enumerate(seconds)]
            keep = self.report.limits.max_model_len if truncate else None
            return self._rows(pair_request("", pairs, self.tokenizer, keep), use_tqdm)[:, 0]
        rows = self.embed([*firsts, *seconds], use_tqdm, truncate=truncate)
        left, right = rows[: len(firsts)], rows[len(firsts) :]
        lengths = numpy.linalg.norm(left, axis=1) * numpy.linalg.norm(right, axis=1)
        products: numpy.ndarray = (left * right).sum(axis=1) / numpy.where(lengths == 0, 1, lengths)
        return products

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        use_tqdm: bool = True,
        *,
        truncate: bool = False,
    ) -> list[RankedDocument]:
        """The `top_n` documents (all of them by default) that answer the query best, the best first, by `score`."""
        scores = self.score(query, documents, use_tqdm, truncate=truncate) if documents else numpy.empty(0)
        order = numpy.argsort(-scores, kind="stable")[:top_n]
        return [RankedDocument(int(index), float(scores[index])) for index in order]

    def fill_mask(
        self, texts: Prompt | Sequence[Prompt], top_k: int = 5, use_tqdm: bool = True
    ) -> list[list[list[MaskPrediction]]]:
        """Of each text and each of its mask tokens, the `top_k` most likely tokens."""
        self._check_kind(self._vectors.predicts_masked)
        token_ids = self._token_ids(as_list(texts), truncate=False)
        if not token_ids:
            return []
        limits = self.report.limits
        request = masked_request("", token_ids, top_k, self.tokenizer, limits.vocab_size)
        assert self.tokenizer is not None
        return [predictions_of(pooled, request, self.tokenizer) for pooled in self._pooled(request, use_tqdm)]

    @property
    def _vectors(self) -> VectorFormat:
        assert self.report.vectors is not None
        return self.report.vectors

    def _check_kind(self, serves: bool) -> None:
        if not serves:
            methods = [METHODS[path] for path in self._vectors.paths]
            raise InvalidRequest(
                f"{self.report.model} {self._vectors.kind}: use {', '.join(methods)}", "model"
            )

    def _token_ids(self, texts: Sequence[Prompt], truncate: bool) -> list[list[int]]:
        token_ids = [prepare(text, self.tokenizer).token_ids for text in texts]
        return [cut(text, self.report.limits.max_model_len) for text in token_ids] if truncate else token_ids

    def _rows(self, request: EmbedRequest, use_tqdm: bool) -> numpy.ndarray:
        """[texts, width] float32."""
        rows = [numpy.frombuffer(pooled.vector, numpy.float32) for pooled in self._pooled(request, use_tqdm)]
        return numpy.stack(rows) if rows else numpy.empty((0, self._vectors.width), numpy.float32)

    def _pooled(self, request: EmbedRequest, use_tqdm: bool) -> list[Pooled]:
        """In the order of the texts."""
        if not request.texts:
            return []
        request = replace(request, request_id=str(next(self._ids)))
        pooled: list[Pooled] = []
        count = len(request.texts)
        with (
            self._one_caller.call(),
            tqdm(total=count, disable=not use_tqdm, desc="embed", unit="text") as bar,
        ):
            self.engine.add(request)
            try:
                while self.engine.has_work:
                    made = self.engine.step()
                    for text in made:
                        if text.error is not None:
                            raise QuireError(text.error)
                    pooled += made
                    bar.update(len(made))
            except BaseException:
                self.engine.abort(request.request_id)  # on ctrl-C too: no text is left in the queue
                raise
        return pooled

    def close(self) -> None:
        """Calling it twice is fine."""
        self._one_caller.close()
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

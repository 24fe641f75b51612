"""VectorIndex: what an index of chunks promises, its records, and how two rankings become one.

An index holds no truth: it can be deleted and filled again from its owner's chunks and vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy

from quire.core.errors import QuireError
from quire.rag.filters import Filter

FUSION_K = 60  # of reciprocal rank fusion
CANDIDATES = 100  # of each ranking at least, before they are fused
Ranker = Literal["auto", "none"]


class IndexFault(QuireError):
    """An index whose files cannot be read or do not fit: its owner deletes the folder and fills it again."""


@dataclass(frozen=True, slots=True)
class Point:
    """One chunk as the index sees it."""

    chunk_id: int
    vectors: list[numpy.ndarray]  # [dimension] float32 each; the best of them counts
    text: str
    attributes: dict[str, Any]  # texts, numbers and bools


@dataclass(frozen=True, slots=True)
class Hit:
    chunk_id: int
    score: float  # 0 to 1: the cosine (ranker "none"), or the share of the best possible fused rank


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """A search: `auto` fuses the rankings by vector and by words with these weights; `none` ranks by vector."""

    vector: numpy.ndarray  # [dimension]
    text: str
    limit: int
    filter: Filter | None = None
    ranker: Ranker = "auto"
    embedding_weight: float = 1.0
    text_weight: float = 1.0
    score_threshold: float = 0.0


class VectorIndex(Protocol):
    """Safe to use from several threads. Each change is on disk when its call returns, if the index has a folder."""

    def upsert(self, points: Sequence[Point]) -> None:
        """Adds points, or replaces the ones with the same chunk_id."""
        ...

    def delete(self, chunk_ids: Sequence[int]) -> None:
        """Ids that are not there are passed over."""
        ...

    def set_attributes(self, chunk_ids: Sequence[int], attributes: dict[str, Any]) -> None:
        """Replaces all attributes of these chunks."""
        ...

    def search(self, query: IndexQuery) -> list[Hit]:
        """The best chunks, the best first. ValueError for weights that are negative or both 0."""
        ...

    def __len__(self) -> int: ...

    def close(self) -> None: ...


class Rankings(Protocol):
    """What each kind of index implements for `ranked_hits`; pairs of chunk_id and score, the best first."""

    def by_vector(
        self, vector: numpy.ndarray, limit: int, filter: Filter | None
    ) -> list[tuple[int, float]]: ...

    def by_words(self, text: str, limit: int, filter: Filter | None) -> list[tuple[int, float]]: ...


def ranked_hits(index: Rankings, query: IndexQuery) -> list[Hit]:
    """`VectorIndex.search` over the two rankings of an index."""
    weights = (query.embedding_weight, query.text_weight) if query.ranker == "auto" else (1.0, 0.0)
    if min(weights) < 0 or not sum(weights) > 0:
        raise ValueError(
            f"embedding_weight={weights[0]:g} and text_weight={weights[1]:g}: give 0 or more, and one above 0"
        )
    depth = max(CANDIDATES, 2 * query.limit)
    if weights[1] == 0:
        ranking = index.by_vector(query.vector, query.limit, query.filter)
        hits = [Hit(chunk_id, min(1.0, max(0.0, score))) for chunk_id, score in ranking]
    else:
        dense = index.by_vector(query.vector, depth, query.filter) if weights[0] > 0 else []
        words = index.by_words(query.text, depth, query.filter)
        hits = _fused([(dense, weights[0]), (words, weights[1])])
    return [hit for hit in hits[: query.limit] if hit.score >= query.score_threshold]


def _fused(rankings: Sequence[tuple[Sequence[tuple[int, float]], float]]) -> list[Hit]:
    """Weighted reciprocal rank fusion, divided by the score of a chunk that is first everywhere.

    First in one ranking and second in the other is as good as the reverse. Such ties are common, and are decided by
    how close a chunk's scores are to the best of each ranking.
    """
    fused: dict[int, float] = {}
    closeness: dict[int, float] = {}
    for ranking, weight in rankings:
        for rank, (chunk_id, score) in enumerate(ranking, 1):
            fused[chunk_id] = fused.get(chunk_id, 0.0) + weight / (FUSION_K + rank)
            closeness[chunk_id] = closeness.get(chunk_id, 0.0) + weight * score / (abs(ranking[0][1]) or 1.0)
    best = sum(weight for _, weight in rankings) / (FUSION_K + 1)
    shares = {chunk_id: round(score / best, 9) for chunk_id, score in fused.items()}
    ordered = sorted(shares, key=lambda chunk_id: (-shares[chunk_id], -closeness[chunk_id], chunk_id))
    return [Hit(chunk_id, shares[chunk_id]) for chunk_id in ordered]


def unit_vectors(point: Point, dimension: int) -> numpy.ndarray:
    """[windows, dimension] float32, of length one each. ValueError for a wrong shape, NaN or infinity."""
    if not point.vectors:
        raise ValueError(f"chunk {point.chunk_id} has no vector: give one for each of its windows")
    for vector in point.vectors:
        if vector.shape != (dimension,):
            raise ValueError(
                f"chunk {point.chunk_id} has a vector of shape {vector.shape}, not ({dimension},)"
            )
    vectors = numpy.stack(point.vectors).astype(numpy.float32)
    if not numpy.isfinite(vectors).all():
        raise ValueError(f"chunk {point.chunk_id} has a vector with NaN or infinity")
    lengths = numpy.linalg.norm(vectors, axis=1, keepdims=True)
    return numpy.ascontiguousarray(vectors / numpy.where(lengths == 0, 1, lengths), numpy.float32)

"""VectorIndex: both kinds promise the same; the exact one is compared with a brute force."""

import math
import re
import sqlite3
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest

from quire.core.errors import ConfigError
from quire.rag import hnsw
from quire.rag.filters import parse_filter
from quire.rag.index import GrowingIndex, open_index
from quire.rag.ranking import IndexFault, IndexQuery, Point, VectorIndex
from quire.rag.words import STOP_WORDS, stem

DIMENSION = 16
TOPICS = ["river", "bank", "money", "engine", "paper", "light", "music", "stone", "winter", "garden"]


def points(count: int, seed: int = 0, first: int = 1) -> list[Point]:
    random = numpy.random.default_rng(seed)
    made = []
    for chunk_id in range(first, first + count):
        vectors = random.normal(size=(int(random.integers(1, 4)), DIMENSION)).astype(numpy.float32)
        text = " ".join(random.choice(TOPICS, size=int(random.integers(3, 30))))
        made.append(
            Point(chunk_id, list(vectors), text, {"even": chunk_id % 2 == 0, "tenth": chunk_id // 10})
        )
    return made


def cosines(made: list[Point], vector: numpy.ndarray) -> dict[int, float]:
    def cosine(other: numpy.ndarray) -> float:
        return float(vector @ other / numpy.linalg.norm(vector) / numpy.linalg.norm(other))

    return {point.chunk_id: max(map(cosine, point.vectors)) for point in made}


def bm25(made: list[Point], query: str) -> dict[int, float]:
    def words(text: str) -> Counter[str]:
        plain = (word for word in re.findall(r"\w+", text.lower()) if word not in STOP_WORDS)
        return Counter(stem(word) for word in plain)

    texts = {point.chunk_id: words(point.text) for point in made}
    average = sum(text.total() for text in texts.values()) / len(texts)
    scores = dict.fromkeys(texts, 0.0)
    for word in words(query):
        holding = [text for text in texts.values() if word in text]
        rarity = math.log(1 + (len(texts) - len(holding) + 0.5) / (len(holding) + 0.5))
        for chunk_id, text in texts.items():
            count = text[word]
            scores[chunk_id] += rarity * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * text.total() / average))
    return {chunk_id: score for chunk_id, score in scores.items() if score > 0}


def ranked(scores: dict[int, float]) -> list[int]:
    return sorted(scores, key=lambda chunk_id: (-scores[chunk_id], chunk_id))


@pytest.fixture(params=["exact", "hnsw"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "hnsw":
        pytest.importorskip("qdrant_edge")
    opened = open_index(tmp_path, DIMENSION, request.param)
    yield opened
    opened.close()


def test_vectors_rank_by_the_best_window(index: VectorIndex) -> None:
    made = points(200)
    index.upsert(made)
    vector = numpy.random.default_rng(9).normal(size=DIMENSION).astype(numpy.float32)
    hits = index.search(IndexQuery(vector, "", 10, ranker="none"))
    expected = cosines(made, vector)
    assert [hit.chunk_id for hit in hits] == ranked(expected)[:10]
    assert [hit.score for hit in hits] == pytest.approx([expected[hit.chunk_id] for hit in hits], abs=1e-5)


def test_words_rank_by_bm25(index: VectorIndex) -> None:
    made = points(200)
    index.upsert(made)
    vector = numpy.ones(DIMENSION, numpy.float32)
    hits = index.search(IndexQuery(vector, "the rivers of money", 10, embedding_weight=0.0))
    expected = bm25(made, "the rivers of money")
    top = ranked(expected)[:10]
    assert sum(hit.chunk_id in top for hit in hits) >= 9  # equal texts and rounding may change places
    assert expected[hits[0].chunk_id] == pytest.approx(expected[top[0]], rel=1e-4)


def test_the_fused_rank_is_weighted_and_between_0_and_1(index: VectorIndex) -> None:
    made = [
        Point(1, [numpy.eye(DIMENSION, dtype=numpy.float32)[0]], "stone", {}),
        Point(2, [numpy.eye(DIMENSION, dtype=numpy.float32)[1]], "river", {}),
        Point(3, [numpy.eye(DIMENSION, dtype=numpy.float32)[2]], "paper", {}),
    ]
    index.upsert(made)
    vector = numpy.array([1.0, 0.5, *[0.0] * (DIMENSION - 2)], numpy.float32)
    best = {hit.chunk_id: hit.score for hit in index.search(IndexQuery(vector, "river", 3))}
    assert best[2] == pytest.approx((1 / 62 + 1 / 61) / (2 / 61))
    assert best[1] == pytest.approx(0.5)
    by_meaning = index.search(IndexQuery(vector, "river", 3, embedding_weight=3.0, text_weight=0.01))
    assert by_meaning[0].chunk_id == 1
    assert [hit.chunk_id for hit in index.search(IndexQuery(vector, "river", 3, score_threshold=0.9))] == [2]
    with pytest.raises(
        ValueError, match="embedding_weight=0 and text_weight=0: give 0 or more, and one above 0"
    ):
        index.search(IndexQuery(vector, "river", 3, embedding_weight=0, text_weight=0))


def test_replacing_deleting_and_filtering(index: VectorIndex) -> None:
    made = points(60)
    index.upsert(made)
    index.upsert([Point(5, [numpy.ones(DIMENSION, numpy.float32)], "volcano", {"even": True})])
    assert len(index) == 60
    vector = numpy.ones(DIMENSION, numpy.float32)
    assert index.search(IndexQuery(vector, "volcano", 1))[0].chunk_id == 5
    even = parse_filter({"type": "eq", "key": "even", "value": True})
    hits = index.search(IndexQuery(vector, "river", 100, even))
    assert {hit.chunk_id for hit in hits} == {*range(2, 61, 2), 5}
    index.delete([5, 6, 999])
    assert len(index) == 58
    assert not {5, 6} & {hit.chunk_id for hit in index.search(IndexQuery(vector, "volcano river", 100))}


def test_points_are_there_when_it_is_opened_again(index: VectorIndex, tmp_path: Path) -> None:
    index.upsert(points(30))
    index.delete([3])
    vector = numpy.ones(DIMENSION, numpy.float32)
    before = index.search(IndexQuery(vector, "stone", 5))
    index.close()
    again = open_index(tmp_path, DIMENSION, "hnsw" if isinstance(index, hnsw.HnswIndex) else "exact")
    assert len(again) == 29
    assert again.search(IndexQuery(vector, "stone", 5)) == before
    again.close()
    with pytest.raises(IndexFault, match="for vectors of 16 numbers, not 8: delete it"):
        open_index(tmp_path, 8, "hnsw" if isinstance(index, hnsw.HnswIndex) else "exact")


def test_an_empty_index_finds_nothing(index: VectorIndex) -> None:
    assert len(index) == 0
    assert index.search(IndexQuery(numpy.ones(DIMENSION, numpy.float32), "river", 5)) == []


@pytest.mark.parametrize(
    ("vectors", "words"),
    [
        ([], "chunk 1 has no vector"),
        ([numpy.ones(3, numpy.float32)], r"shape \(3,\), not \(16,\)"),
        ([numpy.full(DIMENSION, numpy.nan, numpy.float32)], "NaN or infinity"),
    ],
)
def test_wrong_vectors_are_refused_and_nothing_is_added(index: VectorIndex, vectors: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        index.upsert([Point(1, vectors, "x", {})])
    assert len(index) == 0


def test_many_deletions_leave_the_same_results() -> None:
    index = open_index(None, DIMENSION)
    for round in range(30):
        index.upsert(points(100, seed=round))  # replaces all
    made = points(100, seed=29)
    vector = numpy.ones(DIMENSION, numpy.float32)
    assert [hit.chunk_id for hit in index.search(IndexQuery(vector, "", 5, ranker="none"))] == ranked(
        cosines(made, vector)
    )[:5]
    expected = bm25(made, "stone")
    assert index.search(IndexQuery(vector, "stone", 1, embedding_weight=0))[0].chunk_id == ranked(expected)[0]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "points.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(IndexFault, match=r"points\.sqlite cannot be read .*: delete it"):
        open_index(tmp_path, DIMENSION, "exact")


def test_kinds_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs qdrant-edge-py: pip install"):
        open_index(tmp_path, DIMENSION, "hnsw")
    plain = open_index(tmp_path, DIMENSION)
    plain.upsert(points(3))
    assert len(plain) == 3
    plain.close()


def test_an_index_grows_into_a_graph(tmp_path: Path) -> None:
    pytest.importorskip("qdrant_edge")
    index = GrowingIndex(tmp_path, DIMENSION, exact_chunks=100)
    made = points(100)
    index.upsert(made)
    assert (tmp_path / "points.sqlite").exists()
    vector = numpy.ones(DIMENSION, numpy.float32)
    before = index.search(IndexQuery(vector, "stone river", 10, ranker="none"))
    index.upsert(points(1, seed=5, first=101))
    assert not (tmp_path / "points.sqlite").exists()
    assert len(index) == 101
    after = [
        hit
        for hit in index.search(IndexQuery(vector, "stone river", 11, ranker="none"))
        if hit.chunk_id != 101
    ]
    assert [hit.chunk_id for hit in after[:10]] == [hit.chunk_id for hit in before]
    index.close()
    again = open_index(tmp_path, DIMENSION)
    assert len(again) == 101
    again.close()


def test_a_graph_is_built_beside_searches_and_keeps_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("qdrant_edge")
    monkeypatch.setattr(hnsw, "BUILD_FROM", 500)
    monkeypatch.setattr(hnsw, "SCAN_KB", 2)
    index = hnsw.HnswIndex(tmp_path, DIMENSION)
    made = points(600)
    index.upsert(made)
    assert index._noted is not None  # a graph is being built
    index.delete([7])
    index.upsert(points(1, seed=8, first=2000))
    index.wait()
    assert len(index) == 600
    assert index.num_indexed > 0
    index.upsert(points(600, seed=9, first=3000))
    index.upsert(points(600, seed=10, first=4000))  # while a graph is built: it is built again for these
    index.wait()
    assert index.num_indexed > 1500
    vector = made[41].vectors[0]
    assert index.search(IndexQuery(vector, "", 1, ranker="none"))[0].chunk_id == 42
    assert not any(
        hit.chunk_id == 7 for hit in index.search(IndexQuery(made[6].vectors[0], "", 100, ranker="none"))
    )
    index.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hnsw"]


def test_points_without_words_are_built_into_a_graph_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("qdrant_edge")
    monkeypatch.setattr(hnsw, "BUILD_FROM", 300)
    monkeypatch.setattr(hnsw, "SCAN_KB", 2)
    index = hnsw.HnswIndex(tmp_path, DIMENSION)
    index.upsert([Point(point.chunk_id, point.vectors, "", {}) for point in points(400)])
    waiting = threading.Thread(target=index.wait, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()  # it is not built again and again
    assert index.num_indexed >= 400
    index.close()


def test_a_crash_while_files_change_places_leaves_the_old_ones(tmp_path: Path) -> None:
    pytest.importorskip("qdrant_edge")
    index = hnsw.HnswIndex(tmp_path, DIMENSION)
    index.upsert(points(5))
    index.close()
    (tmp_path / "hnsw").rename(tmp_path / "hnsw.old")
    (tmp_path / "hnsw.new").mkdir()
    again = hnsw.HnswIndex(tmp_path, DIMENSION)
    assert len(again) == 5
    again.close()


def test_threads_search_while_points_are_added(index: VectorIndex) -> None:
    faults: list[Exception] = []

    def search() -> None:
        try:
            for _ in range(50):
                index.search(IndexQuery(numpy.ones(DIMENSION, numpy.float32), "stone", 5))
        except Exception as fault:
            faults.append(fault)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for start in range(1, 500, 50):
        index.upsert(points(50, first=start))
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(index) == 500


def test_what_a_crash_left_is_whole(tmp_path: Path) -> None:
    """Points of a transaction that was not committed are not there."""
    index = open_index(tmp_path, DIMENSION, "exact")
    index.upsert(points(5))
    other = sqlite3.connect(tmp_path / "points.sqlite")
    assert other.execute("SELECT count(*) FROM point").fetchone() == (5,)
    other.close()
    index.close()

"""Classes, scores, reranking and masked words of a real server: a reranker, a classifier, a model of masked words."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import torch
from schemathesis import GenerationMode

from quire import Embedder
from quire.core.config import EngineConfig
from quire.server.encoders import MAX_PAIR_CHARACTERS
from quire.server.errors import ApiError
from quire.server.served_models import ServedModels
from quire.server.settings import ServerSettings
from tests.models import encoder_folders as folders
from tests.server.running import RunningServer
from tests.server.test_any_request import tried

pytestmark = pytest.mark.e2e
CLASSIFY, SCORE, RERANK, FILL_MASK = "/v1/classify", "/v1/score", "/v1/rerank", "/v1/fill-mask"
QUERY = "what is a cat ?"
TEXTS = ["the cat sat on the mat .", "a dog", "the blue dog runs"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def right(home: Path) -> list[float]:
    """The reranker's scores of the texts, by transformers."""
    model, tokenizer = folders.reranker(home / "reranker"), folders.tokenizer_of(home / "reranker")
    with torch.inference_mode():
        inputs = [tokenizer(QUERY, text, return_tensors="pt") for text in TEXTS]
        return [float(model(**one).logits.sigmoid()) for one in inputs]


@pytest.fixture(scope="module")
def serving(home: Path, right: list[float]) -> Iterator[RunningServer]:
    folders.classifier(home / "classifier")
    folders.masked(home / "masked")
    flags = ("--encoder-model", str(home / "classifier"), "--embedding-model", str(home / "masked"))
    flags = (*flags, "--data-dir", str(home / "data"))
    running = RunningServer(str(home / "reranker"), "--quantization", "none", *flags)
    try:
        yield running.wait_ready()
    finally:
        running.close()


def answer(serving: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    response = serving.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_texts_are_classified_in_the_shape_of_vllm(serving: RunningServer, home: Path) -> None:
    body = answer(serving, CLASSIFY, model="classifier", input=TEXTS)
    assert body["id"].startswith("classify-")
    assert (body["object"], body["model"]) == ("list", "classifier")
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 9 + 4 + 6
    with Embedder(str(home / "classifier"), use_tqdm=False) as model:
        expected = model.classify(TEXTS, use_tqdm=False)
    for index, (item, known) in enumerate(zip(body["data"], expected, strict=True)):
        assert (item["index"], item["label"], item["num_classes"]) == (index, known.label, 3)
        assert item["probs"] == pytest.approx(known.probs, rel=1e-4)
        assert math.isclose(sum(item["probs"]), 1, rel_tol=1e-5)
    ids = answer(serving, "/classify", model="classifier", input=[2, 5, 6, 3])
    text = answer(serving, CLASSIFY, model="classifier", input="the cat")
    assert ids["data"] == text["data"]


def test_a_store_is_ranked_again_by_a_cross_encoder(serving: RunningServer, right: list[float]) -> None:
    client = serving.client()
    names = {}
    for number, text in enumerate(TEXTS):
        names[client.files.create(file=(f"{number}.txt", text.encode()), purpose="assistants").id] = number
    store = client.vector_stores.create(name="texts")
    client.vector_stores.file_batches.create_and_poll(store.id, file_ids=list(names), poll_interval_ms=50)
    options: Any = {"ranker": "reranker"}
    results = client.vector_stores.search(store.id, query=QUERY, ranking_options=options).data
    order = sorted(range(len(TEXTS)), key=lambda number: -right[number])
    assert [names[result.file_id] for result in results] == order
    assert [result.score for result in results] == pytest.approx(sorted(right, reverse=True), rel=1e-3)


def test_pairs_get_the_scores_of_transformers(serving: RunningServer, right: list[float]) -> None:
    many = answer(serving, SCORE, model="reranker", text_1=QUERY, text_2=TEXTS)
    assert [item["score"] for item in many["data"]] == pytest.approx(right, rel=1e-4)
    assert [(item["index"], item["object"]) for item in many["data"]] == [(i, "score") for i in range(3)]
    # the reranker is the first that can
    pairs = answer(serving, "/score", text_1=[QUERY, QUERY], text_2=TEXTS[:2])
    assert pairs["model"] == "reranker"
    assert [item["score"] for item in pairs["data"]] == pytest.approx(right[:2], rel=1e-4)
    lone = answer(serving, SCORE, text_1=QUERY, text_2=TEXTS[1])
    assert [item["score"] for item in lone["data"]] == pytest.approx(right[1:2], rel=1e-4)


def test_documents_come_back_best_first(serving: RunningServer, right: list[float]) -> None:
    order = sorted(range(3), key=lambda index: -right[index])
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    for path in (RERANK, "/rerank", "/v2/rerank"):
        body = answer(serving, path, model="reranker", query=QUERY, documents=documents)
        assert [item["index"] for item in body["results"]] == order
        assert [item["relevance_score"] for item in body["results"]] == pytest.approx(
            [right[index] for index in order], rel=1e-4
        )
        assert [item["document"]["text"] for item in body["results"]] == [TEXTS[index] for index in order]
    body = answer(serving, RERANK, query=QUERY, documents=documents, top_n=1, return_documents=False)
    assert [list(item) for item in body["results"]] == [["index", "relevance_score"]]
    assert body["results"][0]["index"] == order[0]
    everything = answer(serving, RERANK, query=QUERY, documents=documents, top_n=99)
    assert len(everything["results"]) == 3


def test_an_embedding_model_scores_by_the_cosine(serving: RunningServer) -> None:
    body = answer(serving, SCORE, model="masked", text_1=QUERY, text_2=[*TEXTS, QUERY])
    vectors = answer(serving, "/v1/embeddings", model="masked", input=[*TEXTS, QUERY])["data"]
    *others, query = (item["embedding"] for item in vectors)
    cosines = [sum(a * b for a, b in zip(query, other, strict=True)) for other in (*others, query)]
    assert [item["score"] for item in body["data"]] == pytest.approx(cosines, abs=1e-5)
    assert body["data"][3]["score"] == pytest.approx(1)
    ranked = answer(serving, RERANK, model="masked", query=QUERY, documents=[*TEXTS, QUERY])
    assert ranked["results"][0]["index"] == 3


def test_masked_words_are_predicted(serving: RunningServer) -> None:
    body = answer(serving, FILL_MASK, input=["the [MASK] sat", "a [MASK] [MASK] ."], top_k=2)
    assert (body["model"], [len(item["masks"]) for item in body["data"]]) == ("masked", [1, 2])
    for item in body["data"]:
        for first, second in item["masks"]:
            assert 1 >= first["score"] >= second["score"] > 0
            assert folders.WORDS[first["token"]].removeprefix("##") == first["token_str"].removeprefix("##")
    best = body["data"][0]["masks"][0][0]
    assert best["sequence"].split()[0] == "the"
    assert len(answer(serving, FILL_MASK, input="[MASK]")["data"][0]["masks"][0]) == 5


LONG = "the cat " * 40
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CLASSIFY, {"model": "classifier", "input": []}, "input", "empty list"),
    (CLASSIFY, {"model": "classifier", "input": ["a"] * 2049}, "input", "2049 texts .* may have 2048"),
    (CLASSIFY, {"model": "classifier", "input": LONG}, "input", r"input\[0\] has 82 tokens .* takes 40"),
    (CLASSIFY, {"model": "classifier", "input": [[2, 99, 3]]}, "input", "outside the vocabulary of 21"),
    (
        CLASSIFY,
        {"model": "masked", "input": "a"},
        "model",
        "masked makes embeddings and is served at .*/v1/embeddings",
    ),
    (
        SCORE,
        {"model": "classifier", "text_1": "a", "text_2": "b"},
        "model",
        "makes class scores .* not at /v1/score",
    ),
    (
        "/v1/embeddings",
        {"model": "reranker", "input": "a"},
        "model",
        "reranker makes class scores .*/v1/rerank",
    ),
    (
        FILL_MASK,
        {"model": "reranker", "input": "a"},
        "model",
        r"masked \(/v1/embeddings.*--embedding-model adds",
    ),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "text_1 has 2 texts and text_2 1"),
    (SCORE, {"text_1": "a", "text_2": []}, "text_2", "text_2 is an empty list"),
    (SCORE, {"text_1": "a", "text_2": LONG}, "text_2", r"text_2\[0\] has 84 tokens"),
    (
        SCORE,
        {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 41},
        "truncate_prompt_tokens",
        "1 to 40",
    ),
    (RERANK, {"query": "a", "documents": []}, "documents", "documents is an empty list"),
    (RERANK, {"query": "a", "documents": ["a"] * 2049}, "documents", "2049 texts"),
    (RERANK, {"query": "a", "documents": ["b", LONG]}, "documents", r"documents\[1\] has 84 tokens"),
    (
        RERANK,
        {"model": "masked", "query": "a", "documents": ["b", LONG]},
        "documents",
        r"documents\[1\] has 82",
    ),
    (RERANK, {"model": "masked", "query": LONG, "documents": ["b"]}, "query", r"query\[0\] has 82 tokens"),
    (
        RERANK,
        {"query": "a", "documents": ["b", LONG * 60]},
        "documents",
        r"documents\[1\] has at least 41 tokens",
    ),
    (CLASSIFY, {"model": "classifier", "input": LONG * 60}, "input", r"input\[0\] has at least 41 tokens"),
    (RERANK, {"query": "a", "documents": [5]}, "documents[0]", "string"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "0"),
    (
        RERANK,
        {"query": "a" * 9000, "documents": ["b"] * 2000, "truncate_prompt_tokens": -1},
        "query",
        f"query counted with each, and {MAX_PAIR_CHARACTERS} are",
    ),
    (FILL_MASK, {"input": "the cat"}, "input", r"input\[0\] has no mask token: put \[MASK\]"),
    (FILL_MASK, {"input": "[MASK]", "top_k": 0}, "top_k", "top_k=0 is outside 1 to 21"),
    (FILL_MASK, {"input": "[MASK]", "top_k": 101}, "top_k", "top_k=101 is outside 1 to 21"),
    (FILL_MASK, {"input": ["[MASK] " * 30] * 2, "top_k": 20}, "input", "1200 predictions.* may have 1024"),
]


@pytest.mark.parametrize(("path", "fields", "param", "message"), REFUSED)
def test_bad_requests_say_what_is_wrong(
    serving: RunningServer, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    error = serving.error(path, 400, json=fields)
    assert error["param"] == param, error
    assert re.search(message, error["message"]), error["message"]


def test_long_texts_and_pairs_may_be_cut(serving: RunningServer) -> None:
    def tokens(path: str, **fields: Any) -> int:
        return answer(serving, path, truncate_prompt_tokens=-1, **fields)["usage"]["total_tokens"]

    assert tokens(CLASSIFY, model="classifier", input=LONG) == 40
    assert tokens(SCORE, text_1=QUERY, text_2=[LONG, "a"]) == 40 + 9
    assert tokens(RERANK, query=LONG, documents=[LONG]) == 40


def test_a_chat_is_refused_with_the_paths_that_are_served(serving: RunningServer) -> None:
    assert "makes class scores and no text: use /v1/classify, /v1/score" in serving.chat_error()["message"]
    assert serving.error(CLASSIFY, 404, json={"model": "nope", "input": "x"})["code"] == "model_not_found"


def test_no_request_breaks_these_endpoints(serving: RunningServer) -> None:
    schema = schemathesis.openapi.from_dict(serving.get("/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    paths = (CLASSIFY, SCORE, RERANK, FILL_MASK)
    ours = [operation for operation in operations if operation.path in paths]
    assert len(ours) == 4
    for operation in ours:
        for mode in GenerationMode:
            assert tried(operation, mode, serving.url, seconds=2)
    assert serving.get("/ready").status_code == 200
    assert serving.metric("engine_restarts_total") == 0


def test_without_such_a_model_the_error_says_how_to_add_one() -> None:
    models = ServedModels.of(EngineConfig(), ServerSettings())
    with pytest.raises(
        ApiError, match=r"no model serves /v1/classify: .*--embedding-model adds one"
    ) as caught:
        models.encoder(None, CLASSIFY)
    assert caught.value.status == 404

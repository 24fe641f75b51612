"""/v1/embeddings of a real server: the built-in encoder beside a model that chats, and alone."""

import base64
import json
import math
import os
import re
import signal
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, WeightsError
from quire.server.errors import ApiError
from quire.server.served_models import ServedModels
from quire.server.settings import ServerSettings
from quire.weights.builtin import builtin_encoder_folder
from tests.server.running import MODEL, RunningServer

pytestmark = pytest.mark.e2e
MINILM = "all-MiniLM-L6-v2"
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return builtin_encoder_folder()
    except WeightsError as error:
        pytest.skip(f"the built-in encoder is not here and cannot be fetched: {error}")


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[RunningServer]:
    """A server with a chat model, and a queue that is easily filled."""
    running = RunningServer("--max-queue-tokens", "20000")
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture(scope="module")
def client(embedding: RunningServer) -> openai.OpenAI:
    return embedding.client()


def encoder_pid(server: RunningServer) -> int:
    """The second engine, whose log line says that it was asked for."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    workers = [pid for pid in children if "quire.link.worker" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    return int(workers[-1])  # in the order in which they were started


def test_the_built_in_model_starts_when_it_is_first_named(
    embedding: RunningServer, client: openai.OpenAI
) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, MINILM]
    found = client.embeddings.create(
        model=f"sentence-transformers/{MINILM}", input=["The first.", "Another one"]
    )
    assert [one.index for one in found.data] == [0, 1]
    assert found.usage.prompt_tokens == found.usage.total_tokens == 9
    for one in found.data:
        assert len(one.embedding) == 384
        assert math.isclose(math.fsum(x * x for x in one.embedding), 1, rel_tol=1e-5)
    embedding.wait_for_line("starting an embedding engine")
    assert client.models.retrieve(MINILM).id == MINILM


def test_base64_and_floats_are_the_same_numbers_for_text_and_token_ids(embedding: RunningServer) -> None:
    def vector(**fields: object) -> list[float]:
        body = embedding.post(PATH, json={"model": "minilm", **fields}).json()
        (one,) = body["data"]
        if fields.get("encoding_format") != "base64":
            return one["embedding"]
        data = base64.b64decode(one["embedding"])
        return list(struct.unpack(f"<{len(data) // 4}f", data))

    floats = vector(input="hi")
    assert vector(input="hi", encoding_format="base64") == floats
    assert vector(input=[101, 7632, 102]) == vector(input=[[101, 7632, 102]]) == floats
    bare = vector(input="hi", add_special_tokens=False)
    assert bare != floats
    assert vector(input=[7632], add_special_tokens=False) == bare
    short = vector(input="hi", dimensions=10)
    length = math.sqrt(math.fsum(x * x for x in floats[:10]))
    assert short == pytest.approx([x / length for x in floats[:10]], rel=1e-5)
    assert vector(input="hi", dimensions=384) == floats


def test_a_whole_batch_comes_back_in_order(client: openai.OpenAI) -> None:
    texts = [f"{'word ' * (i % 7)}number {i}" for i in range(300)]
    batch = client.embeddings.create(model=MINILM, input=texts)
    assert [one.index for one in batch.data] == list(range(300))
    alone = client.embeddings.create(model=MINILM, input=texts[123])
    assert alone.data[0].embedding == batch.data[123].embedding  # to the bit


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": "word " * 400}, "input", r"input\[0\] has 402 tokens and this model takes 256"),
        ({"input": ["x", "word " * 300]}, "input", r"input\[1\] has 302"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["x"] * 2049}, "input", "2049 texts and one request may have 2048"),
        ({"input": ["word " * 250] * 100}, "input", r"tokens together and 20000 may wait"),
        ({"input": [[30522]]}, "input", "token id 30522 is outside the vocabulary of 30522"),
        ({"input": [[2**40]]}, "input", "outside the vocabulary"),
        ({"input": [[791, 4062, 57671, 39935]]}, "input", "57671.*check_embedding_ctx_length=False"),
        (
            {"input": [[101, 7632, 102], [791, 4062]]},
            "input",
            r"input\[1\] does not begin with .*101.*check_embedding_ctx",
        ),
        ({"input": "word " * 400}, "input", "maximum context length is 256 .*--embedding-truncate"),
        ({"input": [[]]}, "input", r"input\[0\] has no tokens"),
        ({"input": 5}, "input", "valid string"),
        ({"input": "x", "dimensions": 385}, "dimensions", "outside 1 to 384"),
        ({"input": "x", "dimensions": 0}, "dimensions", "outside 1 to 384"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "float"),
        ({"input": "x", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "1 to 256"),
        ({"input": "x", "model": MODEL}, "model", "generates text"),
    ],
)
def test_bad_requests_say_what_is_wrong(
    embedding: RunningServer, fields: dict[str, object], param: str, message: str
) -> None:
    error = embedding.error(PATH, 400, json={"model": MINILM, **fields})
    assert error["param"] == param
    assert re.search(message, error["message"]), error["message"]


def test_half_a_character_is_refused(embedding: RunningServer) -> None:
    body = json.dumps({"model": MINILM, "input": "a\ud800"})
    error = embedding.error(PATH, 400, content=body, headers={"Content-Type": "application/json"})
    assert error["param"] in ("input", None)


def test_models_are_not_mistaken_for_each_other(embedding: RunningServer) -> None:
    assert embedding.error(PATH, 404, json={"model": "nope", "input": "x"})["code"] == "model_not_found"
    assert "use /v1/embeddings" in embedding.chat_error(model=MINILM)["message"]


def test_long_texts_may_be_cut(embedding: RunningServer) -> None:
    def usage(keep: int) -> int:
        body = {"model": MINILM, "input": "word " * 400, "truncate_prompt_tokens": keep}
        return embedding.post(PATH, json=body).json()["usage"]["total_tokens"]

    assert (usage(-1), usage(7)) == (256, 7)


def test_who_would_wait_too_long_is_refused_at_once(embedding: RunningServer) -> None:
    body = {"model": MINILM, "input": ["word " * 250] * 70}  # two of them are more than may wait

    def ask(_number: int) -> httpx.Response:
        return embedding.post(PATH, json=body)

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask, range(4)))
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["Retry-After"]) >= 1


def test_a_killed_embedding_engine_comes_back_while_chat_goes_on(
    embedding: RunningServer, client: openai.OpenAI
) -> None:
    before = client.embeddings.create(model=MINILM, input="the same").data[0].embedding
    os.kill(encoder_pid(embedding), signal.SIGKILL)
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=3, temperature=0
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 3
    assert embedding.get("/ready").status_code == 200
    deadline = time.monotonic() + 60
    while True:
        try:
            after = client.embeddings.create(model=MINILM, input="the same").data[0].embedding
            break
        except openai.InternalServerError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert after == before
    assert embedding.metric("engine_restarts_total", model_name=MINILM) == 1
    assert embedding.metric("engine_restarts_total", model_name=MODEL) == 0
    assert embedding.metric("embeddings_total", embedding_model=MINILM) >= 2  # also those before it died


def test_an_encoder_alone_embeds_and_refuses_to_chat(folder: Path) -> None:
    flags = ("--served-model-name", "mine", "also", "--model-alias", "ada", "--embedding-truncate")
    running = RunningServer(str(folder), *flags)
    try:
        client = running.wait_ready().client()
        assert [model.id for model in client.models.list()] == ["mine", MINILM]
        for name in ("mine", "also", "ada"):
            found = client.embeddings.create(model=name, input="x")
            assert (len(found.data[0].embedding), found.model) == (384, "mine")
        assert client.models.retrieve("ada").id == "ada"
        long = client.embeddings.create(model="mine", input="word " * 400)
        assert long.usage.total_tokens == 256
        assert "makes embeddings and no text" in running.chat_error()["message"]
        assert running.get("/ready").status_code == 200
        assert running.metric("engine_up", model_name="mine") == 1
        running.process.send_signal(signal.SIGTERM)
        assert running.wait_exit() == 0
    finally:
        running.close()


def test_embeddings_may_be_switched_off() -> None:
    with pytest.raises(ApiError, match="--no-embeddings") as caught:
        ServedModels.of(EngineConfig(), ServerSettings(embeddings=False)).encoder("minilm")
    assert caught.value.status == 403
    with pytest.raises(ConfigError, match="contradict"):
        ServerSettings(embeddings=False, embedding_models=("builtin",))


def test_models_that_were_asked_for_go_by_their_names(tmp_path: Path) -> None:
    folder = str(tmp_path / "my-encoder")
    settings = ServerSettings(embedding_models=("builtin", folder, "builtin"))
    models = ServedModels.of(EngineConfig(), settings)
    assert [model.names[0] for model in models.encoders] == [MINILM, "my-encoder"]
    assert models.started_first == [models.main, *models.encoders]
    assert models.encoder("my-encoder") is models.encoder(folder)
    assert models.encoder(None) is models.encoder("minilm")

"""The names by which requests may call a model."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.cli.parser import Parser
from quire.cli.serve import add_arguments, run, server_settings
from quire.core.errors import ConfigError
from quire.server.settings import ServerSettings
from tests.server.running import RunningServer
from tests.server.scripted import ScriptedEngine, scripted_app, update

NAMES = {"served_names": ("first", "second"), "model_aliases": ("gpt-4o", "small=second")}
HELLO = [[update("Hi", finish_reason="stop")]]


def _asked(method: str, path: str, settings: dict[str, Any], **options: Any) -> httpx.Response:
    app = scripted_app(ScriptedEngine(HELLO), **settings)

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(asked())


def _chat(name: str | None, **settings: Any) -> httpx.Response:
    body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
    return _asked("POST", "/v1/chat/completions", {**NAMES, **settings}, json=body)


@pytest.mark.parametrize("name", ["first", "second", "gpt-4o", "small", None])
def test_every_name_and_alias_is_the_model_and_answers_report_the_first(name: str | None):
    response = _chat(name)
    assert (response.status_code, response.json()["model"]) == (200, "first")


def test_names_are_listed_and_aliases_are_not():
    listed = _asked("GET", "/v1/models", NAMES).json()["data"]
    assert [model["id"] for model in listed] == ["first", "second"]
    retrieved = _asked("GET", "/v1/models/gpt-4o", NAMES)
    assert (retrieved.status_code, retrieved.json()["id"]) == (200, "gpt-4o")


def test_an_unknown_name_is_a_404_that_lists_the_names():
    response = _chat("gpt-5")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "first, second" in response.json()["error"]["message"]


def test_any_model_name_accepts_all():
    response = _chat("gpt-5", any_model_name=True)
    assert (response.status_code, response.json()["model"]) == (200, "first")
    assert _asked("GET", "/v1/models/gpt-5", {"any_model_name": True}).json()["id"] == "gpt-5"


# ---------------------------------------------------------------------- flags


def _settings(*words: str) -> ServerSettings:
    parser = Parser(prog="quire serve")
    add_arguments(parser)
    return server_settings(parser.parse(words))


def test_flags_take_several_names():
    words = [
        "m",
        "--served-model-name",
        "a",
        "b",
        "--model-alias",
        "c",
        "--model-alias",
        "d=e",
        "--any-model-name",
    ]
    settings = _settings(*words)
    assert settings.served_names == ("a", "b")
    assert settings.aliases == {"c": None, "d": "e"}
    assert settings.any_model_name
    assert (_settings().served_names, _settings().aliases) == ((), {})


def test_a_model_behind_the_names_is_not_taken_for_one(tmp_path: Any):
    parser = Parser(prog="quire serve")
    add_arguments(parser)
    with pytest.raises(ConfigError, match="write MODEL before it"):
        run(parser.parse(["--served-model-name", "a", str(tmp_path)]))
    with pytest.raises(ConfigError, match="is empty"):
        _settings("--model-alias", "")


# ---------------------------------------------------------------------- a server


@pytest.fixture(scope="module")
def named() -> Iterator[RunningServer]:
    running = RunningServer(
        *("--served-model-name", "first", "second", "--model-alias", "gpt-4o"),
        *("--model-alias", "text-embedding-3-small=minilm"),
    )
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.mark.e2e
def test_openai_clients_use_their_own_names(named: RunningServer):
    client = named.client()
    assert [model.id for model in client.models.list()][:2] == ["first", "second"]
    answer = client.chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": "Hi"}], max_tokens=2
    )
    assert answer.model == "first"
    vectors = client.embeddings.create(model="text-embedding-3-small", input="Hi")
    assert vectors.model == "all-MiniLM-L6-v2"
    wrong = named.error("/v1/embeddings", 400, json={"model": "gpt-4o", "input": "x"})
    assert "generates text" in wrong["message"]


@pytest.mark.e2e
def test_an_alias_of_nothing_ends_the_start():
    running = RunningServer("--model-alias", "small=nothing")
    try:
        assert running.wait_exit() != 0
        assert "there is no model 'nothing'" in "\n".join(running.lines)
    finally:
        running.close()

"""Paths and methods as clients of several APIs send them, and fields that have no effect."""

import asyncio
from functools import cache
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from starlette.types import ASGIApp

from tests.server.scripted import ScriptedEngine, scripted_app
from tests.server.test_transcripts import plain

HI: Any = [{"role": "user", "content": "Hi"}]
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@cache
def app_with(**settings: Any) -> ASGIApp:
    """One for all tests: they leave nothing behind that another one sees."""
    return scripted_app(ScriptedEngine(plain("Hel", "lo", "")), **settings)


def ask(method: str, path: str, **options: Any) -> httpx.Response:
    app = app_with(**options.pop("settings", {}))

    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(asked())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": HI}),
        ("/completions", {"prompt": "Hi"}),
        ("/responses", {"input": "Hi"}),
        ("/responses/input_tokens", {"input": "Hi"}),
        ("/messages", {"messages": HI, "max_tokens": 5}),
        ("/conversations", {}),
    ],
)
def test_paths_without_a_version_are_the_same(path: str, body: dict[str, Any]):
    assert ask("POST", path, json=body).status_code == 200
    settings = {"root_path": "/api", "api_keys": ("one",)}
    assert ask("POST", f"/api{path}", json=body, settings=settings).status_code == 401
    headers = {"x-api-key": "one"}
    assert ask("POST", f"/api{path}", json=body, settings=settings, headers=headers).status_code == 200


def test_models_without_a_version_are_the_same_and_other_paths_are_not():
    assert ask("GET", "/models").json()["data"][0]["id"] == "scripted"
    assert ask("GET", "/models/scripted").json()["id"] == "scripted"
    assert ask("POST", "/messages", json={}).json()["type"] == "error"
    assert ask("GET", "/modelsx").status_code == 404
    assert ask("GET", "/chat").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/chat/completions", "GET, POST"),
        ("GET", "/v1/responses", "POST"),
        ("GET", "/v1/responses/compact", "POST"),
        ("DELETE", "/v1/responses/input_tokens", "POST"),
        ("POST", "/v1/responses/resp_1", "DELETE, GET"),
        ("GET", "/v1/responses/resp_1/cancel", "POST"),
        ("GET", "/v1/chat/completions/input_tokens", "POST"),
        ("PUT", "/v1/chat/completions/chatcmpl-1", "DELETE, GET, POST"),
        ("PUT", "/v1/conversations/conv_1/items", "GET, POST"),
        ("GET", "/v1/messages", "POST"),
        ("POST", "/v1/models/org/name", "DELETE, GET"),
        ("POST", "/health", "GET, HEAD"),
        ("DELETE", "/tokenizer_info", "GET"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(method: str, path: str, allowed: str):
    response = ask(method, path)
    assert (response.status_code, response.headers["Allow"]) == (405, allowed)
    assert response.json()["error"]["message"].endswith(f"does not take {method}: use {allowed}")


def test_probes_may_ask_for_the_head_alone():
    for path in ("/", "/health", "/ready"):
        assert ask("HEAD", path, settings={"api_keys": ("one",)}).status_code == 200
    assert ask("GET", "/").json()["name"] == "quire"


def test_models_are_shown_as_anthropics_clients_expect():
    async def scene() -> None:
        app: Any = app_with(served_names=("a", "b", "c"))
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        async with anthropic.AsyncAnthropic(base_url="http://test", api_key="x", http_client=http) as client:
            page = await client.models.list()
            assert [(model.id, model.type, model.display_name) for model in page.data] == [
                (name, "model", name) for name in "abc"
            ]
            assert (page.has_more, page.first_id, page.last_id) == (False, "a", "c")
            assert page.data[0].created_at.year > 2000
            assert page.data[0].max_input_tokens == 4096
            assert [model.id async for model in await client.models.list(limit=1)] == ["a", "b", "c"]
            before = await client.models.list(before_id="c", limit=1)
            assert ([model.id for model in before.data], before.has_more) == (["b"], True)
            assert (await client.models.retrieve("b")).id == "b"
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.models.retrieve("d")
            assert missing.value.body["error"]["type"] == "not_found_error"

    asyncio.run(scene())
    for query in ("limit=0", "limit=1001", "after_id=x"):
        assert ask("GET", f"/v1/models?{query}", headers=ANTHROPIC).status_code == 400


def test_only_operators_delete_models():
    assert ask("DELETE", "/v1/models/scripted").status_code == 403
    assert ask("DELETE", "/models/scripted").status_code == 403
    headers = {"Authorization": "Bearer admin"}
    refused = ask("DELETE", "/v1/models/scripted", headers=headers, settings={"admin_key": "admin"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "only adapters" in refused.json()["error"]["message"]


def test_tokenizer_info_has_the_chat_template():
    info = ask("GET", "/tokenizer_info").json()
    assert info["eos_token"] == "</s>"
    assert "messages" in info["chat_template"]
    assert info["tokenizer_class"]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (
            "/v1/chat/completions",
            {"modalities": ["text", "audio"], "audio": {"voice": "x"}},
            ["audio", "modalities"],
        ),
        ("/v1/chat/completions", {"web_search_options": {}}, ["web_search_options"]),
        (
            "/v1/chat/completions",
            {"prediction": {"type": "content"}, "verbosity": "low"},
            ["prediction", "verbosity"],
        ),
        ("/v1/chat/completions", {"modalities": ["text"], "echo": False, "return_token_ids": None}, []),
        ("/v1/responses", {"max_tool_calls": 3}, ["max_tool_calls"]),
    ],
    ids=str,
)
def test_a_field_without_effect_is_warned_of(path: str, fields: dict[str, Any], named: list[str]):
    response = ask("POST", path, json={"messages": HI, "input": "Hi", **fields})
    assert response.status_code == 200
    warnings = response.headers.get_list("warning")
    assert [warning.split('"')[1].split()[0] for warning in warnings] == named


def test_an_answer_without_text_is_refused_by_name():
    response = ask("POST", "/v1/chat/completions", json={"messages": HI, "modalities": ["audio"]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "modalities")

"""Bad input to several models behind one port: a clear answer each time, and no other model is stopped for it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import httpx

from quire import __version__
from quire.fleet.model_set import CannotStart, ModelEntry, ModelProcess, ModelSet, read_models
from quire.link.http_client import HttpClient
from quire.server.models_app import ModelsApp, merged_metrics
from quire.server.settings import ServerSettings

ADMIN = {"Authorization": "Bearer admin"}
HTML = {"Accept": "text/html"}
FEED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class FakeProcess(ModelProcess):
    """A model whose server is a socket of the test: it begins a stream of events that has no end."""

    fails = False

    async def launch(self, common: Any) -> None:
        self.fault = None

    async def start(self) -> None:
        if self.fails:
            self.fault = "weights.safetensors is cut off"
            raise CannotStart(f"{self.entry.name} cannot be started: {self.fault}")
        self._listener = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.client = HttpClient(f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = await reader.readuntil(b"\r\n\r\n")
        writer.write(FEED + b"9\r\ndata: 1\n\n\r\n")
        await reader.read()
        writer.close()

    async def stop(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await client.close()
            self._listener.close()


def made(*entries: ModelEntry, memory: int = 20) -> ModelSet:
    models = ModelSet(entries, memory=memory, max_running=4)
    models.models = {entry.name: FakeProcess(entry) for entry in entries}
    return models


@asynccontextmanager
async def served(models: ModelSet, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=ModelsApp(models, ServerSettings(**settings)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client
    await models.close()


def running(models: ModelSet) -> list[str]:
    return [name for name, model in models.models.items() if model.client is not None]


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), 20))

    return run


@in_a_loop
async def test_an_unknown_model_is_a_404_in_the_shape_of_each_api() -> None:
    async with served(made(ModelEntry("a", "x", need=5))) as client:
        for path in ("/v1/chat/completions", "/v1/models/load"):
            answer = await client.post(path, json={"model": "nope"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert error["type"] == "invalid_request_error"
            assert "'nope' does not exist: this server has a" in error["message"]
        anthropic = (await client.post("/v1/messages", json={"model": "nope"})).json()
        assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "not_found_error")
        ollama = (await client.post("/api/chat", json={"model": "nope"})).json()
        assert "'nope' does not exist" in ollama["error"]
        assert (await client.get("/v1/models/a")).json()["state"] == "stopped"
        assert (await client.get("/v1/models/nope")).status_code == 404


@in_a_loop
async def test_a_model_that_does_not_fit_beside_the_pinned_stops_no_other() -> None:
    entries = (
        ModelEntry("kept", "x", pinned=True, need=10),
        ModelEntry("small", "x", need=5),
        ModelEntry("large", "x", need=15),
    )
    models = made(*entries)
    async with served(models) as client:
        await models.open()
        await client.post("/v1/models/load", json={"model": "small"})
        answer = await client.post("/v1/chat/completions", json={"model": "large"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_started")
        assert answer.headers["x-should-retry"] == "false"
        assert "large needs 0.0 GB beside the pinned kept" in answer.json()["error"]["message"]
        assert "raise --models-memory" in answer.json()["error"]["message"]
        assert running(models) == ["kept", "small"]
        listed = {model["id"]: model for model in (await client.get("/v1/models")).json()["data"]}
        assert listed["large"]["state"] == "failed"
        assert "beside the pinned" in listed["large"]["error"]


@in_a_loop
async def test_files_that_are_gone_stop_no_other_model_and_may_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    models = made(ModelEntry("other", "x", need=15), ModelEntry("moved", str(folder), need=15))
    async with served(models) as client:
        await client.post("/v1/models/load", json={"model": "other"})
        answer = await client.post("/v1/chat/completions", json={"model": "moved"})
        assert answer.status_code == 503
        assert f"moved cannot be started: {folder}: no such folder" in answer.json()["error"]["message"]
        assert running(models) == ["other"]
        folder.mkdir()
        assert (await client.post("/v1/models/load", json={"model": "moved"})).json()["state"] == "ready"
        assert running(models) == ["moved"]


@in_a_loop
async def test_a_pinned_model_that_cannot_start_leaves_the_others_served() -> None:
    models = made(ModelEntry("bad", "x", pinned=True, need=5), ModelEntry("good", "x", need=5))
    bad = models.models["bad"]
    assert isinstance(bad, FakeProcess)
    bad.fails = True
    async with served(models) as client:
        await models.open()
        assert (await client.post("/v1/models/load", json={"model": "good"})).json()["state"] == "ready"
        states = (await client.get("/health")).json()["models"]
        assert states == {"bad": "failed", "good": "ready"}
        bad.fails = False
        assert (await client.post("/v1/models/load", json={"model": "bad"})).json()["state"] == "ready"


@in_a_loop
async def test_the_page_and_its_version_need_no_model() -> None:
    models = made(ModelEntry("a", "/no/such/model", need=5))
    async with served(models) as client:
        page = await client.get("/", headers=HTML)
        assert page.headers["content-type"].startswith("text/html")
        assert (await client.get("/")).json()["name"] == "quire"
        assert (await client.get("/page/app.js")).status_code == 200
        assert (await client.get("/page/nothing.js")).json()["error"]["code"] == "not_found"
        assert (await client.get("/version")).json() == {"version": __version__}
    async with served(models, page=False) as client:
        assert (await client.get("/", headers=HTML)).json()["name"] == "quire"
        assert (await client.get("/page/app.js")).status_code == 404
    assert running(models) == []


@in_a_loop
async def test_the_feed_needs_the_admin_key_and_starts_no_model() -> None:
    models = made(ModelEntry("a", "x", need=5))
    async with served(models, api_keys=("user",), admin_key="admin") as client:
        for headers in ({}, {"Authorization": "Bearer user"}, {"Authorization": "Bearer wrong"}):
            answer = await client.get("/v1/engine/events", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert "this needs the admin key" in answer.json()["error"]["message"]
        answer = await client.get("/v1/engine/events", headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_model")
        refused = await client.post("/v1/chat/completions", json={"model": "a"})
        assert refused.status_code == 401
    async with served(models) as client:
        outside = await client.get("/v1/engine/events", headers={"Host": "quire.example"})
        assert (outside.status_code, running(models)) == (403, [])
        assert "--admin-key" in outside.json()["error"]["message"]


@in_a_loop
async def test_what_only_reads_starts_no_model(tmp_path: Path, monkeypatch: Any) -> None:
    """Reports, versions, lists, metrics and what a model can do are the front's own answers."""
    monkeypatch.chdir(tmp_path)
    models = made(
        ModelEntry("chat", "builtin", need=5),
        ModelEntry("encoder", "minilm", need=5),
        ModelEntry("hub", "org/x", need=5),
    )
    async with served(models) as client:
        assert (await client.get("/v1/laboratory")).json()["data"] == []
        assert (await client.get("/v1/laboratory/none.json")).status_code == 404
        assert (await client.get("/api/version")).json()["quire"] == __version__
        assert (await client.get("/metrics")).text == ""
        tasks = {model["id"]: model["task"] for model in (await client.get("/v1/models")).json()["data"]}
        assert tasks == {"chat": "generate", "encoder": "embed", "hub": None}
        anthropic = {"anthropic-version": "2023-06-01"}
        assert (await client.get("/v1/models", headers=anthropic)).json()["data"][0]["type"] == "model"
        assert (await client.get("/models/hub", headers=anthropic)).json()["id"] == "hub"
        families = {
            one["name"]: one["details"]["family"] for one in (await client.get("/api/tags")).json()["models"]
        }
        assert families == {"chat": "decoder", "encoder": "encoder", "hub": "decoder"}
        for field in ("model", "name"):
            shown = await client.post("/api/show", json={field: "encoder"})
            assert shown.json()["capabilities"] == ["embedding"]
        for path in ("/v1/responses/resp_1", "/docs", "/nowhere"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_model")
    assert running(models) == []


@in_a_loop
async def test_the_feed_is_of_the_model_that_the_page_chose() -> None:
    models = made(ModelEntry("a", "x", need=5), ModelEntry("b", "x", need=5), ModelEntry("c", "x", need=5))
    async with served(models) as client:
        for name in ("a", "b"):
            await client.post("/v1/models/load", json={"model": name})
        watching = asyncio.create_task(client.get("/v1/engine/events?model=a"))
        while not hasattr(models.models["a"], "head"):
            await asyncio.sleep(0.01)
        assert not hasattr(models.models["b"], "head")
        stopped = await client.get("/v1/engine/events?model=c")
        assert (stopped.status_code, stopped.json()["error"]["code"]) == (503, "no_model")
        assert "c does not run now" in stopped.json()["error"]["message"]
        assert (await client.get("/v1/engine/events?model=d")).status_code == 404
        await models.models["a"].stop()
        assert "the server of a was lost" in (await watching).text


def test_metrics_of_several_models_are_one_text() -> None:
    one, two = (
        f'# HELP up Whether.\n# TYPE up gauge\nup{{model_name="{name}"}} 1\n# HELP n How many.\n# TYPE n counter\nn 1\n'
        for name in "ab"
    )
    merged = merged_metrics((one, "", two))
    assert merged.splitlines()[:4] == [*one.splitlines()[:3], two.splitlines()[2]]
    assert merged.count("# TYPE") == 2
    assert merged.endswith("n 1\nn 1\n")


@in_a_loop
async def test_a_page_that_watches_a_model_does_not_keep_it_running() -> None:
    """Its feed ends with an error event when the memory is needed; a local client stays local behind the front."""
    models = made(ModelEntry("a", "x", need=15), ModelEntry("b", "x", need=15))
    async with served(models) as client:
        await client.post("/v1/models/load", json={"model": "a"})
        watching = asyncio.create_task(client.get("/v1/engine/events"))
        watched = models.models["a"]
        while not hasattr(watched, "head"):
            await asyncio.sleep(0.01)
        assert b"x-forwarded-for" not in watched.head
        assert (await client.post("/v1/models/load", json={"model": "b"})).json()["state"] == "ready"
        assert running(models) == ["b"]
        assert "data: 1\n\n" in (events := (await watching).text)
        assert "the server of a was lost" in events


def test_relative_paths_stay_paths_when_their_folder_is_gone(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    here, dotted, hub = read_models({"a": "org/model", "b": "./gone", "c": "org/other"})
    assert (here.source, hub.source) == (str(tmp_path / "org" / "model"), "org/other")
    assert dotted.source == str(tmp_path / "gone")

"""Several models behind one port: started on demand, stopped for each other, errors that leave the others alone."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import trustme

from quire.cli.main import main
from quire.cli.serve_models import common_flags
from quire.core.errors import ConfigError
from quire.fleet.model_set import ModelEntry, ModelSet, keep_alive_seconds, read_models
from quire.server.settings import ServerSettings
from tests.models.encoder_folders import embedding_decoder
from tests.server.running import ADMIN_KEY, RunningServer

STOP_SECONDS = 3.0  # of an idle model, on a busy machine
SETTINGS = {"max-num-seqs": 4, "kv-cache-memory-bytes": "64M"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """Memory for one of the chat models; one of the others cannot be loaded."""
    path = folder / "models.json"
    model = {"model": "builtin", "settings": SETTINGS, "memory": 900_000_000}
    entries = {"one": model, "two": {**model, "aliases": ["deux"]}, "broken": {"model": "/no/such/folder"}}
    embedding_decoder(folder / "encoder")
    entries["encoder"] = {"model": str(folder / "encoder"), "memory": 900_000_000}
    path.write_text(json.dumps({"memory": 1_000_000_000, "models": entries}))
    running = RunningServer("--models", str(path))
    try:
        yield running.wait_ready()
    finally:
        running.close()


def ask(server: RunningServer, model: str | None, **more: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0, **more}
    return httpx.post(f"{server.url}/v1/chat/completions", json={**body, "model": model}, timeout=120)


def states(server: RunningServer) -> dict[str, str]:
    listed = server.get("/v1/models").json()["data"]
    return {model["id"]: model["state"] for model in listed}


def change(server: RunningServer, action: str, model: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return httpx.post(f"{server.url}/v1/models/{action}", json={"model": model}, headers=headers, timeout=60)


def unload(server: RunningServer, model: str) -> httpx.Response:
    return change(server, "unload", model)


def test_an_offered_upgrade_is_ignored(server: RunningServer) -> None:
    """As Java's HTTP client offers it: the body is read all the same."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": ""}
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "none", "prompt": "a"}, headers=offer)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_several_models_have_no_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = tmp_path / "both.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(both)
    assert main(["serve", "one", "two", "--ssl-certfile", str(both), "--ssl-keyfile", str(both)]) == 2
    assert "several models are served without TLS" in capsys.readouterr().err


def test_a_model_starts_for_its_request_and_makes_room_for_another(server: RunningServer) -> None:
    assert states(server)["one"] == "stopped"
    first = ask(server, "one")
    assert first.json()["model"] == "one"
    assert float(first.headers["x-quire-model-wait"]) > 0.1
    again = ask(server, "one")
    wait = float(again.headers["x-quire-model-wait"])
    assert wait < float(first.headers["x-quire-model-wait"]) / 2  # it runs already
    assert again.json()["choices"][0]["message"] == first.json()["choices"][0]["message"]
    other = ask(server, "deux")
    assert other.json()["model"] == "two"
    assert states(server) == {"one": "stopped", "two": "ready", "broken": "stopped", "encoder": "stopped"}
    unnamed = ask(server, None)
    assert unnamed.json()["model"] == "two"  # the last one that was used


def test_switches_wait_for_the_start_alone_and_memory_comes_back(server: RunningServer) -> None:
    """`python -m quire_lab.benchmarks.models_port` does it 200 times."""

    def memory() -> int:
        front = psutil.Process(server.process.pid)
        return sum(process.memory_info().rss for process in (front, *front.children(recursive=True)))

    unload(server, "two")
    before, beyond = memory(), {}
    for name in ("one", "encoder", "two"):
        if name == "encoder":
            answer = server.post("/v1/embeddings", json={"model": name, "input": "hello"})
            assert answer.json()["data"][0]["embedding"]
        else:
            answer = ask(server, name)
        assert answer.status_code == 200, answer.text
        loaded = change(server, "load", name).json()
        beyond[name] = float(answer.headers["x-quire-model-wait"]) - loaded["start_seconds"]
        assert list(states(server).values()).count("ready") == 1
    assert beyond.pop("one") < STOP_SECONDS  # no other model ran
    assert min(beyond.values()) < STOP_SECONDS, beyond
    assert memory() > before + 50e6
    unload(server, "two")
    assert memory() < before + 50e6


def test_files_that_disappear_or_are_damaged_are_named(server: RunningServer, folder: Path) -> None:
    """A model that runs goes on without its files; the next start says what is wrong with them."""
    body = {"json": {"model": "encoder", "input": "cat"}}
    assert server.post("/v1/embeddings", **body).status_code == 200
    (folder / "encoder").rename(folder / "moved")
    assert server.post("/v1/embeddings", **body).status_code == 200
    unload(server, "encoder")
    gone = server.error("/v1/embeddings", 503, **body)
    assert f"encoder cannot be started: {folder}/encoder: no such folder or file" in gone["message"]
    weights = (folder / "moved" / "model.safetensors").read_bytes()
    (folder / "moved").rename(folder / "encoder")
    (folder / "encoder" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    damaged = server.error("/v1/embeddings", 503, **body)
    assert damaged["code"] == "model_not_started"
    assert "encoder cannot be started" in damaged["message"]
    assert "model.safetensors" in damaged["message"]
    assert (states(server)["encoder"], server.get("/health").status_code) == ("failed", 200)
    (folder / "encoder" / "model.safetensors").write_bytes(weights)


def test_a_stream_is_passed_on_as_it_comes(server: RunningServer) -> None:
    body = {"model": "two", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**body, "max_tokens": 3}, timeout=120) as response:
        assert b"[DONE]" in response.read()
    long = {**body, "max_tokens": 1000, "ignore_eos": True}
    with httpx.stream("POST", url, json=long, timeout=120) as response:
        assert response.status_code == 200
        first = list(zip(range(4), response.iter_raw(), strict=False))
    assert len(first) == 4
    assert not any(b"[DONE]" in piece for _, piece in first)  # they came long before the end


def test_a_model_that_cannot_start_says_why_and_the_others_go_on(server: RunningServer) -> None:
    broken = ask(server, "broken")
    assert broken.status_code == 503
    assert "broken cannot be started: /no/such/folder" in broken.json()["error"]["message"]
    assert states(server)["broken"] == "failed"
    assert ask(server, "nope").status_code == 404
    assert server.get("/health").status_code == 200
    assert server.get("/api/tags").json()["models"][0]["name"] == "one"


def test_a_model_is_unloaded_by_hand_and_by_keep_alive(server: RunningServer) -> None:
    assert ask(server, "two", keep_alive=600).status_code in (200, 400)
    refused = httpx.post(f"{server.url}/v1/models/unload", json={"model": "two"})
    assert (refused.status_code, states(server)["two"]) == (401, "ready")
    assert unload(server, "two").json()["state"] == "stopped"
    assert unload(server, "nope").status_code == 404


def test_models_end_with_a_front_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    path.write_text(json.dumps({"models": {"one": {"model": "builtin", "settings": SETTINGS}}}))
    running = RunningServer(QUIRE_MODELS=str(path)).wait_ready()  # which is not for the model's server
    assert ask(running, "one").status_code == 200
    children = psutil.Process(running.process.pid).children()
    assert children
    running.process.kill()
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert (len(gone), alive) == (len(children), [])
    running.close()


def test_entries_of_a_file() -> None:
    entries = read_models(
        {
            "a": "org/a",
            "b": {"model": "org/b", "settings": {"enable_lora": True, "seed": 3}, "keep_alive": -1},
        }
    )
    assert entries[0] == ModelEntry("a", "org/a")
    assert entries[1].flags == ("--enable-lora", "--seed", "3")
    assert entries[1].keep_alive == float("inf")
    assert keep_alive_seconds("5m") == 300
    for document, message in (
        ({"a": {"colour": 1}}, "'colour' is not a field"),
        ({"a": {"keep_alive": "soon"}}, "keep_alive is 'soon'"),
        ({"a": {"aliases": ["b"]}, "b": {}}, "'b' is given to two models"),
        ({"a": 5}, "models.a is 5: write fields and their values"),
        ({"a": {"aliases": "gpt-4o"}}, "models.a: aliases is 'gpt-4o': give list"),
        ({"a": {"memory": "16GB"}}, "models.a: memory is '16GB': give int"),
        ({"a": {"settings": ["seed"]}}, r"models.a: settings is \['seed'\]: give dict"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_models(document)


def test_pinned_models_must_fit() -> None:
    entries = [ModelEntry("a", "x", pinned=True, need=10), ModelEntry("b", "y", pinned=True, need=10)]
    with pytest.raises(ConfigError, match="the pinned models need"):
        ModelSet(entries, memory=15, max_running=2)


def test_flags_of_the_command_line_go_to_every_model() -> None:
    words = ["a", "--port", "9", "b", "--seed", "3", "--models-memory=4", "--api-key", "k"]
    assert common_flags(words, ["a", "b"]) == ("--seed", "3", "--api-key", "k")


def test_one_model_ends_when_it_is_idle() -> None:
    """Not while it answers; probes do not keep it."""
    running = RunningServer("--keep-alive", "3").wait_ready()
    body = {"prompt": "Hi", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as answer:
        until = time.monotonic() + 4
        assert any(time.monotonic() > until for _ in answer.iter_lines())
    while running.process.poll() is None:
        with suppress(httpx.HTTPError):
            assert running.get("/health").json().get("seconds_left", 0) <= 3
        time.sleep(0.1)
    assert running.wait_exit() == 0
    assert "--keep-alive" in running.wait_for_line("no request for 3 s")
    with pytest.raises(ConfigError, match="must be more than 0"):
        ServerSettings(keep_alive=0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    running = RunningServer("--models", str(tmp_path / "none.yaml"))
    assert running.wait_exit() == 2
    assert any("--models" in line and "cannot be read" in line for line in running.lines)
    running.close()

"""`quire run` and the commands around it: one server in the background, names of models, the cache."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli import auto, background
from quire.cli import run as run_command
from quire.cli.parser import Parser
from quire.cli.run import HttpChat, ServerRefusal
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, WeightsError
from quire.observe.host import process_birth
from quire.weights.builtin import BUILTIN
from quire.weights.hub import HubName, hub_name, tagged_files
from quire.weights.source import open_source


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with no servers, with this machine's models and kernels."""
    folder = tmp_path / "cache"
    folder.mkdir()
    from quire.observe.host import cache_folder

    for path in cache_folder().iterdir():
        if path.name != "servers":
            (folder / path.name).symlink_to(path)
    monkeypatch.setenv("QUIRE_CACHE", str(folder))
    return folder


@pytest.fixture
def stopped(cache: Path) -> Iterator[None]:
    """Stops what a test left running."""
    yield
    for server in background.running():
        background.stop(server)


@pytest.mark.usefixtures("stopped")
def test_a_server_is_started_listed_reused_and_stopped(cache, run, monkeypatch):
    if not BUILTIN.path.exists():
        pytest.skip("needs the built-in model")
    flags = ("--max-model-len", "256", "--num-threads", "1", "--keep-alive", "1h")
    assert "write seconds, 5m or -1" in run("run", "builtin", "hello", "--keep-alive", "soon").error
    monkeypatch.setattr(sys, "stdin", io.StringIO("The sky is green today.\n"))
    asked = ("run", "builtin", "What colour is the sky?", "--temperature", "0", "--max-tokens", "12")
    first = run(*asked, *flags)
    assert first.code == 0, first.err
    assert first.out.strip()
    assert "it keeps running" in first.err

    (server,) = json.loads(run("ps", "--json").out)["servers"]
    assert (server["model"], server["state"]) == ("builtin", "healthy")
    assert server["memory"] > 50e6
    assert 3500 < server["seconds_left"] <= 3600
    assert str(server["pid"]) in run("ps").out

    monkeypatch.setattr(sys, "stdin", io.StringIO("The sky is green today.\n"))
    again = run(*asked)
    assert (again.code, again.out, again.err) == (0, first.out, "")
    assert [one.pid for one in background.running()] == [server["pid"]]

    monkeypatch.setattr(sys, "stdin", io.StringIO("Say hello.\nAnd again.\n"))
    talked = run("run", "--temperature", "0", "--max-tokens", "4")
    assert talked.code == 0, talked.err
    assert len(talked.out.strip().splitlines()) >= 2

    other = run("run", "builtin", "hello", "--max-model-len", "128")
    assert "runs with --max-model-len 256" in other.error
    assert "a server runs builtin" in run("rm", "builtin").error
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 2000))
    assert "context" in run("run", "builtin", "summarize").error

    assert f"stopped builtin (pid {server['pid']})" in run("stop", "builtin").out
    assert background.running() == []
    assert not list((cache / "servers").glob("*.json"))
    assert "no server of builtin runs here" in run("stop", "builtin").error


def _record(cache: Path, pid: int, birth: str) -> Path:
    path = cache / "servers" / "x.json"
    path.parent.mkdir(exist_ok=True)
    fields = {"model": "builtin", "url": "http://127.0.0.1:9", "pid": pid, "birth": birth, "since": 0.0}
    path.write_text(json.dumps({**fields, "flags": [], "log": "x.log"}))
    return path


START = """
import signal, sys
from quire.cli import background

for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
sys.executable = sys.argv[1]
background._folder().mkdir(parents=True)
background.start("builtin", [], "-1")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_start_that_is_ended_leaves_no_server(number, tmp_path):
    """`quire ps` did not list it, and the next `quire run` started another."""
    slow, pid = tmp_path / "slow", tmp_path / "pid"  # a server that never serves
    slow.write_text(f"#!/bin/sh\necho $$ > {pid}.part && mv {pid}.part {pid}\nexec sleep 600\n")
    slow.chmod(0o755)
    environment = {**os.environ, "QUIRE_CACHE": str(tmp_path / "cache")}
    starting = subprocess.Popen([sys.executable, "-c", START, str(slow)], env=environment)
    while not pid.exists():
        assert starting.poll() is None
        time.sleep(0.05)
    server = int(pid.read_text())
    birth = process_birth(server)
    assert birth
    starting.send_signal(number)
    assert starting.wait(60) == 128 + number
    while process_birth(server) == birth:  # until init has noticed its end
        time.sleep(0.05)


def test_a_file_of_another_process_is_removed(cache, run):
    """Also one whose pid is in use again: the start time differs."""
    path = _record(cache, os.getpid(), "1")
    assert "no server runs" in run("ps").out
    assert not path.exists()
    path.write_text("{half")
    assert background.running() == []
    assert not path.exists()


def test_a_server_that_does_not_answer_is_not_used(cache, run):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        _record(cache, sleeper.pid, process_birth(sleeper.pid) or "")
        assert (
            "does not answer at http://127.0.0.1:9: `quire stop builtin`" in run("run", "builtin", "hi").error
        )
        assert "does not answer" in run("ps").out
        assert run("stop").code == 0
        assert sleeper.wait(10) != 0
    finally:
        sleeper.kill()


def test_a_start_that_fails_says_why_and_leaves_nothing(cache, run, tiny, monkeypatch):
    monkeypatch.setattr("quire.cli.pull.fetch", lambda name: None)
    ran = run("run", tiny, "hello", "--quiet")
    assert ran.code == 2
    assert "cannot be started" in ran.error
    assert background.running() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo", HubName("org/repo")),
        ("hf.co/org/repo", HubName("org/repo")),
        ("https://huggingface.co/org/repo/", HubName("org/repo")),
        ("hf.co/org/repo:q4_k_m", HubName("org/repo", "Q4_K_M")),
        ("gpt2:Q8_0", HubName("gpt2", "Q8_0")),
        ("http://elsewhere/x", HubName("http://elsewhere/x")),
    ],
)
def test_names_of_the_hub(text, expected):
    assert hub_name(text) == expected


def test_a_tag_means_the_whole_tag(tmp_path):
    for name in (
        "m-Q4_K.gguf",
        "m-q4_k_m.gguf",
        "m.Q4_K_S.gguf",
        "m-IQ4_K_M.gguf",
        "m-Q4_K_M-00001-of-00002.gguf",
    ):
        (tmp_path / name).touch()
    assert [path.name for path in tagged_files(tmp_path, "Q4_K")] == ["m-Q4_K.gguf"]
    assert [path.name for path in tagged_files(tmp_path, "Q4_K_M")] == [
        "m-Q4_K_M-00001-of-00002.gguf", "m-q4_k_m.gguf",
    ]  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with one repository of one GGUF file, and no network."""
    from huggingface_hub import constants

    repo = tmp_path / "hub" / "models--org--repo"
    snapshot = repo / "snapshots" / ("a" * 40)
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs/main").write_text("a" * 40)
    (repo / "blobs/one").write_bytes(b"GGUF")
    (snapshot / "repo-Q4_K_M.gguf").symlink_to(repo / "blobs/one")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repo


@pytest.mark.usefixtures("hub")
def test_a_tagged_file_comes_from_the_hubs_cache(run):
    with pytest.raises(WeightsError, match=r"repo-Q4_K_M\.gguf"):  # the right file, of four bytes
        open_source("hf.co/org/repo:q4_k_m")
    with pytest.raises(WeightsError, match="org/repo has no GGUF file with the tag 'Q8_0'"):
        open_source("org/repo:Q8_0")
    assert (
        "org/other is no folder or file here and not in the hub's cache"
        in run("pull", "hf.co/org/other").error
    )


def test_rm_removes_a_file_or_a_repository(cache, run, hub, monkeypatch):
    assert "org/other is not in the cache" in run("rm", "org/other", "--yes").error
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "give --yes" in run("rm", "org/repo").error
    assert "removed org/repo:Q4_K_M" in run("rm", "hf.co/org/repo:q4_k_m", "--yes").out
    assert not list((hub / "blobs").iterdir())
    assert "removed org/repo" in run("rm", "org/repo", "-y").out
    assert not hub.exists()
    assert "delete it yourself" in run("rm", cache, "--yes").error


def test_show_describes_a_model(run, tiny):
    shown = json.loads(run("show", tiny, "--json").out)
    assert shown["architecture"] == "LlamaForCausalLM"
    assert shown["context"] == 128
    assert shown["quantization"] == "int8"
    assert "LlamaForCausalLM, 2 layers" in run("show", tiny).out


def test_auto_says_what_it_chose_and_why(tiny, capsys, monkeypatch):
    engine = {"model": str(tiny), "device": "cpu"}
    assert auto.chosen(engine) == {**engine, "max_model_len": 128}
    shown = capsys.readouterr().err
    assert "--device cpu" in shown
    assert "the model's context" in shown
    assert "25% of free memory" in shown
    monkeypatch.setattr(auto, "available_memory", lambda: 1000)
    assert auto.chosen(engine)["quantization"] == "int4"
    assert "do not fit in 900 B" in capsys.readouterr().err
    small = {**engine, "quantization": "none", "num_blocks": 2}
    assert auto.chosen(small) == {**small, "max_model_len": 2 * EngineConfig.of().memory.block_size}
    with pytest.raises(ConfigError):
        auto.chosen({**engine, "max_model_len": 129})


def test_a_full_context_forgets_the_oldest_turns(monkeypatch, capsys):
    server = background.BackgroundServer("builtin", "http://127.0.0.1:9", 1, "", 0.0, [], "x.log")
    chat = HttpChat(lambda: server, {}, None)
    lengths: list[int] = []

    def streamed() -> str:
        lengths.append(len(chat._history.messages))
        if lengths[-1] > 3:
            body = {"error": {"message": "too long", "code": "context_length_exceeded"}}
            raise ServerRefusal(400, json.dumps(body).encode())
        return "answer"

    monkeypatch.setattr(chat, "_streamed", streamed)
    for turn in range(3):
        chat._turn(f"turn {turn}")
    assert lengths == [1, 3, 5, 3]
    assert "the oldest 2 messages are forgotten" in capsys.readouterr().err


def test_flags_may_stand_between_the_model_and_the_prompt(run):
    parser = Parser(prog="quire run")
    run_command.add_arguments(parser)
    for words in (
        ["m", "--top-k", "1", "a", "question"],
        ["m", "a", "--top-k", "1", "question"],
        ["--top-k", "1", "m", "a", "question"],
    ):
        parsed = parser.parse(words)
        assert (parsed.model_named, parsed.prompt, parsed.top_k) == ("m", ["a", "question"], 1)
    assert "unrecognized arguments: --nope" in run("run", "m", "--nope", "hi").error
    assert "the prompt is empty" in run("run", "builtin", " ").error

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quire.core.errors import WeightsError
from quire.weights.architectures import task_of
from quire.weights.builtin import BUILTIN
from quire.weights.folder import FolderSource
from quire.weights.gguf import GgufSource
from quire.weights.source import DummySource, open_source
from tests.weights.conftest import TENSORS
from tests.weights.gguf_writing import bare_llama

MODEL, COMMIT = "someone/tiny", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> Path:
    """The hub library's cache as it leaves it on disk, with one model inside; the hub is out of reach."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place = tmp_path / "hub" / "models--someone--tiny"
    snapshot, blobs = place / "snapshots" / COMMIT, place / "blobs"
    for folder in (snapshot, blobs, place / "refs"):
        folder.mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(model_folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return snapshot


def test_a_folder_a_file_and_a_dummy_are_told_apart(model_folder: Path, tmp_path: Path) -> None:
    assert isinstance(open_source(str(model_folder)), FolderSource)
    assert isinstance(open_source(str(model_folder), load_format="dummy"), DummySource)
    assert isinstance(open_source(str(bare_llama(tmp_path / "m.gguf"))), GgufSource)


def test_the_built_in_model_has_a_name(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_source("builtin").fingerprint == BUILTIN.sha256 == open_source(None).fingerprint
    assert task_of("builtin") == "generate"  # without a look at the hub
    monkeypatch.chdir(tmp_path)
    model_folder.rename(tmp_path / "builtin")
    assert isinstance(open_source("builtin"), FolderSource)  # a folder of that name wins


def test_a_hub_model_is_used_from_its_cache_offline(hub_cache: Path) -> None:
    source = open_source(MODEL)
    assert source.name == MODEL
    assert dict(source.tensors()).keys() == TENSORS.keys()
    assert open_source(MODEL, revision=COMMIT).fingerprint == source.fingerprint
    assert open_source(MODEL, load_format="dummy").name == MODEL


def test_a_hub_model_that_is_not_cached_is_refused_offline(hub_cache: Path) -> None:
    with pytest.raises(WeightsError, match=r"someone/else is no folder .* HF_HUB_OFFLINE is set") as caught:
        open_source("someone/else")
    assert "\n" not in str(caught.value)
    with pytest.raises(WeightsError, match="someone/tiny@nowhere"):
        open_source(MODEL, revision="nowhere")


@pytest.fixture
def hub_at(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sends the hub library to another address."""

    def send_to(address: str) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)

    return send_to


def test_a_hub_that_does_not_answer_is_said_at_once(hub_at: Callable[[str], None]) -> None:
    hub_at("http://127.0.0.1:9")
    with pytest.raises(WeightsError, match=r"someone/else .* no hub answers \(.*\): check") as caught:
        open_source("someone/else")
    assert "\n" not in str(caught.value)
    assert open_source(MODEL).name == MODEL


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("RepoNotFound", "someone/else@v1 does not exist on the hub"),
        ("RevisionNotFound", "someone/else has no revision 'v1'"),
        ("GatedRepo", "someone/else@v1 is gated"),
    ],
)
def test_what_the_hub_refuses_is_said(hub_at: Callable[[str], None], code: str, said: str) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403 if code == "GatedRepo" else 404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub_at(f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(WeightsError, match=said) as caught:
            open_source("someone/else", revision="v1")
        server.shutdown()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["./none", "/none/at/all", "~/none-such", "a/b/c", "folder/"])
def test_a_path_that_leads_nowhere_never_asks_the_hub(text: str) -> None:
    with pytest.raises(WeightsError, match="no such folder or file: check the path"):
        open_source(text)
    with pytest.raises(WeightsError, match="no such file"):
        open_source(text.rstrip("/") + ".gguf")


@pytest.mark.parametrize("text", ["", "two words", "bad--id", "-"])
def test_what_can_be_no_id_is_refused(text: str) -> None:
    with pytest.raises(WeightsError) as caught:
        open_source(text)
    assert "\n" not in str(caught.value)


def test_a_dummy_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"needs a folder with config\.json"):
        open_source(str(bare_llama(tmp_path / "m.gguf")), load_format="dummy")

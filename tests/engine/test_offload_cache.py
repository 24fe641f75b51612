"""Evicted prefixes in host memory and on the disk: found again, across restarts, and never a wrong page."""

import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine.build import build
from quire.runner.disk_tier import FileDiskTier
from tests.engine.test_device_runner import SHAPE

ROOT = Path(__file__).resolve().parents[2]
SAMPLING = SamplingParams(temperature=0.7, seed=4, max_tokens=6)
SETTINGS = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "block_size": 4, "num_blocks": 24,
            "max_num_batched_tokens": 64, "kv_offload_gb": 0.0005}  # fmt: skip
PAGES = {}  # the type of the KV cache, as the module's fixture sets it
ONE_AFTER_THE_OTHER = """
import sys
from tests.engine.test_offload_cache import PAGES, Home, prompts
PAGES["kv_cache_dtype"] = sys.argv[3]
with Home(sys.argv[1], kv_offload_dir=sys.argv[2]) as home:
    print("begins", flush=True)
    for number in range(10_000):
        home.answer([[number % 97, number // 97, *prompt] for prompt in prompts()])
"""


class Home:
    """An engine whose pool holds two or three prompts, and asks them one after the other."""

    def __init__(self, model, **settings):
        self.built = build(EngineConfig.of(model=str(model), **{**SETTINGS, **PAGES, **settings}))
        self.engine = self.built.engine
        self.count = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.check_integrity()
        self.engine.close()

    @property
    def stats(self):
        return self.engine.memory.offload_cache.stats

    def answer(self, asked):
        found = []
        for prompt in asked:
            self.engine.add(Request(f"r{self.count}", prompt, SAMPLING))
            self.count += 1
            found.append([])
            while self.engine.has_work:
                for update in self.engine.step():
                    found[-1].extend(update.token_ids)
        return found


def prompts():
    chosen = random.Random(8)
    return [[chosen.randrange(97) for _ in range(40)] for _ in range(6)]


def files(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file() and len(path.name) == 64]


@pytest.fixture(scope="module", autouse=True, params=["float32", "int8"])
def _pages(request):
    PAGES["kv_cache_dtype"] = request.param
    yield
    PAGES.clear()


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A busy machine reads slowly."""
    monkeypatch.setattr("quire.memory.offload_cache.READ_TIMEOUT", 30.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


@pytest.fixture(scope="module")
def wanted(model, _pages):
    with Home(model, kv_offload_gb=0.0, num_blocks=400) as home:
        return home.answer(prompts())


@pytest.fixture
def kept(model, tmp_path, wanted):
    """A folder in which an engine has left blocks of all prompts."""
    folder = tmp_path / "kept"
    with Home(model, kv_offload_dir=str(folder)) as home:
        assert home.answer(prompts()) == wanted
        assert home.answer(prompts()) == wanted
        assert home.stats.saved > 20
        assert home.stats.host_hits > 20, "the pool holds two prompts: the others came from host memory"
    assert len(files(folder)) > 20
    return folder


def test_what_the_pool_evicts_is_found_again_in_host_memory(model, wanted):
    with Home(model) as home:
        for _ in range(3):
            assert home.answer(prompts()) == wanted
        assert home.stats.host_hits > 50
        assert home.engine.memory.stats.prefix_hits >= 4 * home.stats.host_hits
        assert any("evicted   " in line for line in home.built.report.lines())


def test_another_engine_finds_it_in_the_folder(model, kept, wanted):
    with Home(model, kv_offload_dir=str(kept)) as home:
        assert home.answer(prompts()) == wanted
        assert home.stats.disk_hits > 20
        assert home.stats.disk_faults == 0
        assert any("blocks there from before" in line for line in home.built.report.lines())


def test_engines_that_run_beside_each_other_share_the_folder(model, tmp_path, wanted):
    """One finds what the other computed and evicted since; a file that is gone again is computed."""
    with (
        Home(model, kv_offload_dir=str(tmp_path)) as first,
        Home(model, kv_offload_dir=str(tmp_path)) as second,
    ):
        assert first.answer(prompts()) == wanted
        deadline = time.monotonic() + 20
        while len(files(tmp_path)) < 20:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert second.answer(prompts()[:4]) == wanted[:4]
        assert second.stats.disk_hits > 10
        assert second.stats.disk_faults == 0
        first.engine.reset_prefix_cache()
        assert second.answer(prompts()[4:]) == wanted[4:]


def test_another_model_or_layout_has_another_place(model, kept):
    before = set(files(kept))
    for other in ({"seed": 1}, {"block_size": 8}, {"kv_cache_dtype": "float16"}):
        with Home(model, kv_offload_dir=str(kept), **other) as home:
            home.answer(prompts())
            assert home.stats.disk_hits == 0
    assert before <= set(files(kept))


@pytest.mark.parametrize("where", [10, 50, 100, -1], ids=["content", "checksum", "page", "end"])
def test_a_flipped_byte_is_a_miss_and_never_a_token(model, kept, wanted, where, caplog):
    for path in files(kept):
        data = bytearray(path.read_bytes())
        data[where] ^= 0x40
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING), Home(model, kv_offload_dir=str(kept)) as home:
        assert home.answer(prompts()) == wanted
        assert home.stats.disk_hits == 0
        assert home.stats.disk_faults > 0
    assert "is not used" in caplog.text


@pytest.mark.parametrize("early", [True, False], ids=["before the start", "while it runs"])
def test_a_file_that_is_cut_short_is_a_miss(model, kept, wanted, early):
    def cut():
        for i, path in enumerate(files(kept)):
            os.truncate(path, (0, 40, 90, path.stat().st_size - 1)[i % 4])

    if early:
        cut()
    with Home(model, kv_offload_dir=str(kept)) as home:
        if not early:
            cut()
        assert home.answer(prompts()) == wanted
        assert home.stats.disk_hits == 0


def test_files_that_vanish_are_misses(model, kept, wanted):
    with Home(model, kv_offload_dir=str(kept)) as home:
        for path in files(kept):
            path.unlink()
        assert home.answer(prompts()) == wanted


def test_killed_while_it_writes_it_starts_again_with_the_same_tokens(model, tmp_path, wanted):
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, str(model), str(folder), PAGES["kv_cache_dtype"]],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )
    try:
        assert process.stdout.readline() == b"begins\n"
        deadline = time.monotonic() + 60
        while len(files(folder)) < 40 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(files(folder)) >= 40
    half = next(folder.iterdir()) / f".writing-{process.pid}-999"
    half.write_bytes(b"QUIREKV1 and no more")
    with Home(model, kv_offload_dir=str(folder)) as home:
        assert home.answer(prompts()) == wanted
        assert home.stats.disk_faults == 0, "a file under its own name is whole"
        assert not half.exists()


def test_a_full_disk_is_said_once_and_the_engine_goes_on(model, tmp_path, wanted, monkeypatch, caplog):
    with Home(model, kv_offload_dir=str(tmp_path)) as home, caplog.at_level(logging.WARNING):

        def full(path, parts):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(FileDiskTier, "_write_file", staticmethod(full))
        for _ in range(2):
            assert home.answer(prompts()) == wanted
        assert home.stats.host_hits > 20
    assert caplog.text.count("No space left on device: going on without writing there") == 1


def test_a_folder_that_cannot_be_written_is_said_and_the_engine_goes_on(model, tmp_path, wanted, caplog):
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING), Home(model, kv_offload_dir=str(tmp_path / "file")) as home:
        assert home.answer(prompts()) == wanted
    assert "cannot be used (Not a directory): going on without it" in caplog.text


def test_the_folder_stays_within_its_limit(model, tmp_path):
    with Home(model, kv_offload_dir=str(tmp_path), kv_offload_gb=0.00002) as home:
        limit = 8 * home.engine.memory.offload_cache.num_hosts
        for number in range(4):
            home.answer([[number, *prompt] for prompt in prompts()])
        assert home.engine.memory.offload_cache.disk_tier.num_blocks <= limit
    assert 0 < len(files(tmp_path)) <= limit


def test_forgotten_prefixes_are_gone_from_every_home(model, kept, wanted):
    with Home(model, kv_offload_dir=str(kept)) as home:
        home.engine.memory.reset_prefix_index()
        assert not files(kept)
        assert home.answer(prompts()[:2]) == wanted[:2]
        assert home.stats.disk_hits == 0


def test_without_a_prefix_cache_there_is_nothing_to_keep_and_that_is_said(model):
    with Home(model, enable_prefix_caching=False) as home:
        assert home.engine.memory.offload_cache is None
        assert any("evicted   off (kv_offload_gb)" in line for line in home.built.report.lines())


@pytest.mark.parametrize("settings", [
    {"kv_offload_dir": "x"}, {"kv_offload_gb": -1.0}, {"kv_offload_gb": float("nan")},
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match="kv_offload_gb"):
        EngineConfig.of(**settings)

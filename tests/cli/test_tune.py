"""tune: refused without a GPU, shows and forgets anywhere, and measures for the heads that the runner will ask for."""

import subprocess
import sys

import pytest
import torch

from quire.cli import tune as command
from quire.kernels.attention import tuning
from quire.kernels.attention.tuning import TUNINGS, HeadShape, MeasuredTiles, TunedTiles, TuningKey
from quire.kernels.linear import autotune
from tests.cli.conftest import write_model

FOUND = TunedTiles(
    TUNINGS,
    (
        MeasuredTiles("decodes, 1 to 16 rows", 6.304, 5.911, "tile 64, 2 warps, 3 stages, 16 pieces"),
        MeasuredTiles("prompts", 101.5, 101.4, "default"),
    ),
)
KEY = TuningKey("A chip", "9.0", "3.6.0", "0123", HeadShape(8, 4, 128, "bfloat16", 2, 16))

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@without_gpu
@pytest.mark.parametrize(
    "words", [[], ["--device", "cpu"], ["--device", "cuda"], ["nowhere", "--load-format", "dummy"]]
)
def test_without_a_gpu_it_says_so_in_one_line(run, words):
    ran = run("tune", *words)
    assert ran.code == 2
    assert "GPU" in ran.error


def test_show_and_reset(run, empty_cache):
    assert "nothing was measured yet" in run("tune", "--show").out
    tuning.store(KEY, FOUND)
    lines = run("tune", "--show").out.splitlines()
    assert lines == [
        "A chip, Triton 3.6.0: 8 KV heads of 128, 4 queries each, blocks of 16 in bfloat16",
        "range                    default       best  chosen",
        "decodes, 1 to 16 rows    6.30 µs    5.91 µs  tile 64, 2 warps, 3 stages, 16 pieces",
        "prompts                101.50 µs  101.40 µs  default",
        "not used any more: the kernels or Triton changed since, measure again",
    ]
    assert run("tune", "--reset").out == f"forgot 1 measurement in {empty_cache / 'tuned'}\n"
    assert "nothing was measured yet" in run("tune", "--show").out
    assert "not allowed with" in run("tune", "--show", "--reset").error


def test_products_are_shown_and_forgotten_too(run, empty_cache):
    autotune.store(autotune.ChipKey("A chip", "130100", "2.11.0"), {"96x64-bfloat16": {8: 3, 1024: -1}})
    assert run("tune", "--show").out.splitlines() == [
        "A chip, cuBLASLt 130100, PyTorch 2.11.0: matrix products",
        "product         tokens     measured  by another algorithm",
        "96x64-bfloat16  8 to 1024         2                     1",
    ]
    assert run("tune", "--reset").out == f"forgot 1 measurement in {empty_cache / 'tuned'}\n"
    assert "nothing was measured yet" in run("tune", "--show").out


@without_gpu
@pytest.mark.parametrize(
    ("flags", "heads"),
    [
        ([], HeadShape(2, 2, 16, "bfloat16", 2, 16)),
        (["--kv-cache-dtype", "fp8", "--block-size", "32"], HeadShape(2, 2, 16, "float8_e4m3fn", 2, 32)),
        (["--kv-cache-dtype", "int8"], HeadShape(2, 2, 16, "int8", 2, 16)),
        (["--dtype", "float32"], HeadShape(2, 2, 16, "float32", 4, 16)),
    ],
)
def test_what_is_measured_is_kept_for_the_models_heads(run, tmp_path, empty_cache, monkeypatch, flags, heads):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A chip")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(command, "tune", lambda *all: asked.append(all[:2]) or all[3]("a candidate") or FOUND)
    model = write_model(tmp_path / "model", torch_dtype="bfloat16")
    ran = run("tune", model, *flags)
    assert ran.code == 0, ran.err
    assert ran.err == "a candidate\n"
    assert asked[0][0] == heads
    assert asked[0][1].itemsize == heads.query_bytes
    assert "the next start uses it" in ran.out
    assert tuning.cache.load(tuning.key_of(heads, "cuda")) == FOUND
    assert "not used" not in run("tune", "--show").out
    assert "nothing to tune" in run("tune", model, "--deterministic").error


def test_a_bare_gpu_machine_can_run_it():
    bare = "fastapi pydantic pydantic_core starlette uvicorn httpx zmq msgspec yaml transformers prometheus_client"
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({bare.split()!r}))\n"
        "from quire.cli.main import main\nsys.exit(main(['tune', '--help']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "--reset" in ran.stdout

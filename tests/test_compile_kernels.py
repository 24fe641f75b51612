"""Kernels are compiled for a GPU that is not there: in a process of its own, since this one interprets them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
import torch, triton
import triton.language as tl
from tools.compile_kernels.__main__ import main
from tools.compile_kernels.compiling import compile_all
from tools.compile_kernels.record import record_all
from tools.compile_kernels.table import report, summaries

@triton.jit
def fine(x, COUNT: tl.constexpr):
    tl.store(x + tl.arange(0, COUNT), 1.0)

@triton.jit
def broken(x, COUNT: tl.constexpr):
    tl.store(x + tl.arange(0, COUNT) + tl.arange(0, 2 * COUNT), 1.0)

@triton.jit
def greedy(x, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    a = tl.load(x + at[:, None] * COUNT + at[None, :])
    tl.store(x + at[:, None] * COUNT + at[None, :], tl.dot(tl.trans(tl.dot(a, a)), a))

def launch(recorder):
    recorder.case = "a case"
    fine[(1,)](torch.empty(64, device="meta"), 64, num_warps=2)
    fine[(1,)](torch.empty(64, device="meta")[1:], 64, num_warps=2)
    broken[(1,)](torch.empty(64, device="meta"), 64)
    greedy[(1,)](torch.empty(64, 64, device="meta"), 64)

if __name__ == "__main__":
    import kernels_of_a_test as module  # by the name that a compiler's process finds it by
    compiled = list(compile_all(record_all(90, [module.launch]), 90, 2))
    names = [f"kernels_of_a_test/{name}" for name in ("fine", "broken", "greedy", "unused")]
    print(report(summaries(names, compiled, 8 * 1024)))
    for word in ("nobody", "activation/"):
        print("====")
        print("status", main(["--only", word]))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    """What three runs print: kernels made for it, a name that is not there, two kernels of the engine."""
    folder = tmp_path_factory.mktemp("kernels")
    script = folder / "kernels_of_a_test.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, folder)))}
    environment.pop("TRITON_INTERPRET", None)
    found = subprocess.run(
        [sys.executable, "-c", "from triton.backends.nvidia.compiler import get_ptxas; get_ptxas(90)"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if found.returncode:
        pytest.skip(f"Triton cannot compile here: {found.stderr.strip().splitlines()[-1]}")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.split("====\n")


def test_a_kernel_that_does_not_compile_is_named_with_the_compilers_words(printed):
    lines = [line.split() for line in printed[0].splitlines() if line.startswith("kernels_of_a_test/")]
    verdicts = {words[0].partition("/")[2]: (words[1], words[7]) for words in lines}
    assert verdicts["fine"] == ("2", "ok")  # once for each alignment
    assert verdicts["broken"] == ("1", "FAILED")
    assert "FAILED kernels_of_a_test/broken: a case (*fp32 COUNT=64 num_warps=4 num_stages=3)\n" in printed[0]
    assert "Cannot make_shape_compatible" in printed[0]


def test_too_much_shared_memory_and_an_unlaunched_kernel_are_failures_too(printed):
    assert "KiB of shared memory, and a program has 8: fewer stages or smaller tiles" in printed[0]
    assert "FAILED kernels_of_a_test/unused: no case launches it" in printed[0]


def test_an_unknown_name_is_one_line_and_no_success(printed):
    assert "no kernel has 'nobody' in its name: there are activation/" in printed[1]
    assert "status 125" in printed[1]


def test_the_engines_kernels_compile_without_a_gpu(printed):
    lines = printed[2].splitlines()
    assert [line.split()[0] for line in lines[-6:-3]] == [
        "activation/_gate_kernel",
        "activation/_pointwise_kernel",
        "activation/_silu_backward_kernel",
    ]
    assert all(line.endswith("ok") for line in lines[-6:-3])
    assert lines[-2].startswith("0 of 3 kernels failed")
    assert lines[-1] == "status 0"

"""What is imported where: no GPU code on a machine without a GPU."""

import subprocess
import sys

import pytest
import torch

SCRIPT = """
import sys
import quire.engine.build, quire.llm.llm, quire.llm.async_llm
from quire.kernels.registry import choose
choose("attention", "cpu"), choose("lora", "cpu"), choose("sample", "cpu")
print(sorted(name for name in sys.modules if name.split(".")[0] == "triton"))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_code_is_imported_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_server_loads_no_retrieval_before_it_is_asked_for() -> None:
    script = "import sys, quire.server.run\nprint(sorted(name for name in sys.modules if name.startswith('quire.rag')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr

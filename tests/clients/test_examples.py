"""The scripts of examples/ that need LangChain or LlamaIndex."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("script", "package", "answer"),
    [
        ("langchain_files.py", "langchain_openai", "33 billion"),
        ("llama_index_files.py", "llama_index", "33"),  # its prompt makes the small model brief
    ],
)
def test_an_answer_from_a_file_has_its_source(
    url: str, vectors: object, script: str, package: str, answer: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip("runs with make test-clients")
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "QUIRE_URL": url},
    )
    assert run.returncode == 0, run.stderr
    assert answer in run.stdout
    assert "source: grok.txt" in run.stdout

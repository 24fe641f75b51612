"""Every script in examples/ runs as its README says. Scripts that need a server share one."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import WeightsError
from quire.weights.builtin import builtin_encoder_folder
from tests.server.running import RunningServer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MAX_LINES = 60

# Script → what its output must contain.
OFFLINE = {
    "offline_generate.py": r"'The capital of France is' -> ' Paris",
    "async_streaming.py": r"a said ' Paris.*\nb said '",
    "beam_search.py": r"^ +-\d+\.\d+  ' Paris",
    "structured_output.py": r"JSON: {'name': .*\nchoice: (yes|no)\nregex: \d{4}-\d\d-\d\d",
    "lora_adapter.py": r"base: ' Paris.*\nmine: (?!' Paris)",
    "speculative_decoding.py": r"same tokens: True",
    "prefix_caching.py": r"on\n.* 0 from the cache: .*\n.* 6\d\d from the cache: ",
    "embeddings.py": r"-?0\.\d+  Bread",
    "ask_files.py": r"33 billion(.|\n)*  from grok.txt, line 1, score 1.00",
    "batch_file.py": r"France: The capital of France is Paris\.",
}
WITH_SERVER = {
    "chat_client.py": r"The capital of France is Paris\.\n37 prompt tokens, 8 generated",
    "tool_call.py": r"call: get_weather {'city': 'Paris'}\nanswer: \S",
    "read_metrics.py": r"quire_generation_tokens_total .*\(\+16\.000\)",
}
WITH_CLIENTS = {"langchain_files.py", "llama_index_files.py"}  # tests/clients/test_examples.py runs them


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = RunningServer()
    try:
        yield server.wait_ready().url
    finally:
        server.close()


def output_of(script: str, **environment: str) -> str:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("script", OFFLINE)
def test_a_script_runs_with_the_built_in_model(script):
    if script in ("embeddings.py", "ask_files.py"):
        try:
            builtin_encoder_folder()
        except WeightsError as error:
            pytest.skip(f"the built-in encoder is not cached and cannot be fetched: {error}")
    out = output_of(script)
    assert re.search(OFFLINE[script], out, re.MULTILINE), out


@pytest.mark.parametrize("script", WITH_SERVER)
def test_a_script_runs_against_a_server(script, url):
    out = output_of(script, QUIRE_URL=url)
    assert re.search(WITH_SERVER[script], out, re.MULTILINE), out


def test_every_script_is_short_listed_and_tested():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == {*OFFLINE, *WITH_SERVER, *WITH_CLIENTS}
    listed = set(re.findall(r"^\| `(\w+\.py)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == scripts
    lengths = {name: len((EXAMPLES / name).read_text().splitlines()) for name in scripts}
    assert {name: length for name, length in lengths.items() if length >= MAX_LINES} == {}

"""The examples of docs/clients.md run, with another address, and its versions are the pinned ones."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()
EXAMPLES = dict(re.findall(r"\n## ([\w-]+)\n\n```python\n(.*?)```", PAGE, re.DOTALL))
PACKAGES = {
    "openai": ["openai"],
    "anthropic": ["anthropic"],
    "LangChain": ["langchain-openai", "langchain-anthropic"],
    "LlamaIndex": ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like"],
    "LiteLLM": ["litellm"],
    "instructor": ["instructor"],
    "pydantic-ai": ["pydantic-ai-slim"],
    "openai-agents": ["openai-agents"],
}


@pytest.mark.parametrize("client", EXAMPLES)
def test_the_example_of_a_client_runs(client: str, url: str, request: pytest.FixtureRequest):
    if "litellm.embedding(" in EXAMPLES[client]:
        request.getfixturevalue("vectors")
    try:
        exec(EXAMPLES[client].replace("http://127.0.0.1:8000", url), {})
    except ModuleNotFoundError:
        pytest.skip("runs with make test-clients")


def test_every_client_has_a_row_with_its_pinned_versions():
    pinned = [(ROOT / "requirements" / name).read_text() for name in ("constraints.txt", "clients.txt")]
    rows = dict(re.findall(r"^\| \[([\w-]+)\]\(#[\w-]+\) \| ([^|]*) \|", PAGE, re.MULTILINE))
    assert set(rows) == set(EXAMPLES) == set(PACKAGES)
    for client, packages in PACKAGES.items():
        for version in re.findall(rf"^(?:{'|'.join(packages)})==(.*)$", "\n".join(pinned), re.MULTILINE):
            assert version in rows[client]

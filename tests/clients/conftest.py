"""One server for the tests of all clients, which may run in an environment without quire: `make test-clients`."""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients import asked
from tests.server.running import RunningServer

# Nothing of a client leaves this machine: no prices from the web, no traces.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("OPENAI_AGENTS_DISABLE_TRACING", "1")
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server's address without /v1."""
    running = RunningServer("--data-dir", str(tmp_path_factory.mktemp("data")))
    try:
        yield running.wait_ready().url
        running.wait_idle()
    finally:
        running.close()


@pytest.fixture(scope="package")
def vectors(url: str) -> list[list[float]]:
    """What /v1/embeddings makes of `asked.TEXTS`. The first request fetches the model, which needs the network."""
    body = {"model": asked.EMBEDDER, "input": asked.TEXTS}
    response = httpx.post(f"{url}/v1/embeddings", json=body, timeout=120)
    if "could not be fetched" in response.text:
        pytest.skip(response.json()["error"]["message"])
    return [one["embedding"] for one in response.raise_for_status().json()["data"]]

"""One server for all tests that leave it as they found it; others start their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.running import RunningServer

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever uses a server is an end-to-end test."""
    for item in items:
        if FOLDER in item.path.parents and {"server", "data_server", "start_server"} & set(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer("--data-dir", str(tmp_path_factory.mktemp("data")))
    try:
        yield running.wait_ready()
        running.wait_idle()
    finally:
        running.close()


@pytest.fixture(scope="session")
def data_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a data folder, an embedding model and two keys: alice and bob."""
    folder = tmp_path_factory.mktemp("data")
    keys = ("--api-key", "alice", "--api-key", "bob")
    running = RunningServer("--data-dir", str(folder), "--embedding-model", "builtin", *keys)
    try:
        yield running.wait_ready()
        running.wait_idle()
    finally:
        running.close()


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    started: list[RunningServer] = []

    def start(*flags: str, **environment: str) -> RunningServer:
        running = RunningServer(*flags, **environment)
        started.append(running)
        return running.wait_ready()

    yield start
    for one in started:
        one.close()

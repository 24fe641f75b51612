"""Fixtures that the laboratory's tests share, some with those of quire.bench."""

from pathlib import Path

import pytest

from quire_lab.report.data import DataFolder
from tests.bench.conftest import tiny_built  # noqa: F401 - a fixture
from tests.conftest import shared_path


@pytest.fixture(scope="session")
def real_data() -> DataFolder:
    shared = shared_path()
    if shared is None:
        pytest.skip("no shared data: set QUIRE_SHARED, or put the folder `shared` beside the checkout")
    return DataFolder(Path(shared) / "data")

"""Fixtures that the laboratory's tests share with those of quire.bench."""

from tests.bench.conftest import tiny_built  # noqa: F401 - a fixture

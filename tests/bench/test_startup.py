"""Startup is measured in fresh processes; one that fails says why in one line."""

import json

import pytest

from quire.bench.startup import STAGES
from tests.cli.conftest import run  # noqa: F401 - a fixture

pytestmark = pytest.mark.e2e


def test_startup_splits_the_time_to_the_first_token(run):  # noqa: F811
    found = json.loads(run("bench", "startup", "--iterations", "1", "--num-tokens", "64", "--json").out)
    results = found["results"]
    (one,) = results["runs"]
    assert sum(one["stages"][stage] for stage in STAGES) == pytest.approx(one["seconds"])
    assert all(seconds > 0 for seconds in one["stages"].values())
    assert results["resident_bytes"]["current"] < 700e6
    assert found["settings"]["settings"] == {"num_blocks": 128}


def test_a_model_that_does_not_start_is_one_line(run):  # noqa: F811
    ran = run("bench", "startup", "./nowhere", "--iterations", "1")
    assert "could not start the engine: ./nowhere: no such folder or file: check the path" in ran.error

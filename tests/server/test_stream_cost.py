"""How many objects a streamed token makes on the HTTP side; stream_cost.py counts them."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

MOST_OBJECTS = 8


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="counts CPython's memory blocks")
def test_a_streamed_token_makes_few_objects() -> None:
    command = [sys.executable, "-m", "tests.server.stream_cost"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    count = json.loads(ran.stdout.splitlines()[-1])
    assert 40 <= count["known"] <= 42  # the counter itself: forty objects, and a loop's own
    assert count["status"] == 200
    # beside the tokens: the end of the answer, DONE; the role comes with the first
    assert count["pieces"] == 2
    assert count["per_token"] <= MOST_OBJECTS, count["by_line"]

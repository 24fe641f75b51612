"""tools.trace_request, once against a real server."""

import re

from tools.trace_request.__main__ import main

MAX_FILES = 50  # that one plain streamed chat request may enter


def test_one_request_is_traced_through_both_processes_and_held_to_the_budget(capsys):
    assert main(["--budget", "1"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^HTTP process: \d+ files, \d+ calls$", out, re.MULTILINE)
    assert re.search(r"^engine process: \d+ files, \d+ calls$", out, re.MULTILINE)
    assert re.search(r"^ +\d+\. +\d+ calls  server/\w+\.py$", out, re.MULTILINE)
    assert re.search(r"^ +\d+\. +\d+ calls  scheduler/\w+\.py$", out, re.MULTILINE)
    assert re.search(r"^ +\d+\. +\d+ calls  models/llama\.py$", out, re.MULTILINE)  # not replayed from a tape
    total = re.search(r"^total: (\d+) distinct files \(budget 1: exceeded\)$", out, re.MULTILINE)
    assert total
    assert 20 < int(total[1]) <= MAX_FILES

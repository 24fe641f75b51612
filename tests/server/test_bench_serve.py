"""`quire bench serve` against a real server: every token counted, every failure by its kind."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Ran, Run
from tests.cli.conftest import run as run  # the fixture
from tests.server.running import ADMIN_KEY, RunningServer

LIGHT = ("--num-prompts", 6, "--random-input-len", 20, "--random-output-len", 5)


def error_of(ran: Ran) -> str:
    """The command's one line; the server's log is beside it on stderr."""
    lines = [line for line in ran.err.splitlines() if line.startswith("quire: error: ")]
    assert (ran.code, len(lines)) == (2, 1), ran.err
    return lines[0]


def test_a_sweep_counts_every_token(server: RunningServer, run: Run, tmp_path: Path):
    path = tmp_path / "out.json"
    flags = ("--request-rate", "20,inf", "--goodput", "ttft:60000", "e2el:60000", "--save-detailed")
    ran = run("bench", "serve", "--base-url", server.url, *LIGHT, *flags, "--output", path)
    assert ran.code == 0, ran.err
    for word in ("rate", "20.0", "inf", "goodput/s", "TTFT", "p99", "normalised"):
        assert word in ran.out
    record = json.loads(path.read_text())
    assert {"machine", "versions", "settings", "results"} <= set(record)
    for one in record["results"]["rounds"]:
        assert (one["num_complete"], one["num_prompt_tokens"], one["num_output_tokens"]) == (6, 120, 30)
        assert one["errors"] == {}
        assert one["goodput"]["num_good"] == 6
        assert 0 < one["ttft_ms"]["p50"] <= one["e2e_ms"]["p50"]
        means = [one[f"{name}_ms"]["mean"] for name in ("ttft", "tpot", "e2e")]
        assert means[0] + 4 * means[1] == pytest.approx(means[2])  # five tokens each
    assert [len(each) for each in record["results"]["requests"]] == [6, 6]


def test_chats_from_a_trace_and_failures_by_kind(server: RunningServer, run: Run, tmp_path: Path):
    trace = tmp_path / "trace.csv"
    rows = [(0.0, 10, 3), (0.2, 12, 4), (0.4, 20_000, 3), (0.5, 8190, 2)]
    trace.write_text(
        "timestamp,prompt_tokens,output_tokens\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows)
    )
    ran = run(
        *("bench", "serve", "--base-url", f"{server.url}/v1", "--endpoint", "chat", "--dataset-path", trace),
        *("--trace-speed", 4, "--json"),
    )
    assert ran.code == 0, ran.err
    (one,) = json.loads(ran.out)["results"]["rounds"]
    # one is longer than the context and left out, one only with the template's own tokens
    assert (one["num_requests"], one["num_complete"], one["num_output_tokens"]) == (3, 2, 7)
    assert one["errors"] == {"HTTP 400 context_length_exceeded": 1}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--base-url", "http://127.0.0.1:1"],
            "cannot be reached (Connection refused): is the server running?",
        ),
        (["--base-url", "ftp://x"], "is no address: write http://HOST:PORT"),
        (["--request-rate", "fast"], "write requests per second, inf, or several: 1,2,4"),
        (["--goodput", "speed:1"], "write ttft:MS"),
        (["--dataset", "trace"], "give --dataset-path FILE"),
        (["--extra-body", "[]"], "must be a JSON object"),
    ],
)
def test_what_cannot_be_measured_is_one_line(server: RunningServer, run: Run, flags: list[str], said: str):
    if "--base-url" not in flags:
        flags = [*flags, "--base-url", server.url]
    assert said in error_of(run("bench", "serve", *flags))


def test_the_time_line_names_steps_of_the_engine(server: RunningServer, run: Run, tmp_path: Path):
    picture, record = tmp_path / "line.html", tmp_path / "out.json"
    # longer answers: five tokens may arrive at once, without gaps
    flags = (
        "--timeline",
        picture,
        "--percentile-metrics",
        "itl",
        "--output",
        record,
        "--random-output-len",
        60,
    )
    ran = run("bench", "serve", "--base-url", server.url, *LIGHT, *flags, "--admin-key", ADMIN_KEY)
    assert ran.code == 0, ran.err
    assert "held up by" in ran.out
    assert "between tokens (ITL)" in ran.out
    assert "first token (TTFT)" not in ran.out
    results = json.loads(record.read_text())["results"]
    assert {"p50", "p90", "p95", "p99", "max"} <= set(results["rounds"][0]["itl_ms"])
    assert results["late_tokens"][0]["step_id"] is not None
    assert picture.read_text().count("prefill tokens, ") > 3  # steps in the picture
    ran = run("bench", "serve", "--base-url", server.url, *LIGHT, "--timeline", picture)
    assert "/start_step_log was refused (HTTP 401" in error_of(ran)


def test_a_model_that_the_server_does_not_have_is_known_before_the_load(server: RunningServer, run: Run):
    ran = run("bench", "serve", "--base-url", server.url, "--model", "nobody")
    assert "failed: HTTP 404 model_not_found" in error_of(ran)

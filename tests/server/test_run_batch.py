"""`quire run-batch`: every line gets its row, whatever becomes of lines, engine and program."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.core.errors import ConfigError
from quire.server.batch import BadLine, BatchLine, RowFile, answer_row, parse_line
from tests.models.llama2 import write_llama2

SMALL = ("--kv-cache-memory-bytes", "256M", "--max-num-seqs", "4")


def line(custom_id: object, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def completion(custom_id: str, max_tokens: int = 4, **fields: Any) -> str:
    return line(custom_id, prompt="One, two,", max_tokens=max_tokens, temperature=0, **fields)


def rows_of(path: Path) -> dict[str | None, dict[str, Any]]:
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    return {row["custom_id"]: row for row in rows}


@pytest.mark.parametrize(
    ("text", "custom_id", "said"),
    [
        ("{", None, "no valid JSON"),
        ("[1]", None, "no JSON object but list"),
        ('{"url": "/v1/completions"}', None, "has no custom_id"),
        (line(7), None, "has no custom_id"),
        (line("a", "/v1/models"), "a", "choose one of /v1/chat/completions"),
        (line("a", stream=True), "a", "asks for a stream"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "a", "write POST"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": 3}', "a", "has no body"),
    ],
)
def test_a_line_that_is_no_request_says_why(text: str, custom_id: str | None, said: str):
    found = parse_line(3, text)
    assert isinstance(found, BadLine)
    assert (found.number, found.custom_id) == (3, custom_id)
    assert said in found.message


def test_a_byte_order_mark_is_no_part_of_a_request():
    assert isinstance(parse_line(1, "\ufeff" + completion("a")), BatchLine)


def test_a_row_file_keeps_what_is_finished_and_drops_what_is_torn(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    rows = RowFile(str(path))
    asked = {name: parse_line(1, completion(name)) for name in "abcd"}
    for name, status in (("a", 200), ("b", 400), ("c", 500), ("d", 429)):
        one = asked[name]
        assert isinstance(one, BatchLine)
        # half a character, as models write them
        rows.write(answer_row(one, status, "req", {"text": "\ud800"}))
    rows.close()
    with path.open("a") as file:
        file.write('{"custom_id": "e", "respo')  # the program was killed
    with pytest.raises(ConfigError, match="--resume goes on with them"):
        RowFile(str(path))
    again = RowFile(str(path), resume=True)
    again.close()
    assert again.finished == {"a", "b"}
    assert list(rows_of(path)) == ["a", "b"]
    RowFile(str(path), overwrite=True).close()
    assert path.read_text() == ""
    with pytest.raises(ConfigError, match="cannot be written"):
        RowFile(str(tmp_path / "no" / "such"))


def run_batch(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "run-batch", *map(str, words), *SMALL]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **options)


@pytest.mark.e2e
def test_every_line_gets_a_row_and_a_second_run_asks_only_what_is_missing(tmp_path: Path):
    source, result = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 8}
    source.write_text(
        completion("text")
        + "\n"
        + line("chat", "/v1/chat/completions", temperature=0, **chat)
        + "nonsense\n"
        + completion("other model", model="nobody")
        + completion("text")
    )
    ran = run_batch("-i", source, "-o", result)
    assert ran.returncode == 0, ran.stderr
    assert "2 answered, 1 refused (HTTP 404 model_not_found), 2 malformed; 41 tokens in, 12 out" in ran.stderr
    assert len(result.read_text().splitlines()) == 5
    rows = [json.loads(text) for text in result.read_text().splitlines()]
    answered = {row["custom_id"]: row["response"] for row in rows if row["response"] is not None}
    assert answered["text"]["body"]["choices"][0]["finish_reason"] == "length"
    assert "Paris" in answered["chat"]["body"]["choices"][0]["message"]["content"]
    assert answered["other model"]["status_code"] == 404
    assert all(response["request_id"] for response in answered.values())
    messages = sorted(row["error"]["message"] for row in rows if row["error"] is not None)
    assert messages[0].startswith("line 4 is no valid JSON")
    assert messages[1] == "line 6 has the custom_id 'text', which an earlier line has"
    with source.open("a") as file:
        file.write(completion("one more"))
    again = run_batch("-i", source, "-o", result, "--resume")
    assert "1 answered, 2 malformed, 3 done before" in again.stderr
    assert len(result.read_text().splitlines()) == 6


@pytest.mark.e2e
def test_requests_of_an_engine_that_died_are_asked_again(tmp_path: Path):
    # the first is far from its end when another is answered, and the engine is killed
    lengths = [600] + [60] * 11
    lines = "".join(completion(f"{n}", max_tokens=count, ignore_eos=True) for n, count in enumerate(lengths))
    command = [sys.executable, "-m", "quire", "run-batch", "-i", "-", "-o", "-", *SMALL]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
    process.stdin.write(lines)
    process.stdin.close()
    first = process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    engine = next(pid for pid in children if "quire.link.worker" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(int(engine), signal.SIGKILL)
    rest = process.stdout.read()
    said = process.stderr.read()
    assert process.wait(60) == 0
    assert "killed by SIGKILL" in said
    assert "12 answered" in said
    rows = [json.loads(text) for text in io.StringIO(first + rest)]
    assert sorted(int(row["custom_id"]) for row in rows) == list(range(12))
    assert (
        len({row["response"]["body"]["choices"][0]["text"] for row in rows if row["custom_id"] != "0"}) == 1
    )


@pytest.mark.e2e
def test_a_batch_of_which_nothing_could_run_has_another_exit_code(tmp_path: Path):
    (tmp_path / "bad.jsonl").write_text("nonsense\n")
    assert run_batch("-i", tmp_path / "bad.jsonl", "-o", tmp_path / "out.jsonl").returncode == 2
    assert rows_of(tmp_path / "out.jsonl")[None]["error"]["code"] == "invalid_line"


@pytest.mark.e2e
def test_a_full_disk_and_a_reader_that_has_left_end_a_batch_without_a_fault_of_its_own(tmp_path: Path):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(completion(f"{n}") for n in range(20)))
    full = run_batch("-i", source, "-o", "/dev/full", "--quiet")
    assert (full.returncode, full.stderr.splitlines()) == (
        1,
        [
            "quire: /dev/full holds what is done: --resume goes on",
            "quire: error: [Errno 28] No space left on device: '/dev/full'",
        ],
    )
    command = [sys.executable, "-m", "quire", "run-batch", "-i", source, "-o", "-", "--quiet", *SMALL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 1)


@pytest.mark.e2e
def test_a_model_whose_tokenizer_claims_no_limit_answers_a_batch(tmp_path: Path):
    folder = write_llama2(tmp_path / "llama2")  # model_max_length is 10^30
    source, result = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(completion("a"))
    ran = run_batch("--model", folder, "-i", source, "-o", result)
    assert ran.returncode == 0, ran.stderr
    assert "256 tokens per sequence" in ran.stderr
    assert rows_of(result)["a"]["response"]["status_code"] == 200


def test_a_batch_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["run-batch", "-i", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == 2
    assert "none.jsonl: cannot be read (No such file or directory)" in capsys.readouterr().err


def test_the_input_is_never_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked = tmp_path / "in.jsonl"
    asked.write_text("{}\n")
    (tmp_path / "link.jsonl").symlink_to(asked)
    for flag in ("--overwrite", "--resume"):
        assert main(["run-batch", "-i", str(asked), "-o", str(tmp_path / "link.jsonl"), flag]) == 2
        assert "is the input, which would be lost" in capsys.readouterr().err
    assert asked.read_text() == "{}\n"

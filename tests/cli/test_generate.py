"""generate and chat on the built-in model, as a person or a script would use them."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from quire.cli.terminal import interruptible
from tests.models.llama2 import write_llama2

SMALL = ("--num-blocks", "64", "--quiet")
GREEDY = ("--temperature", "0", *SMALL)

pytestmark = pytest.mark.e2e


class Pipe(io.StringIO):
    """Standard input that is no terminal."""

    def isatty(self):
        return False


def test_one_prompt_streams_its_text(run):
    ran = run("generate", "--prompt", "The capital of France is", "--max-tokens", "3", *GREEDY)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(" Paris.")


def test_standard_input_is_one_prompt(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Pipe("The capital of\nFrance is\n"))
    ran = run("generate", "--max-tokens", "2", "--json", *GREEDY)
    assert json.loads(ran.out)["prompt"] == "The capital of\nFrance is"


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", "One, two"), ("a.jsonl", '"One, two"'), ("-", "One, two")]
)
def test_a_byte_order_mark_is_no_part_of_a_prompt(name, text, run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", Pipe(f"\ufeff{text}\n"))
    (tmp_path / name).write_text(f"\ufeff{text}\r\n")
    ran = run("generate", "--prompt-file", name, "--max-tokens", "2", "--json", *GREEDY)
    assert json.loads(ran.out)["prompt"] == "One, two"


class Interrupts(io.StringIO):
    """Standard output at which someone presses ctrl-C as soon as there is a line."""

    def write(self, text):
        if not self.getvalue():
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


def test_a_result_is_shown_before_later_prompts_are_served(run, monkeypatch, tmp_path):
    (tmp_path / "prompts.txt").write_text("One, two\n" * 8)
    shown, before = Interrupts(), signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(sys, "stdout", shown)
    try:
        words = ("--max-tokens", "2", "--max-num-seqs", "1", "--json", *GREEDY)
        ran = run("generate", "--prompt-file", tmp_path / "prompts.txt", *words)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran.code, ran.err) == (130, "")
    assert 1 <= shown.getvalue().count("\n") < 8


def test_results_of_another_run_stay_until_the_model_is_there(run, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("results\n")
    assert run("generate", tmp_path / "none", "-p", "x", "-o", out).code == 2
    assert out.read_text() == "results\n"
    assert run("generate", "-p", "x", "-o", out, "--max-tokens", "2", *GREEDY).code == 0
    assert json.loads(out.read_text())["index"] == 0


def test_records_have_what_was_asked_for(run, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One two\u2028three\n\nThe capital of France is\n")
    out = tmp_path / "out.jsonl"
    words = ("--logprobs", "2", "--prompt-logprobs", "1", "--max-tokens", "4", "--ignore-eos")
    assert run("generate", "--prompt-file", prompts, "--output", out, *words, *GREEDY).code == 0
    records = [json.loads(line) for line in out.read_text().rstrip("\n").split("\n")]
    assert [record["index"] for record in records] == [0, 1]
    for record in records:
        (output,) = record["outputs"]
        assert len(output["token_ids"]) == len(output["logprobs"]) == 4
        assert output["finish_reason"] == "length"
        assert record["prompt_logprobs"][0] is None
        assert len(record["prompt_logprobs"]) == record["num_prompt_tokens"]
    assert "Paris" in records[1]["outputs"][0]["text"]


def test_beams_are_returned_best_first(run):
    words = ("--use-beam-search", "--best-of", "4", "--n", "2", "--max-tokens", "6", "--ignore-eos", "--json")
    more = ("--length-penalty", "0.5", "--early-stopping", "never", *SMALL)
    ran = run("generate", "--prompt", "The capital of France is", *words, *more)
    assert (ran.code, ran.err) == (0, "")
    first, second = json.loads(ran.out)["outputs"]
    assert first["text"] != second["text"]
    assert first["cumulative_logprob"] > second["cumulative_logprob"]  # of one length
    assert "Paris" in first["text"]


@pytest.mark.parametrize(("words", "said"), [
    (("--best-of", "1", "--n", "2"), "best_of"), (("--best-of", "33"), "32"),
    (("--early-stopping", "perhaps"), "true, false, never"),
])  # fmt: skip
def test_beams_that_cannot_be_are_refused(run, words, said):
    ran = run("generate", "--prompt", "Hello", "--use-beam-search", *words, *SMALL)
    assert ran.code != 0
    assert said in ran.err


def test_a_seed_gives_the_same_samples_again(run):
    words = (
        "generate",
        "--prompt",
        "Once upon a time",
        "--n",
        "2",
        "--seed",
        "7",
        "--max-tokens",
        "6",
        "--json",
        *SMALL,
    )
    first, second = (json.loads(run(*words).out)["outputs"] for _ in range(2))
    assert [one["token_ids"] for one in first] == [one["token_ids"] for one in second]
    assert first[0]["token_ids"] != first[1]["token_ids"]


def test_chat_goes_through_the_template_and_stops_at_a_stop_string(run):
    question = "What is the capital of France?"
    ran = run(
        "generate",
        "--chat",
        "--system",
        "Be brief.",
        "--prompt",
        question,
        "--stop",
        "Paris",
        "--json",
        *GREEDY,
    )
    record = json.loads(ran.out)
    assert record["prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert record["outputs"][0]["stop_reason"] == "Paris"
    assert "Paris" not in record["outputs"][0]["text"]


def test_the_start_is_reported_on_stderr(run):
    ran = run("generate", "--prompt", "x", "--max-tokens", "1", "--num-blocks", "64")
    for word in ("model ", "weights ", "pool ", "limits ", "started "):
        assert word in ran.err


def test_chat_from_a_pipe_answers_line_by_line(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Pipe("What is the capital of France?\nAnd of Italy?\n"))
    ran = run("chat", "--max-tokens", "16", *GREEDY)
    assert (ran.code, ran.err) == (0, "")
    first, second = ran.out.strip().splitlines()
    assert "Paris" in first
    assert "Rome" in second


def test_a_turn_that_is_too_long_costs_one_line(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Pipe("word " * 400 + "\nWhat is the capital of France?\n"))
    ran = run("chat", "--max-tokens", "16", "--num-blocks", "16", "--temperature", "0", "--quiet")
    assert "tokens with its template and the context is 256: shorten it" in ran.error
    assert "Paris" in ran.out


def test_a_full_context_forgets_with_a_notice(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Pipe("Tell me about France.\n" * 5))
    ran = run("chat", "--max-tokens", "24", "--max-model-len", "160", *GREEDY)
    assert ran.code == 0
    assert "the context is full: the oldest 2 messages are forgotten" in ran.err


class Terminal:
    """quire chat on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.master, follower = pty.openpty()
        command = [sys.executable, "-m", "quire", "chat", *words]
        # SIGINT is ignored at start, as in children of `make test &`: a terminal's ctrl-C must work all the same
        ignore = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            preexec_fn=ignore,
        )
        os.close(follower)
        self.seen = ""

    def wait_for(self, pattern: str, seconds: float = 120.0) -> str:
        """What came up to the pattern; the rest stays."""
        assert self.sees(pattern, seconds), f"no {pattern!r} in {self.seen!r}"
        found = re.search(pattern, self.seen)
        assert found is not None
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def sees(self, pattern: str, seconds: float) -> bool:
        """Whether it comes in that time; all of it stays."""
        ends = time.monotonic() + seconds
        while re.search(pattern, self.seen) is None:
            if time.monotonic() > ends:
                return False
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
        return True

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal():
    made = Terminal("--num-blocks", "128", "--temperature", "0")
    yield made
    made.close()


def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(terminal):
    terminal.wait_for(r"ctrl-D leaves", seconds=240)  # kernels may have to be compiled first
    terminal.wait_for(r"> ")
    terminal.type("Write a very long story about a dragon.\n")
    terminal.wait_for(r"story about a dragon\.\r\n.*\w+ \w+ \w+")
    terminal.process.send_signal(signal.SIGINT)
    assert "stopped" in terminal.wait_for(r"stopped \(\d+ of \d+ prompt tokens cached\)")
    terminal.wait_for(r"> ")
    # Python's readline misses one between its prompt and its wait; no person is that quick
    for _ in range(10):
        terminal.process.send_signal(signal.SIGINT)  # at the prompt: a hint, not the end
        if terminal.sees(r"ctrl-D or /exit leaves", seconds=3.0):
            break
    terminal.wait_for(r"ctrl-D or /exit leaves")
    terminal.type("/reset\n")
    terminal.wait_for(r"a new conversation")
    terminal.type("What is the capital of France?\n")
    terminal.wait_for(r"Paris")
    figures = terminal.wait_for(
        r"tokens, [\d.]+ tok/s, first after [\d.]+ s \(\d+ of \d+ prompt tokens cached\)"
    )
    assert figures
    terminal.type("And of Italy?\n")
    cached = re.search(r"\((\d+) of", terminal.wait_for(r"\(\d+ of \d+ prompt tokens cached\)"))
    assert cached is not None
    assert int(cached[1]) >= 16  # the first turn's blocks were found again
    terminal.wait_for(r"> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


@pytest.mark.parametrize("ignored", [True, False])
def test_a_background_job_that_ignores_interrupts_goes_on_ignoring_them(ignored):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        with interruptible() as interrupted:
            assert not interrupted()
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupted() is not ignored
        assert (signal.getsignal(signal.SIGINT) is signal.SIG_IGN) == ignored
    finally:
        signal.signal(signal.SIGINT, before)


PEAK = """
import re, sys
from pathlib import Path
from quire.cli.main import main

code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_line_of_100_mb_is_refused_for_little_time_and_memory(tmp_path):
    model, prompts = write_llama2(tmp_path / "tiny"), tmp_path / "prompts.jsonl"
    prompts.write_text(f'"{"a " * 50_000_000}"\n')
    words = ("generate", str(model), "--prompt-file", str(prompts), *SMALL)
    begun = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", PEAK, *words], capture_output=True, text=True, timeout=120)
    assert time.monotonic() - begun < 20  # 2 s on an idle machine
    assert ran.returncode == 2, ran.stderr
    assert "at least 512 tokens and the context is 256" in ran.stderr
    assert int(ran.stdout) * 1024 < 1_500_000_000  # it takes 570 MB

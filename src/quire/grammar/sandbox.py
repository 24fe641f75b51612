"""Trial: a grammar is compiled in a process of its own first, which may hang, swell or crash without harm.

The library bounds most of what a grammar may cost, but not all: there are schemas that take minutes and
grammars that overflow the stack. What passed a trial is compiled again in the engine's own process.

`python -m quire.grammar.sandbox` reads a vocabulary and then grammars from stdin, a JSON line each, and answers
each grammar with a line: null, or what is wrong with it. It ends with its stdin.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from quire.core.structured import StructuredOutput
from quire.grammar.errors import GrammarError, GrammarFault
from quire.grammar.llguidance_backend import compile_matcher, make_tokenizer
from quire.grammar.vocabulary import Vocabulary

STACK_BYTES = 4 << 20  # half of what the engine's threads have: whatever fits here fits there
MEMORY_BYTES = 1 << 30  # beyond what the vocabulary takes
START_SECONDS = 60.0
CLOSE_SECONDS = 1.0
PATIENCE = 6  # a busy machine may take so many times as long as the processor itself


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    answers: IO[bytes]


class GrammarSandbox:
    """Belongs to one thread. The process is started when it is first needed, and again after it was lost."""

    def __init__(self, vocabulary: Vocabulary, seconds: int) -> None:
        """`seconds` of the processor's time are for each grammar."""
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._child: _Child | None = None

    def check(self, structured: StructuredOutput) -> None:
        """Raises GrammarError if the grammar is wrong, or too much for the bounds."""
        if self._child is not None and self._child.process.poll() is not None:
            self.close()  # someone ended it while it had nothing to do
        child = self._child or self._start()
        message = [structured.kind, structured.text, structured.strict]
        answer = self._ask(child, message, self._seconds * PATIENCE)
        if answer is None:
            code = self.close()
            if code == -signal.SIGKILL:  # ours, or of someone who ends processes
                raise GrammarFault(f"the {structured.kind} could not be compiled in time: try again later")
            took = f"longer than {self._seconds} s"
            if code != -signal.SIGXCPU:
                took = f"more than {MEMORY_BYTES >> 20} MB of memory, or too deep a stack,"
            raise GrammarError(f"the {structured.kind} takes {took} to compile: simplify it")
        if answer["error"] is not None:
            raise GrammarError(answer["error"])

    def kill(self) -> None:
        """From another thread: whatever is being checked fails at once."""
        child = self._child
        if child is not None:
            child.process.kill()

    def close(self) -> int | None:
        """Ends the process; its exit code. Calling it twice is fine."""
        child, self._child = self._child, None
        if child is None:
            return None
        for pipe in (child.requests, child.answers):
            with suppress(OSError):  # what was not written yet is of no use now
                pipe.close()
        try:
            return child.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            child.process.kill()
            return child.process.wait()

    def _start(self) -> _Child:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire.grammar.sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        child = self._child = _Child(process, process.stdin, process.stdout)
        vocabulary = self._vocabulary
        described = {
            "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
            "special_ids": sorted(vocabulary.special_ids),
            "end_ids": vocabulary.end_ids,
            "seconds": self._seconds,
        }
        if self._ask(child, described, START_SECONDS) is None:
            code = self.close()
            raise GrammarFault(f"the process that compiles grammars cannot be started (exit code {code})")
        return child

    def _ask(self, child: _Child, message: Any, seconds: float) -> dict[str, Any] | None:
        """The answer, or None if the process died or was too slow, in which case it is dead now."""
        timer = threading.Timer(seconds, child.process.kill)
        timer.daemon = True
        timer.start()
        try:
            child.requests.write(json.dumps(message).encode() + b"\n")
            child.requests.flush()
            line = child.answers.readline()
        except OSError:
            return None
        finally:
            timer.cancel()
        return json.loads(line) if line.endswith(b"\n") else None


# ---------------------------------------------------------------------- in the process itself


def _serve(lines: BinaryIO, answers: BinaryIO) -> None:
    said = json.loads(lines.readline())
    vocabulary = Vocabulary(
        tokens=[token.encode("latin-1") for token in said["tokens"]],
        special_ids=frozenset(said["special_ids"]),
        end_ids=tuple(said["end_ids"]),
    )
    tokenizer = make_tokenizer(vocabulary)
    _bound_memory()
    _answer(answers, None)
    for line in lines:
        _bound_time(said["seconds"])
        try:
            compile_matcher(tokenizer, StructuredOutput(*json.loads(line)))
        except GrammarError as error:
            _answer(answers, str(error))
        else:
            _answer(answers, None)


def _answer(answers: BinaryIO, error: str | None) -> None:
    answers.write(json.dumps({"error": error}).encode() + b"\n")
    answers.flush()


def _bound_time(seconds: int) -> None:
    """The process is ended when it has worked so long from now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _bound_memory() -> None:
    """From what is mapped by now. Where the system does not say how much that is, time must bound it alone."""
    with suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the parent decides
    os.nice(5)  # those who have their tokens coming go first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    parent = os.getppid()
    worker = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    worker.start()
    while worker.is_alive():
        worker.join(1.0)
        if os.getppid() != parent:  # nobody waits for what is being compiled
            os._exit(1)


if __name__ == "__main__":
    main()

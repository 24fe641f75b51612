"""GrammarSandbox: compiles a grammar in a process of its own first, which may hang, run out of memory or crash.

llguidance limits most costs of a grammar, but not all: some schemas take minutes, and some grammars overflow the
stack. A grammar that passed the sandbox is compiled again in the engine's process.

`python -m quire.grammar.sandbox` reads a vocabulary and then grammars from stdin, a JSON line each, and answers
each grammar with a JSON line: its error, or null. It ends with its stdin.
"""

import json
import math
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from quire.core.structured import StructuredOutput
from quire.grammar.matcher import GrammarError, GrammarFault, compile_matcher, make_tokenizer
from quire.grammar.vocabulary import Vocabulary
from quire.observe.bounded import BoundedProcess

STACK_BYTES = 4 << 20  # half of the engine threads' stack, so that a grammar that fits here fits there
MEMORY_BYTES = 1 << 30  # beyond the vocabulary's
START_SECONDS = 60.0
WALL_TIME_FACTOR = 6  # wall-clock limit over CPU limit, for a busy machine


class GrammarSandbox:
    """Belongs to one thread. The process is started by the first check, and again after it died."""

    def __init__(self, vocabulary: Vocabulary, seconds: int) -> None:
        """`seconds` is the CPU time of each grammar."""
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._child: BoundedProcess | None = None

    def check(self, structured: StructuredOutput) -> None:
        """Raises GrammarError if the grammar is invalid or exceeds a limit, GrammarFault if the sandbox fails."""
        if self._child is not None and not self._child.is_alive:
            self.close()  # it was killed while idle
        child = self._child or self._start()
        message = [structured.kind, structured.text, structured.strict]
        answer = child.ask(message, self._seconds * WALL_TIME_FACTOR)
        if answer is None:
            code = self.close()
            if code == -signal.SIGKILL:  # by the timer, or from outside
                raise GrammarFault(f"the {structured.kind} could not be compiled in time: try again later")
            excess = f"longer than {self._seconds} s"
            if code != -signal.SIGXCPU:
                excess = f"more than {MEMORY_BYTES >> 20} MB of memory, or too deep a stack,"
            raise GrammarError(f"the {structured.kind} takes {excess} to compile: simplify it")
        if (error := answer[0]["error"]) is not None:
            raise GrammarError(error)

    def kill(self) -> None:
        """For another thread: the check in progress fails at once."""
        child = self._child
        if child is not None:
            child.process.kill()

    def close(self) -> int | None:
        """Ends the process; its exit code. Calling it twice is fine."""
        child, self._child = self._child, None
        return None if child is None else child.close()

    def _start(self) -> BoundedProcess:
        child = self._child = BoundedProcess("quire.grammar.sandbox")
        vocabulary = self._vocabulary
        message = {
            "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
            "special_ids": sorted(vocabulary.special_ids),
            "end_ids": vocabulary.end_ids,
            "seconds": self._seconds,
        }
        if child.ask(message, START_SECONDS) is None:
            code = self.close()
            raise GrammarFault(f"the process that compiles grammars cannot be started (exit code {code})")
        return child


# ---------------------------------------------------------------------- in the process itself


def _serve(lines: BinaryIO, answers: BinaryIO) -> None:
    settings = json.loads(lines.readline())
    vocabulary = Vocabulary(
        tokens=[token.encode("latin-1") for token in settings["tokens"]],
        special_ids=frozenset(settings["special_ids"]),
        end_ids=tuple(settings["end_ids"]),
    )

    def answer(error: str | None) -> None:
        answers.write(json.dumps({"error": error}).encode() + b"\n")
        answers.flush()

    tokenizer = make_tokenizer(vocabulary)
    _limit_memory()
    answer(None)
    for line in lines:
        _limit_cpu_time(settings["seconds"])
        try:
            compile_matcher(tokenizer, StructuredOutput(*json.loads(line)))
        except GrammarError as error:
            answer(str(error))
        else:
            answer(None)


def _limit_cpu_time(seconds: int) -> None:
    """Kills the process after `seconds` more of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _limit_memory() -> None:
    """Allows MEMORY_BYTES beyond what is mapped now; no limit where /proc does not tell that."""
    with suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the parent decides
    os.nice(5)  # running requests have priority
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    parent = os.getppid()
    worker = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    worker.start()
    while worker.is_alive():
        worker.join(1.0)
        if os.getppid() != parent:  # the parent has ended
            os._exit(1)


if __name__ == "__main__":
    main()

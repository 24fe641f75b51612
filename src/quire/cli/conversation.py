"""A conversation in the terminal, or one turn a line from a pipe; where the answers come from is a subclass's."""

import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from quire.cli.terminal import dim
from quire.core.errors import EngineDead, QuireError

with suppress(ImportError):  # not every Python has it
    import readline  # noqa: F401 - input() gets line editing and history from it

PROMPT = "> "
COMMANDS = """\
/reset          start a new conversation
/system TEXT    set the system message and start a new conversation
/help           this list
/exit           leave (so does ctrl-D); ctrl-C stops an answer"""


@dataclass(slots=True)
class History:
    """A system message, if any, and turns of user and assistant."""

    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def reset(self) -> None:
        self.messages.clear()

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Drops the last message, which could not be answered."""
        self.messages.pop()

    def all(self) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def drop_oldest_turn(self) -> int:
        """Drops messages up to the next user message, with which templates expect a conversation to begin."""
        end = next(
            (i for i, m in enumerate(self.messages) if i > 0 and m["role"] == "user"), len(self.messages) - 1
        )
        del self.messages[:end]
        return end


class ChatLoop(ABC):
    """Reads turns, writes answers. A turn that fails prints one error line; the conversation goes on."""

    def __init__(self, history: History, *, quiet: bool = False) -> None:
        self._history = history
        self._at_terminal = sys.stdin.isatty()
        self._show_stats = not quiet and sys.stdout.isatty()
        self._num_failed = 0

    @abstractmethod
    def _answer(self) -> str:
        """Streams one answer to stdout; ctrl-C ends it and keeps the text so far."""

    def run(self) -> int:
        """Until the end of input. From a pipe, a turn that failed makes the exit code 2."""
        if self._at_terminal:
            print(
                dim("Ask something. /help lists commands, ctrl-C stops an answer, ctrl-D leaves.", sys.stdout)
            )
        while (line := self._read()) is not None:
            if line.strip() in ("/exit", "/quit", "/bye"):
                break
            if line.startswith("/") and self._at_terminal:
                self._command(line.strip())
            elif line.strip():
                self._turn(line)
        return 2 if self._num_failed and not self._at_terminal else 0

    def _read(self) -> str | None:
        if not self._at_terminal:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        while True:
            try:
                return input(PROMPT)
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print(dim("\n(ctrl-D or /exit leaves)", sys.stdout))

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self._history.reset()
            self._notice("a new conversation")
        elif word == "/system":
            self._history.reset()
            self._history.system = rest.strip() or None
            self._notice(f"system message {'set' if rest.strip() else 'removed'}, a new conversation")
        elif word == "/help":
            self._notice(COMMANDS)
        else:
            self._notice(f"{word} is no command\n{COMMANDS}")

    def _turn(self, line: str) -> None:
        self._history.say("user", line)
        try:
            answer = self._answer()
        except EngineDead:
            raise
        except QuireError as error:
            self._history.take_back()
            self._num_failed += 1
            print(f"quire: error: {error}", file=sys.stderr)
        else:
            self._history.say("assistant", answer)

    def _notice(self, text: str) -> None:
        print(dim(text, sys.stderr), file=sys.stderr)


def stats_line(
    num_tokens: int, num_prompt: int, num_cached: int, first: float | None, seconds: float, reason: str | None
) -> str:
    """`37 tokens, 54.2 tok/s, first after 0.12 s (812 of 830 prompt tokens cached)`."""
    parts = [f"{num_tokens} tokens"]
    if first is not None and num_tokens > 1 and seconds > first:
        parts.append(f"{(num_tokens - 1) / (seconds - first):.1f} tok/s")
    if first is not None:
        parts.append(f"first after {first:.2f} s")
    if reason in ("length", "abort"):
        parts.append("cut at the limit" if reason == "length" else "stopped")
    return f"{', '.join(parts)} ({num_cached} of {num_prompt} prompt tokens cached)"

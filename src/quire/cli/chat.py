"""`quire chat`: a conversation in the terminal, or one turn a line from a pipe."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from quire.cli.flags import add_engine_flags, add_sampling_flags, sampling_from
from quire.cli.parser import Parser
from quire.cli.start import dim, interruptible, start_llm
from quire.core.errors import EngineDead, InvalidRequest, QuireError
from quire.core.sampling import SamplingParams
from quire.llm.llm import LLM, Message
from quire.llm.outputs import RequestOutput
from quire.text.prompts import PreparedPrompt, prepare

with suppress(ImportError):  # not every Python has it
    import readline  # noqa: F401 - input() gets line editing and history from it

MAX_TOKENS = 1024
ANSWER_SHARE = 4  # 1/4 of the context is kept for the answer, unless max_tokens is less
# For models that recommend nothing: at temperature 1 small models lose the thread.
CALM = {"temperature": 0.6, "top_p": 0.95}
PROMPT = "> "
COMMANDS = """\
/reset          start a new conversation
/system TEXT    set the system message and start a new conversation
/help           this list
/exit           leave (so does ctrl-D); ctrl-C stops an answer"""
_NOT_FOR_CHAT = ("n", "best_of", "logprobs", "prompt_logprobs")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--quiet", action="store_true", help="answers only: no start report, no stats")
    add_engine_flags(parser, without=("seed",))
    add_sampling_flags(parser, without=_NOT_FOR_CHAT)


def run(arguments: argparse.Namespace) -> int:
    sampling_from(arguments, SamplingParams(max_tokens=MAX_TOKENS))  # before loading anything
    if sys.stdin.isatty():  # ctrl-C belongs to the conversation, also if the parent process ignored it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with start_llm(arguments, quiet=arguments.quiet) as llm:
        sampling = sampling_from(arguments, chat_sampling(llm.default_sampling()))
        _ = llm.template  # a model without one is refused now, not after the first message
        return Chat(llm, sampling, arguments.system, quiet=arguments.quiet).run()


def chat_sampling(recommended: SamplingParams) -> SamplingParams:
    """The model's recommended sampling with chat's `max_tokens`; CALM if it recommends none."""
    has_none = SamplingParams(max_tokens=recommended.max_tokens) == recommended
    return recommended.changed(max_tokens=MAX_TOKENS, **(CALM if has_none else {}))


class Chat:
    """Reads turns, writes answers. A turn that fails prints one error line; the conversation goes on."""

    def __init__(
        self, llm: LLM, sampling: SamplingParams, system: str | None, *, quiet: bool = False
    ) -> None:
        self._llm = llm
        self._sampling = sampling
        self._conversation = ChatHistory(system)
        self._at_terminal = sys.stdin.isatty()
        self._show_stats = not quiet and sys.stdout.isatty()
        self._num_failed = 0

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
            self._conversation.reset()
            self._notice("a new conversation")
        elif word == "/system":
            self._conversation.reset()
            self._conversation.system = rest.strip() or None
            self._notice(f"system message {'set' if rest.strip() else 'removed'}, a new conversation")
        elif word == "/help":
            self._notice(COMMANDS)
        else:
            self._notice(f"{word} is no command\n{COMMANDS}")

    def _turn(self, line: str) -> None:
        self._conversation.say("user", line)
        try:
            answer = self._answer()
        except EngineDead:
            raise
        except QuireError as error:
            self._conversation.take_back()
            self._num_failed += 1
            print(f"quire: error: {error}", file=sys.stderr)
        else:
            self._conversation.say("assistant", answer)

    def _answer(self) -> str:
        """Streams one answer; ctrl-C ends it and keeps the text so far."""
        prompt, num_dropped = self._conversation.prompt(self._llm, self._sampling.max_tokens)
        if num_dropped:
            self._notice(f"the context is full: the oldest {num_dropped} messages are forgotten")
        started = time.perf_counter()
        output: RequestOutput | None = None
        with interruptible() as interrupted:
            for piece in self._llm.stream(prompt, self._sampling, interrupted):
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                output = piece.output
        print()
        assert output is not None, "a stream ends with its output"
        if self._show_stats:
            print(dim(_stats_line(output, time.perf_counter() - started), sys.stdout))
        return output.outputs[0].text

    def _notice(self, text: str) -> None:
        print(dim(text, sys.stderr), file=sys.stderr)


def _stats_line(output: RequestOutput, seconds: float) -> str:
    """`37 tokens, 54.2 tok/s, first after 0.12 s (812 of 830 prompt tokens cached)`."""
    answer, first = output.outputs[0], output.metrics.first_token
    num_tokens, num_prompt = len(answer.token_ids), len(output.prompt_token_ids)
    parts = [f"{num_tokens} tokens"]
    if first is not None and num_tokens > 1 and seconds > first:
        parts.append(f"{(num_tokens - 1) / (seconds - first):.1f} tok/s")
    if first is not None:
        parts.append(f"first after {first:.2f} s")
    if answer.finish_reason in ("length", "abort"):
        parts.append("cut at the limit" if answer.finish_reason == "length" else "stopped")
    return f"{', '.join(parts)} ({output.num_cached_tokens} of {num_prompt} prompt tokens cached)"


@dataclass(slots=True)
class ChatHistory:
    """A system message, if any, and turns of user and assistant, truncated to what the context holds."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        self.messages.clear()

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Drops the last message, which could not be answered."""
        self.messages.pop()

    def prompt(self, llm: LLM, max_tokens: int | None) -> tuple[PreparedPrompt, int]:
        """The prompt for the next answer, and the number of oldest messages dropped to make it fit."""
        limit = _context(llm)
        share = limit // ANSWER_SHARE
        room = limit - (share if max_tokens is None else min(share, max_tokens))
        num_dropped = 0
        prepared = self._prepared(llm)
        while len(prepared.token_ids) > room and len(self.messages) > 1:
            num_dropped += self._drop_oldest_turn()
            prepared = self._prepared(llm)
        if len(prepared.token_ids) >= limit:
            raise InvalidRequest(
                f"this message has {len(prepared.token_ids)} tokens with its template and the context is {limit}: "
                "shorten it or raise --max-model-len"
            )
        return prepared, num_dropped

    def _prepared(self, llm: LLM) -> PreparedPrompt:
        return prepare(
            llm.template.render(self._all()), llm.tokenizer, add_special_tokens=False, goes_on=False
        )

    def _all(self) -> Sequence[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def _drop_oldest_turn(self) -> int:
        """Drops messages up to the next user message, with which templates expect a conversation to begin."""
        end = next(
            (i for i, m in enumerate(self.messages) if i > 0 and m["role"] == "user"), len(self.messages) - 1
        )
        del self.messages[:end]
        return end


def _context(llm: LLM) -> int:
    """Tokens that one sequence can have: the model's context, or the whole pool where that is smaller."""
    memory = llm.engine.memory
    return min(llm.engine.limits.max_model_len, memory.num_blocks // memory.num_groups * memory.block_size)

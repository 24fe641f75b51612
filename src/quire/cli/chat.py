"""`quire chat`: a conversation in the terminal, or one turn a line from a pipe."""

import argparse
import signal
import sys
import time

from quire.cli.conversation import ChatLoop, History, stats_line
from quire.cli.flags import add_engine_flags, add_sampling_flags, sampling_from
from quire.cli.parser import Parser
from quire.cli.start import start_llm
from quire.cli.terminal import dim, interruptible
from quire.core.errors import InvalidRequest
from quire.core.sampling import SamplingParams
from quire.llm.llm import LLM
from quire.llm.outputs import RequestOutput
from quire.text.prompts import PreparedPrompt, prepare

MAX_TOKENS = 1024
ANSWER_SHARE = 4  # 1/4 of the context is kept for the answer, unless max_tokens is less
# For models that recommend nothing: at temperature 1 small models lose the thread.
CALM = {"temperature": 0.6, "top_p": 0.95}
NOT_FOR_CHAT = ("n", "best_of", "logprobs", "prompt_logprobs")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--quiet", action="store_true", help="answers only: no start report, no stats")
    add_engine_flags(parser, without=("seed",))
    add_sampling_flags(parser, without=NOT_FOR_CHAT)


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


class ChatHistory(History):
    """Truncated to what the context of a loaded model holds."""

    def prompt(self, llm: LLM, max_tokens: int | None) -> tuple[PreparedPrompt, int]:
        """The prompt for the next answer, and the number of oldest messages dropped to make it fit."""
        limit = _context(llm)
        share = limit // ANSWER_SHARE
        room = limit - (share if max_tokens is None else min(share, max_tokens))
        num_dropped = 0
        prepared = self._prepared(llm)
        while len(prepared.token_ids) > room and len(self.messages) > 1:
            num_dropped += self.drop_oldest_turn()
            prepared = self._prepared(llm)
        if len(prepared.token_ids) >= limit:
            raise InvalidRequest(
                f"this message has {len(prepared.token_ids)} tokens with its template and the context is {limit}: "
                "shorten it or raise --max-model-len"
            )
        return prepared, num_dropped

    def _prepared(self, llm: LLM) -> PreparedPrompt:
        return prepare(
            llm.template.render(self.all()), llm.tokenizer, add_special_tokens=False, goes_on=False
        )


class Chat(ChatLoop):
    """A conversation with a model in this process."""

    def __init__(
        self, llm: LLM, sampling: SamplingParams, system: str | None, *, quiet: bool = False
    ) -> None:
        self._chat = ChatHistory(system)
        super().__init__(self._chat, quiet=quiet)
        self._llm = llm
        self._sampling = sampling

    def _answer(self) -> str:
        prompt, num_dropped = self._chat.prompt(self._llm, self._sampling.max_tokens)
        if num_dropped:
            self._notice(f"the context is full: the oldest {num_dropped} messages are forgotten")
        started = time.perf_counter()
        output: RequestOutput | None = None
        with interruptible() as interrupted:
            for piece in self._llm.stream(prompt, self._sampling, interrupted):
                print(piece.text, end="", flush=True)
                output = piece.output
        print()
        assert output is not None, "a stream ends with its output"
        if self._show_stats:
            seconds, num_prompt = time.perf_counter() - started, len(output.prompt_token_ids)
            answer, cached, first = output.outputs[0], output.num_cached_tokens, output.metrics.first_token
            line = stats_line(len(answer.token_ids), num_prompt, cached, first, seconds, answer.finish_reason)
            print(dim(line, sys.stdout))
        return output.outputs[0].text


def _context(llm: LLM) -> int:
    """Tokens that one sequence can have: the model's context, or the whole pool where that is smaller."""
    memory = llm.engine.memory
    return min(llm.engine.limits.max_model_len, memory.num_blocks // memory.num_groups * memory.block_size)

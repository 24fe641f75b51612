"""`quire run MODEL ["prompt"]`: fetches the model, starts or reuses a background server, talks to it."""

import argparse
import http.client
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from quire.cli import background
from quire.cli.background import BackgroundServer
from quire.cli.conversation import ChatLoop, History, stats_line
from quire.cli.flags import add_engine_flags, add_sampling_flags, engine_settings, given_sampling
from quire.cli.parser import Parser
from quire.cli.terminal import INTERRUPTED, dim, interruptible
from quire.core.errors import ConfigError, EngineDead, QuireError
from quire.fleet.model_set import flag_words, keep_alive_seconds

KEEP_ALIVE = "5m"
NOT_FOR_CHAT = ("n", "best_of", "logprobs", "prompt_logprobs", "length_penalty")
CONTEXT_FULL = "context_length_exceeded"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    idle = f"idle time after which the server that is started stops, such as 1h (default: {KEEP_ALIVE}; -1: never)"
    parser.add_argument("--keep-alive", metavar="TIME", default=KEEP_ALIVE, help=idle)
    parser.add_argument("--quiet", action="store_true", help="answers only: no notices, no stats")
    add_engine_flags(parser, without=("seed", "served_model_name"))
    add_sampling_flags(parser, without=NOT_FOR_CHAT)
    text = "a question: its answer is printed, standard input is its context if it is a pipe (default: a conversation)"
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help=text)
    parser.intermixed = True


def run(arguments: argparse.Namespace) -> int:
    settings = engine_settings(arguments)
    name = background.server_name(settings.pop("model", None))
    flags = [word for key, value in settings.items() for word in _words(key, value)]
    question = " ".join(arguments.prompt).strip()
    if arguments.prompt and not question:
        raise ConfigError("the prompt is empty: write a question, or leave it out for a conversation")
    if not keep_alive_seconds(arguments.keep_alive):
        raise ConfigError(f"--keep-alive is {arguments.keep_alive!r}: write seconds, 5m or -1")

    def server() -> BackgroundServer:
        if known := background.reusable(name, flags):
            return known
        with background.start_lock():
            return background.reusable(name, flags) or _started(
                name, flags, arguments.keep_alive, arguments.quiet
            )

    server()  # refusals come before the first question
    chat = HttpChat(server, given_sampling(arguments), arguments.system, quiet=arguments.quiet)
    if question:
        return chat.ask(question, "" if sys.stdin.isatty() else sys.stdin.read())
    if sys.stdin.isatty():  # ctrl-C belongs to the conversation
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return chat.run()


def _words(key: str, value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [f"--{key.replace('_', '-')}", *map(str, value)]
    return flag_words(key, value)


def _started(name: str, flags: list[str], keep_alive: str, quiet: bool) -> BackgroundServer:
    # here, where its progress is seen; imports torch, which a server that is reused does not need
    importlib.import_module("quire.cli.pull").fetch(name)
    began = time.monotonic()
    if not quiet:
        print(dim(f"starting a server of {name} …", sys.stderr), file=sys.stderr, flush=True)
    server = background.start(name, flags, keep_alive)
    if not quiet:
        seconds = f"{time.monotonic() - began:.1f} s"
        until = "until `quire stop`" if keep_alive.startswith("-") else f"until it is idle for {keep_alive}"
        line = f"{server.url} after {seconds}; it keeps running {until}: `quire ps` lists it"
        print(dim(line, sys.stderr), file=sys.stderr)
    return server


class HttpChat(ChatLoop):
    """A conversation with a server, which `server` starts again if it stopped while the user thought.

    When the context is full, the oldest turns are dropped.
    """

    def __init__(
        self,
        server: Callable[[], BackgroundServer],
        sampling: dict[str, Any],
        system: str | None,
        *,
        quiet: bool = False,
    ) -> None:
        super().__init__(History(system), quiet=quiet)
        self._server = server
        self._sampling = sampling
        self._stopped = False  # by ctrl-C, the last answer

    def ask(self, question: str, context: str) -> int:
        """Prints one answer."""
        self._history.say("user", f"{context.rstrip()}\n\n{question}" if context.strip() else question)
        self._answer()
        return INTERRUPTED if self._stopped else 0

    def _answer(self) -> str:
        num_dropped = 0
        while True:
            try:
                text = self._streamed()
            except ServerRefusal as error:
                if error.code != CONTEXT_FULL or len(self._history.messages) < 2:
                    raise
                num_dropped += self._history.drop_oldest_turn()
            else:
                break
        if num_dropped:
            self._notice(f"the context is full: the oldest {num_dropped} messages are forgotten")
        return text

    def _streamed(self) -> str:
        began, first, reason = time.perf_counter(), None, None
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        with interruptible() as interrupted:
            for event in self._events(interrupted):
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    delta, reason = choice["delta"], choice.get("finish_reason") or reason
                    if thought := delta.get("reasoning_content"):
                        print(dim(thought, sys.stderr), end="", file=sys.stderr, flush=True)
                    if text := delta.get("content"):
                        first = first or time.perf_counter() - began
                        pieces.append(text)
                        print(text, end="", flush=True)
            self._stopped = interrupted()
        print()
        if self._show_stats and usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            seconds = time.perf_counter() - began
            counts = usage["completion_tokens"], usage["prompt_tokens"], cached
            print(dim(stats_line(*counts, first, seconds, reason), sys.stdout))
        return "".join(pieces)

    def _events(self, interrupted: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """The objects of the stream, until its end or ctrl-C; closing the connection stops the answer in the server."""
        body = {"messages": self._history.all(), "stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json"}
        if keys := [key.strip() for key in os.environ.get("QUIRE_API_KEY", "").split(",") if key.strip()]:
            headers["Authorization"] = f"Bearer {keys[0]}"
        server = self._server()
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps({**body, **self._sampling}), headers
            )
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise ServerRefusal(response.status, response.read())
            for line in response:
                content = line.removeprefix(b"data:").strip()
                if content == b"[DONE]" or interrupted():
                    return
                if line.startswith(b"data:"):
                    event = json.loads(content)
                    if "error" in event:
                        raise EngineDead(f"the answer ended early: {event['error'].get('message')}")
                    yield event
        except (OSError, http.client.HTTPException) as error:
            raise EngineDead(
                f"the server at {server.url} is gone ({error or type(error).__name__}): its log is {server.log}"
            ) from error
        finally:
            connection.close()


class ServerRefusal(QuireError):
    """The server's message about a request that it did not accept, and its code, if it has one."""

    def __init__(self, status: int, body: bytes) -> None:
        try:
            error = json.loads(body)["error"]
            message, self.code = str(error["message"]), error.get("code")
        except (ValueError, KeyError, TypeError):
            message, self.code = (
                f"the server answered {status}: {body[:200].decode('utf-8', 'replace')}",
                None,
            )
        super().__init__(message)

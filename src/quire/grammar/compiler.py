"""Compiler: an LRU cache of grammars, compiled in worker threads within limits of time and memory."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from quire.core.errors import QueueFull
from quire.core.structured import StructuredOutput
from quire.grammar.closing import Closer
from quire.grammar.matcher import GrammarError, Matcher, compile_matcher, make_tokenizer
from quire.grammar.sandbox import GrammarSandbox
from quire.grammar.vocabulary import Vocabulary

MAX_CACHED = 64  # grammars, refused ones included
MAX_PENDING = 128  # grammars that wait to be compiled
NUM_WORKERS = 2  # one slow grammar does not keep the others waiting
COMPILE_SECONDS = 5  # of CPU time, for one grammar


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar; `matcher` makes a matcher at the beginning of a text."""

    inner: Any
    vocabulary: Vocabulary
    closer: Closer | None = None  # of JSON

    def matcher(self) -> Matcher:
        return Matcher(self.inner.deep_copy(), self.vocabulary)


class Compiler:
    """`submit` is called from one thread. Worker threads compile, and make the vocabulary once."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        max_cached: int = MAX_CACHED,
        seconds: int = COMPILE_SECONDS,
    ) -> None:
        self._make_vocabulary = make_vocabulary
        self._max_cached = max_cached
        self._seconds = seconds
        self._grammars: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        self._workers: ThreadPoolExecutor | None = None
        self._prepared: tuple[Vocabulary, Any, Closer] | None = None  # with llguidance's tokenizer
        self._preparing = threading.Lock()
        self._local = threading.local()  # each worker thread has a sandbox of its own
        self._sandboxes: list[GrammarSandbox] = []
        self._closed = False

    def submit(self, structured: StructuredOutput) -> "Future[Grammar]":
        """The grammar, done at once if it is cached. The future fails with GrammarError or GrammarFault."""
        cached = self._grammars.get(structured)
        if cached is not None:
            self._grammars.move_to_end(structured)
            if not (cached.done() and _may_succeed_later(cached)):
                return cached
        num_pending = sum(1 for future in self._grammars.values() if not future.done())
        if num_pending >= MAX_PENDING:
            raise QueueFull(f"{num_pending} grammars are being compiled already: try again later")
        if self._workers is None:
            self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="quire-grammar")
        future = self._grammars[structured] = self._workers.submit(self._compile, structured)
        self._evict()
        return future

    def close(self) -> None:
        """Kills the sandboxes; grammars being compiled fail. Calling it twice is fine."""
        self._closed = True
        for sandbox in self._sandboxes:
            sandbox.kill()
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()

    def _evict(self) -> None:
        """Drops the least recently used grammars; sequences that use one keep it."""
        for structured in list(self._grammars):
            if len(self._grammars) <= self._max_cached:
                return
            if self._grammars[structured].done():
                del self._grammars[structured]

    # ------------------------------------------------------------------ in a worker

    def _compile(self, structured: StructuredOutput) -> Grammar:
        vocabulary, tokenizer, closer = self._prepare()
        self._sandbox(vocabulary).check(structured)
        is_json = structured.kind in ("json_schema", "json_object")
        return Grammar(compile_matcher(tokenizer, structured), vocabulary, closer if is_json else None)

    def _prepare(self) -> tuple[Vocabulary, Any, Closer]:
        with self._preparing:
            if self._prepared is None:
                vocabulary = self._make_vocabulary()
                self._prepared = (vocabulary, make_tokenizer(vocabulary), Closer(vocabulary))
            return self._prepared

    def _sandbox(self, vocabulary: Vocabulary) -> GrammarSandbox:
        sandbox: GrammarSandbox | None = getattr(self._local, "sandbox", None)
        if sandbox is None:
            sandbox = self._local.sandbox = GrammarSandbox(vocabulary, self._seconds)
            self._sandboxes.append(sandbox)
        return sandbox


def _may_succeed_later(future: "Future[Grammar]") -> bool:
    return future.cancelled() or (
        future.exception() is not None and not isinstance(future.exception(), GrammarError)
    )

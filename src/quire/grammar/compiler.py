"""Compiler: grammars by what was asked, compiled once, off the caller's thread, within bounds."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from quire.core.errors import QueueFull
from quire.core.structured import StructuredOutput
from quire.grammar.errors import GrammarError
from quire.grammar.llguidance_backend import compile_matcher, make_tokenizer
from quire.grammar.matcher import Matcher
from quire.grammar.sandbox import GrammarSandbox
from quire.grammar.vocabulary import Vocabulary

MAX_CACHED = 64  # grammars, refused ones included
MAX_PENDING = 128  # grammars that wait to be compiled
NUM_WORKERS = 2  # one slow grammar does not keep the others waiting
TRIAL_SECONDS = 5  # of the processor's time, for one grammar


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar: makes matchers that stand at the beginning of a text."""

    inner: Any
    vocabulary: Vocabulary

    def matcher(self) -> Matcher:
        return Matcher(self.inner.deep_copy(), self.vocabulary)


class Compiler:
    """`submit` from one thread. Everything costly happens in worker threads, making the vocabulary included."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        max_cached: int = MAX_CACHED,
        seconds: int = TRIAL_SECONDS,
    ) -> None:
        self._make_vocabulary = make_vocabulary
        self._max_cached = max_cached
        self._seconds = seconds
        self._grammars: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        self._workers: ThreadPoolExecutor | None = None
        self._prepared: tuple[Vocabulary, Any] | None = None  # and the library's view of it
        self._preparing = threading.Lock()
        self._local = threading.local()  # each worker has a trial process of its own
        self._trials: list[GrammarSandbox] = []
        self._closed = False

    def submit(self, structured: StructuredOutput) -> "Future[Grammar]":
        """The grammar, at once where it is known. The future fails with GrammarError or GrammarFault."""
        found = self._grammars.get(structured)
        if found is not None:
            self._grammars.move_to_end(structured)
            if not (found.done() and _may_succeed_later(found)):
                return found
        num_pending = sum(1 for future in self._grammars.values() if not future.done())
        if num_pending >= MAX_PENDING:
            raise QueueFull(f"{num_pending} grammars are being compiled already: try again later")
        if self._workers is None:
            self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="quire-grammar")
        future = self._grammars[structured] = self._workers.submit(self._compile, structured)
        self._make_room()
        return future

    def close(self) -> None:
        """Ends the processes; what is being compiled fails. Calling it twice is fine."""
        self._closed = True
        for trial in self._trials:
            trial.kill()
        if self._workers is not None:
            self._workers.shutdown(wait=True, cancel_futures=True)
        for trial in self._trials:
            trial.close()

    def _make_room(self) -> None:
        """Forgets those used least recently; whoever has a grammar keeps it."""
        for structured in list(self._grammars):
            if len(self._grammars) <= self._max_cached:
                return
            if self._grammars[structured].done():
                del self._grammars[structured]

    # ------------------------------------------------------------------ in a worker

    def _compile(self, structured: StructuredOutput) -> Grammar:
        vocabulary, tokenizer = self._prepare()
        self._trial(vocabulary).check(structured)
        return Grammar(compile_matcher(tokenizer, structured), vocabulary)

    def _prepare(self) -> tuple[Vocabulary, Any]:
        with self._preparing:
            if self._prepared is None:
                vocabulary = self._make_vocabulary()
                self._prepared = (vocabulary, make_tokenizer(vocabulary))
            return self._prepared

    def _trial(self, vocabulary: Vocabulary) -> GrammarSandbox:
        trial: GrammarSandbox | None = getattr(self._local, "trial", None)
        if trial is None:
            trial = self._local.trial = GrammarSandbox(vocabulary, self._seconds)
            self._trials.append(trial)
        return trial


def _may_succeed_later(future: "Future[Grammar]") -> bool:
    return future.cancelled() or (
        future.exception() is not None and not isinstance(future.exception(), GrammarError)
    )

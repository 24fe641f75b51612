"""AsyncLLM: many callers in one asyncio program, one engine thread behind them."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import EngineDead
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate
from quire.engine.build import build
from quire.llm.engine_thread import EngineThread
from quire.llm.outputs import RequestOutput, request_output
from quire.llm.progress import load_progress
from quire.text.answer import Answer
from quire.text.load import choose_tokenizer
from quire.text.prompts import Prompt, prepare, ready_to_sample
from quire.text.tokenizer import Tokenizer

_ABORTED = SequenceUpdate("", 0, (), finish_reason="abort")


class AsyncLLM:
    """Use it from one event loop. A caller that stops iterating has its request aborted."""

    def __init__(self, model: str | None = None, *, use_tqdm: bool = False, **settings: Any) -> None:
        self.config = EngineConfig.of(model=model, **settings)
        with load_progress(use_tqdm) as progress:
            self.config.adapters.check_folders()
            self._built = build(self.config, progress)
        self.tokenizer: Tokenizer | None = choose_tokenizer(self.config.model, self._built.source)
        self._ids = itertools.count()
        self._queues: dict[str, asyncio.Queue[SequenceUpdate | BaseException]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(self._built.engine, self._from_engine, self._engine_died)
        self._closed = False

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the answer so far, each time it grows; the last one has `finished`."""
        self._event_loop = asyncio.get_running_loop()
        prepared = prepare(prompt, self.tokenizer)
        sampling = ready_to_sample(sampling or self._built.default_sampling, self.tokenizer)
        request_id = request_id or f"async-{next(self._ids)}"
        answer = Answer(request_id, sampling, self.tokenizer)
        updates: asyncio.Queue[SequenceUpdate | BaseException] = asyncio.Queue()
        accepted = self._thread.add(
            request_id, prepared.token_ids, sampling, **prepared.options, adapter=adapter
        )
        self._queues[request_id] = updates
        try:
            await asyncio.wrap_future(accepted)
            while not answer.finished:
                self._take(answer, await updates.get())
                while not updates.empty():
                    self._take(answer, updates.get_nowait())
                yield request_output(answer, prepared.text, prepared.token_ids, self.tokenizer)
        finally:
            del self._queues[request_id]
            if not answer.finished:
                self._thread.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Ends a request; its iterator ends with finish_reason "abort"."""
        self._thread.abort(request_id)
        if request_id in self._queues:
            self._queues[request_id].put_nowait(_ABORTED)

    def close(self) -> None:
        """Ends the engine; open iterators fail with EngineDead. Calling it twice is fine."""
        if not self._closed:
            self._closed = True
            self._thread.close()
            self._tell_all(EngineDead("the engine was closed"))

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def _take(self, answer: Answer, update: SequenceUpdate | BaseException) -> None:
        if update is _ABORTED:
            answer.end("abort")
            return
        if isinstance(update, BaseException):
            raise EngineDead(f"the engine stopped: {update}") from update
        if answer.take(update):
            self._thread.stop(update.request_id, update.index)
        if answer.fault is not None:
            raise answer.fault

    # called from the engine's thread

    def _from_engine(self, updates: list[SequenceUpdate]) -> None:
        self._post(self._deliver, updates)

    def _engine_died(self, fault: BaseException) -> None:
        self._post(self._tell_all, fault)

    def _post(self, callback: Callable[[Any], None], argument: Any) -> None:
        """Nobody may be left to hear it: a caller's event loop can end while its request is being aborted."""
        if self._event_loop is not None:
            with contextlib.suppress(RuntimeError):
                self._event_loop.call_soon_threadsafe(callback, argument)

    # called in the event loop

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            waiting = self._queues.get(update.request_id)
            if waiting is not None:
                waiting.put_nowait(update)

    def _tell_all(self, fault: BaseException) -> None:
        for waiting in self._queues.values():
            waiting.put_nowait(fault)

"""AsyncLLM: many callers in one asyncio program, one engine thread behind them."""

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import EngineDead, InvalidRequest, QuireError
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate
from quire.engine.build import build
from quire.engine.engine import Engine
from quire.engine.loop import Command, EngineLoop, StepReport
from quire.engine.streams import OpenStreams
from quire.llm.outputs import RequestOutput, request_output
from quire.llm.progress import load_progress
from quire.text.answer import Answer
from quire.text.load import choose_tokenizer
from quire.text.prompts import PreparedPrompt, Prompt, prepare, ready_to_sample
from quire.text.tokenizer import LONG, Tokenizer


class AsyncLLM:
    """Use it from one event loop. A caller that stops iterating has its request aborted."""

    def __init__(self, model: str | None = None, *, use_tqdm: bool = False, **settings: Any) -> None:
        self.config = EngineConfig.of(model=model, **{"itl_goal": "auto", **settings})
        with load_progress(use_tqdm) as progress:
            self.config.adapters.check_folders()
            self._built = build(self.config, progress)
        self.tokenizer: Tokenizer | None = choose_tokenizer(self.config.model, self._built.source)
        self._ids = itertools.count()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread(self._built.engine, self._post)
        self._streams = self._thread.streams

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the answer so far, each time it grows; the last one has `finished`."""
        self._event_loop = asyncio.get_running_loop()
        limits, given = self._built.engine.limits, sampling or self._built.default_sampling

        def make() -> tuple[PreparedPrompt, SamplingParams]:
            goes_on = limits.encoder is None
            prepared = prepare(prompt, self.tokenizer, goes_on=goes_on, max_model_len=limits.max_model_len)
            return prepared, ready_to_sample(given, self.tokenizer)

        is_long = getattr(given, "bad_words", ()) or (isinstance(prompt, (str, list)) and len(prompt) > LONG)
        prepared, ready = await asyncio.to_thread(make) if is_long else make()
        request_id = request_id or f"async-{next(self._ids)}"
        request = prepared.request(request_id, ready, adapter)
        limits.check(request)  # before anything is made for each of its sequences
        answer = Answer(request_id, ready, self.tokenizer, context_id=prepared.context_id(self.tokenizer))
        if self._streams.get(request_id) is not None:
            raise InvalidRequest(
                f"request id {request_id!r} is already being served: use another", "request_id"
            )
        self._thread.add(request)
        stream = self._streams.open([request_id])
        try:
            while not answer.finished:
                try:
                    self._take(answer, await stream.updates())
                except _Aborted:
                    answer.end("abort")
                yield request_output(answer, prepared, self.tokenizer)
            stream.done(request_id)
        finally:
            stream.close()

    def abort(self, request_id: str) -> None:
        """Ends a request; its iterator ends with finish_reason "abort"."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(_Aborted())

    def close(self) -> None:
        """Ends the engine; open iterators fail with EngineDead. Calling it twice is fine."""
        self._thread.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def _take(self, answer: Answer, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            if answer.take(update):
                self._thread.stop(update.request_id, update.index)
            if answer.fault is not None:
                raise answer.fault

    def _post(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Calls `callback` in the event loop, which may have ended while a request is being aborted. Thread-safe."""
        if self._event_loop is not None:
            with contextlib.suppress(RuntimeError):
                self._event_loop.call_soon_threadsafe(callback, *arguments)


class _Aborted(QuireError):
    """The caller aborted the request by its id."""


class EngineThread:
    """The engine's loop in a thread, as the loop's Transport. Commands return at once."""

    def __init__(self, engine: Engine, post: Callable[..., None]) -> None:
        """`post` calls a function with its arguments in the event loop that uses the streams."""
        self.streams: OpenStreams[SequenceUpdate] = OpenStreams(self.abort)
        self._engine = engine
        self._post = post
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        """Raises EngineDead if the engine has stopped; refusals come through the stream."""
        if self._fault is not None:
            raise EngineDead(f"the engine stopped: {self._fault}")
        self._commands.put(lambda loop: loop.add(request))

    def abort(self, request_ids: list[str]) -> None:
        self._commands.put(lambda loop: loop.abort(request_ids))

    def stop(self, request_id: str, index: int) -> None:
        self._commands.put(lambda loop: loop.stop(request_id, index))

    def close(self) -> None:
        """Ends the loop and the engine; open streams fail. Calling it twice is fine."""
        self._commands.put(EngineLoop.end)
        self._thread.join()
        self._fault = self._fault or EngineDead("it was closed")
        self._post(self.streams.fail_all, EngineDead("the engine was closed"))

    # ------------------------------------------------------------------ engine.loop.Transport

    def receive(self, seconds: float) -> Command | None:
        try:
            return self._commands.get(block=bool(seconds), timeout=seconds or None)
        except queue.Empty:
            return None

    def publish(self, report: StepReport) -> None:
        if report.updates:
            self._post(self.streams.deliver, report.updates)

    def refuse(self, request_id: str, fault: Exception) -> None:
        self._post(self.streams.refuse, request_id, fault)

    def _run(self) -> None:
        try:
            if self._engine.in_new_thread is not None:
                self._engine.in_new_thread()
            EngineLoop(self._engine, self).run()
        except BaseException as fault:  # no caller sees an exception of this thread
            self._fault = fault
            dead = EngineDead(f"the engine stopped: {fault}")
            dead.__cause__ = fault
            self._post(self.streams.fail_all, dead)
        finally:
            self._engine.close()

"""EngineThread: the engine's loop in a thread of its own, told what to do through a queue."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from quire.core.errors import EngineDead
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate
from quire.engine.engine import Engine

OnUpdates = Callable[[list[SequenceUpdate]], None]
OnDeath = Callable[[BaseException], None]


class EngineThread:
    """Every call returns at once; `on_updates` and `on_death` are called from the engine's thread."""

    def __init__(self, engine: Engine, on_updates: OnUpdates, on_death: OnDeath) -> None:
        self._engine = engine
        self._on_updates = on_updates
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="quire-engine", daemon=True)
        self._thread.start()

    def add(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingParams, **options: Any
    ) -> "Future[None]":
        """Resolves when the request is queued, or fails with why it was refused."""
        accepted: Future[None] = Future()
        if self._dead is not None:
            raise EngineDead(f"the engine stopped: {self._dead}")

        def run() -> None:
            try:
                self._engine.add(request_id, prompt_token_ids, sampling, **options)
            except Exception as refusal:
                accepted.set_exception(refusal)
            else:
                accepted.set_result(None)

        self._inbox.put(run)
        return accepted

    def abort(self, request_id: str) -> None:
        self._inbox.put(partial(self._engine.abort, request_id))

    def stop(self, request_id: str, index: int) -> None:
        self._inbox.put(partial(self._engine.stop, request_id, index))

    def close(self) -> None:
        """Ends the loop and the engine; whatever still runs is dropped."""
        self._inbox.put(None)
        self._thread.join()

    def _loop(self) -> None:
        try:
            if self._engine.in_new_thread is not None:
                self._engine.in_new_thread()
            while self._serve_inbox():
                updates = self._engine.step()
                if updates:
                    self._on_updates(updates)
        except BaseException as fault:  # nobody else can see a fault in this thread
            self._dead = fault
            self._on_death(fault)
        finally:
            self._engine.close()

    def _serve_inbox(self) -> bool:
        """Runs what was asked for; waits while there is nothing to do. False: the end."""
        while True:
            idle = not self._engine.has_work
            try:
                command = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

"""EngineThread: the engine's loop in a thread of its own. Commands come through a queue."""

import queue
import threading
from collections.abc import Callable

from quire.core.errors import EngineDead
from quire.core.request import Request
from quire.core.step import SequenceUpdate
from quire.engine.engine import Engine
from quire.engine.loop import Command, EngineLoop, StepReport

OnUpdates = Callable[[list[SequenceUpdate]], None]
OnRefusal = Callable[[str, Exception], None]
OnDeath = Callable[[BaseException], None]


class EngineThread:
    """Commands return at once; the callbacks are called from the engine's thread."""

    def __init__(
        self, engine: Engine, on_updates: OnUpdates, on_refusal: OnRefusal, on_death: OnDeath
    ) -> None:
        self._engine = engine
        self._on_updates = on_updates
        self._on_refusal = on_refusal
        self._on_death = on_death
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        """Raises EngineDead if the engine has stopped; refusals come through `on_refusal`."""
        if self._fault is not None:
            raise EngineDead(f"the engine stopped: {self._fault}")
        self._commands.put(lambda loop: loop.add(request))

    def abort(self, request_ids: list[str]) -> None:
        self._commands.put(lambda loop: loop.abort(request_ids))

    def stop(self, request_id: str, index: int) -> None:
        self._commands.put(lambda loop: loop.stop(request_id, index))

    def close(self) -> None:
        """Ends the loop and the engine; open requests are dropped."""
        self._commands.put(EngineLoop.end)
        self._thread.join()
        self._fault = self._fault or EngineDead("it was closed")

    # ------------------------------------------------------------------ engine.loop.Transport

    def receive(self, seconds: float) -> Command | None:
        try:
            return self._commands.get(block=bool(seconds), timeout=seconds or None)
        except queue.Empty:
            return None

    def publish(self, report: StepReport) -> None:
        if report.updates:
            self._on_updates(report.updates)

    def refuse(self, request_id: str, fault: Exception) -> None:
        self._on_refusal(request_id, fault)

    def _run(self) -> None:
        try:
            if self._engine.in_new_thread is not None:
                self._engine.in_new_thread()
            EngineLoop(self._engine, self).run()
        except BaseException as fault:  # no caller sees an exception of this thread
            self._fault = fault
            self._on_death(fault)
        finally:
            self._engine.close()

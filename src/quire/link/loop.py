"""EngineLoop: the engine process at work. Obeys what came in, steps, says what happened: one message per step."""

import time
from collections.abc import Iterable
from typing import Protocol

from quire.core.errors import InvalidRequest, QueueFull
from quire.core.request import Sequence
from quire.core.step import SequenceUpdate
from quire.engine.adapters import Adapters
from quire.engine.engine import Engine
from quire.link.adapter_calls import AdapterCalls
from quire.link.channel import WorkerChannel
from quire.link.messages import (
    Abort,
    AdapterFigures,
    Add,
    Began,
    CheckIntegrity,
    Done,
    Figures,
    GetStats,
    LoadAdapter,
    Refused,
    ResetPrefixCache,
    RestoreAdapter,
    Shutdown,
    Stop,
    ToEngine,
    UnloadAdapter,
    decode_to_engine,
    pack_updates,
    unpack_ints,
)
from quire.memory.offload_cache import OffloadStats
from quire.observe.logs import get_logger

log = get_logger(__name__)
_NO_ADAPTERS = AdapterFigures()
IDLE_MILLISECONDS = 500  # an idle engine looks up so often, to see whether it should leave


class Leaving(Protocol):
    """Whether someone asked this process to end."""

    asked: bool


class EngineLoop:
    def __init__(self, engine: Engine, channel: WorkerChannel, leaving: Leaving) -> None:
        self._engine = engine
        self._channel = channel
        self._leaving = leaving
        self._queue = QueueClock()
        self._adapter_calls = AdapterCalls(engine.adapters, self._answer)
        self._told = Figures()
        self._checked = True  # nothing has run since the pool was last recounted
        self.num_turns = 0  # this and `waits` are for heartbeats, read from another thread
        self.waits = False

    def run(self) -> None:
        """Returns when told to shut down, or when asked to leave and nothing is left to do."""
        while self._serve_inbox():
            self.num_turns += 1
            launched = time.monotonic()
            updates = self._engine.step()
            self._checked = False
            self._tell(updates, self._queue.look(self._engine.scheduler.running, updates, launched))
        self._say_goodbye()

    def _serve_inbox(self) -> bool:
        """Obeys everything that came in; waits while there is nothing to do. False: the end."""
        while True:
            # One that was asked to leave ends what it has begun, but waits for no file.
            engine = self._engine
            if engine.has_requests if self._leaving.asked else engine.has_work:
                data = self._channel.receive()
                if data is None:
                    return True
            else:
                data = self._idle()
                if data is None:
                    return False
            message = decode_to_engine(data)
            if isinstance(message, Shutdown):
                return False
            self._obey(message)

    def _idle(self) -> bytes | None:
        """Waits for the next message. None: asked to leave."""
        self._tell([], [])
        self.waits = True
        try:
            while not self._leaving.asked:
                if self._channel.wait(IDLE_MILLISECONDS):
                    return self._channel.receive()
                if not self._checked:
                    self._engine.check_integrity()
                    self._checked = True
            return None
        finally:
            self.waits = False

    def _obey(self, message: ToEngine) -> None:
        engine = self._engine
        match message:
            case Add():
                self._add(message)
            case Abort(request_ids):
                for request_id in request_ids:
                    engine.abort(request_id)
                    self._queue.leave(request_id)
            case Stop(request_id, index):
                engine.stop(request_id, index)
            case ResetPrefixCache(call_id):
                engine.memory.reset_prefix_index()
                self._answer(call_id)
            case CheckIntegrity(call_id):
                self._answer(call_id, self._integrity())
            case LoadAdapter(call_id, name, path):
                self._adapter_calls.load(call_id, name, path)
            case UnloadAdapter(call_id, name):
                self._adapter_calls.unload(call_id, name)
            case RestoreAdapter(name, path):
                self._adapter_calls.restore(name, path)
            case GetStats(call_id):
                self._answer(call_id)

    def _add(self, message: Add) -> None:
        if self._leaving.asked:
            self._refuse(message, "leaving", "the engine is shutting down: try again later")
            return
        try:
            self._engine.add(
                message.request_id,
                unpack_ints(message.prompt_token_ids),
                message.sampling,
                priority=message.priority,
                cache_salt=message.cache_salt,
                tenant=message.tenant,
                adapter=message.adapter,
            )
        except InvalidRequest as refusal:
            self._refuse(message, "invalid", str(refusal), refusal.param)
        except QueueFull as refusal:
            self._refuse(message, "leaving", str(refusal))
        except Exception as fault:  # a request that the engine trips over is this request's fault alone
            log.exception("request %s could not be added", message.request_id)
            self._refuse(message, "fault", f"{type(fault).__name__}: {fault}")
        else:
            self._queue.enter(message.request_id)

    def _answer(self, call_id: int, error: str | None = None) -> None:
        self._channel.send(Done(call_id, self.figures(), error))

    def _refuse(self, message: Add, kind: str, reason: str, param: str | None = None) -> None:
        self._channel.send(Refused(message.request_id, kind, reason, param))

    def _integrity(self) -> str | None:
        try:
            self._engine.check_integrity()
        except RuntimeError as wrong:
            return str(wrong)
        return None

    def _say_goodbye(self) -> None:
        """What was done, and whether everything was given back: nobody can ask any more."""
        figures, wrong = self.figures(), self._integrity()
        if wrong is not None:
            log.error("the engine ends, and its pool is not whole: %s", wrong)
        else:
            log.info(
                "ended     %s requests and %s tokens served; the pool is whole, %d blocks in use",
                f"{figures.num_requests:,}",
                f"{figures.num_generated_tokens:,}",
                figures.num_blocks_used,
            )

    def _tell(self, updates: list[SequenceUpdate], began: list[Began]) -> None:
        """Says what changed; nothing if nothing did."""
        figures = self.figures()
        if updates or began or figures != self._told:
            self._told = figures
            self._channel.send(pack_updates(updates, began, figures))

    def figures(self) -> Figures:
        engine = self._engine
        scheduler, memory, stats = engine.scheduler, engine.memory, engine.stats
        drafted, home = engine.draft_stats, memory.offload_cache
        kept = OffloadStats() if home is None else home.stats
        return Figures(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + engine.num_compiling,
            num_waiting_tokens=scheduler.waiting.num_tokens,
            num_blocks_used=memory.num_blocks - memory.num_free,
            num_requests=stats.num_requests,
            num_finished=stats.num_finished,
            num_preemptions=scheduler.stats.num_preemptions,
            prefix_queries=memory.stats.prefix_queries,
            prefix_hits=memory.stats.prefix_hits,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_generated_tokens=stats.num_generated_tokens,
            num_computed_tokens=stats.num_computed_tokens,
            num_steps=stats.num_steps,
            step_seconds=stats.step_seconds,
            num_drafts=drafted.num_drafts,
            num_draft_tokens=drafted.num_draft_tokens,
            num_accepted_tokens=drafted.num_accepted_tokens,
            num_swaps_out=scheduler.stats.num_swaps_out,
            num_swaps_in=scheduler.stats.num_swaps_in,
            swapped_out_blocks=memory.swap.stats.blocks_out,
            swapped_in_blocks=memory.swap.stats.blocks_in,
            swap_blocks_used=memory.swap.num_used,
            offload_saved=kept.saved,
            offload_dropped=kept.dropped,
            offload_hits=kept.host_hits,
            offload_disk_hits=kept.disk_hits,
            offload_disk_faults=kept.disk_faults,
            offload_blocks_used=0 if home is None else home.num_used,
            offload_disk_blocks=0 if home is None else home.num_disk_blocks,
            swap_blocks=memory.swap.hosts.num_blocks,
            offload_blocks=0 if home is None else home.num_hosts,
            adapters=_adapter_figures(engine.adapters),
        )


def _adapter_figures(adapters: Adapters | None) -> AdapterFigures:
    if adapters is None:
        return _NO_ADAPTERS
    found = adapters.figures()
    return AdapterFigures(**{name: getattr(found, name) for name in AdapterFigures.__struct_fields__})


class QueueClock:
    """How long each request waited before it ran for the first time."""

    def __init__(self) -> None:
        self._arrivals: dict[str, float] = {}  # of those that have not run yet

    def enter(self, request_id: str) -> None:
        self._arrivals[request_id] = time.monotonic()

    def leave(self, request_id: str) -> None:
        self._arrivals.pop(request_id, None)

    def look(self, running: Iterable[Sequence], updates: Iterable[SequenceUpdate], now: float) -> list[Began]:
        """Those that ran in the step launched `now` and not before. Costs nothing while nobody waits."""
        arrivals = self._arrivals
        if not arrivals:
            return []
        found = {s.request.request_id for s in running}.intersection(arrivals)
        found |= {u.request_id for u in updates}.intersection(arrivals)  # begun and over in one step
        return [Began(request_id, max(0.0, now - arrivals.pop(request_id))) for request_id in found]

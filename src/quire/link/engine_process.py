"""EngineProcess: what every client of an engine process shares. Its life, and the requests that are with it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

from quire.core.config import EngineConfig
from quire.core.errors import EngineDead
from quire.link.admission import Admission, Bounds
from quire.link.channel import Channel
from quire.link.messages import Abort, AnyReady, Figures, FromEngine, Refused
from quire.link.refusal import refusal
from quire.link.stream import Stream
from quire.link.supervise import STEP_SECONDS, Supervisor

UNBOUNDED = 2**31 - 1  # the engine's own queue: this side is its only customer, and counts already
Update = TypeVar("Update")


class EngineProcess(Generic[Update]):
    """Use it from one event loop. Whatever can be refused is refused at once; nothing here blocks.

    When the engine dies, open streams fail with EngineDead, and so does every submission until the next
    engine is ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        bounds: Bounds,
        on_progress: Callable[[str, int, int], None] | None = None,
        engine_timeout: float = STEP_SECONDS,
        what: str = "engine",
    ) -> None:
        unbounded = replace(config.scheduler, max_queue_requests=UNBOUNDED, max_queue_tokens=None)
        self.admission = Admission(bounds)
        self.figures = Figures()
        self._supervisor = Supervisor(
            replace(config, scheduler=unbounded), self, on_progress, engine_timeout, what
        )
        self._channel: Channel | None = None  # None: no engine to talk to
        self._streams: dict[str, Stream[Update]] = {}

    # ------------------------------------------------------------------ the engine's life

    async def close(self) -> None:
        self.fail_open(EngineDead("the engine was closed"))
        await self._supervisor.close()

    def let_end(self) -> None:
        """From now on an engine that ends is not replaced: everything is about to end."""
        self._supervisor.restarts = False

    @property
    def is_ready(self) -> bool:
        return self._channel is not None

    @property
    def status(self) -> str:
        """The engine's state in words."""
        return self._supervisor.status

    @property
    def num_restarts(self) -> int:
        return max(0, self._supervisor.num_starts - 1)

    @property
    def num_failures(self) -> int:
        """Starts that failed and engines that died young, in a row."""
        return self._supervisor.num_failures

    # ------------------------------------------------------------------ requests

    def fail_open(self, fault: Exception) -> int:
        """Ends every open stream with `fault`; how many there were."""
        streams = set(self._streams.values())
        for stream in streams:
            stream.fail(fault)
        return len(streams)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def has_work(self) -> bool:
        """Whether the engine owes an answer."""
        return bool(self._streams)

    def _refused(self, message: Refused) -> None:
        stream = self._streams.get(message.request_id)
        if stream is None:
            return
        stream.done(message.request_id)
        self._forget(message.request_id)
        stream.fail(refusal(message))

    def _close(self, stream: Stream[Update]) -> None:
        open_ids = [one for one in stream.open_ids if one in self._streams]
        if open_ids and self._channel is not None:
            self._channel.send(Abort(open_ids))
        for request_id in stream.request_ids:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self.admission.leave(request_id)

    # ------------------------------------------------------------------ what the supervisor tells

    def engine_up(self, ready: AnyReady, channel: Channel) -> None:
        self._channel = channel
        self.figures = Figures()

    def engine_down(self, fault: EngineDead) -> None:
        self._channel = None
        self.figures = Figures()
        self.fail_open(EngineDead(f"{fault}; it is being restarted: try again in some seconds"))

    def engine_says(self, message: FromEngine) -> None:
        raise NotImplementedError

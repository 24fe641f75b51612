"""EncoderLoop: the process of an encoder at work. Obeys what came in, steps, says what happened."""

from itertools import accumulate, pairwise

from quire.core.errors import InvalidRequest, QueueFull
from quire.core.pooled import Pooled
from quire.engine.encoder_engine import EncoderEngine
from quire.link.channel import WorkerChannel
from quire.link.loop import IDLE_MILLISECONDS, Leaving
from quire.link.messages import (
    Abort,
    Done,
    Embed,
    Encoded,
    Figures,
    GetStats,
    Refused,
    Shutdown,
    ToEngine,
    decode_to_engine,
    unpack_ints,
)
from quire.observe.logs import get_logger

log = get_logger(__name__)


class EncoderLoop:
    def __init__(self, engine: EncoderEngine, channel: WorkerChannel, leaving: Leaving) -> None:
        self._engine = engine
        self._channel = channel
        self._leaving = leaving
        self._told = Figures()
        self.num_turns = 0  # this and `waits` are for heartbeats, read from another thread
        self.waits = False

    def run(self) -> None:
        """Returns when told to shut down, or when asked to leave and nothing is left to do."""
        while self._serve_inbox():
            self.num_turns += 1
            self._tell(self._engine.step())

    def _serve_inbox(self) -> bool:
        """Obeys everything that came in; waits while there is nothing to do. False: the end."""
        while True:
            data = self._channel.receive() if self._engine.has_work else self._idle()
            if data is None:
                return self._engine.has_work
            message = decode_to_engine(data)
            if isinstance(message, Shutdown):
                return False
            self._obey(message)

    def _idle(self) -> bytes | None:
        """Waits for the next message. None: asked to leave."""
        self._tell([])
        self.waits = True
        try:
            while not self._leaving.asked:
                if self._channel.wait(IDLE_MILLISECONDS):
                    return self._channel.receive()
            return None
        finally:
            self.waits = False

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Embed():
                self._add(message)
            case Abort(request_ids):
                for request_id in request_ids:
                    self._engine.abort(request_id)
            case GetStats(call_id):
                self._channel.send(Done(call_id, self.figures()))

    def _add(self, message: Embed) -> None:
        if self._leaving.asked:
            self._refuse(message, "leaving", "the engine is shutting down: try again later")
            return
        token_ids = unpack_ints(message.token_ids)
        ends = accumulate(message.lengths, initial=0)
        texts = [token_ids[start:end] for start, end in pairwise(ends)]
        try:
            self._engine.add(message.request_id, texts)
        except InvalidRequest as refusal:
            self._refuse(message, "invalid", str(refusal), refusal.param)
        except QueueFull as refusal:
            self._refuse(message, "leaving", str(refusal))
        except Exception as fault:  # a request that the engine trips over is this request's fault alone
            log.exception("request %s could not be added", message.request_id)
            self._refuse(message, "fault", f"{type(fault).__name__}: {fault}")

    def _refuse(self, message: Embed, kind: str, reason: str, param: str | None = None) -> None:
        self._channel.send(Refused(message.request_id, kind, reason, param))

    def _tell(self, pooled: list[Pooled]) -> None:
        """Says what changed; nothing if nothing did."""
        figures = self.figures()
        if pooled or figures != self._told:
            self._told = figures
            self._channel.send(Encoded(pooled, figures))

    def figures(self) -> Figures:
        engine, stats = self._engine, self._engine.stats
        return Figures(
            num_waiting=engine.num_waiting,
            num_waiting_tokens=engine.num_waiting_tokens,
            num_requests=stats.num_requests,
            num_finished=stats.num_finished,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_computed_tokens=stats.num_computed_tokens,
            num_steps=stats.num_steps,
            step_seconds=stats.step_seconds,
        )

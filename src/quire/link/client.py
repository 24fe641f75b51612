"""EngineClient: the engine process as an asyncio program sees it."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.core.config import EngineConfig
from quire.core.errors import EngineDead, InvalidRequest, QueueFull, QuireError
from quire.core.step import SequenceUpdate
from quire.link.admission import Admission, Ask, Bounds
from quire.link.channel import Channel
from quire.link.messages import (
    Abort,
    Add,
    AskFigures,
    CheckIntegrity,
    Done,
    Figures,
    FromEngine,
    Ready,
    Refused,
    ResetPrefixCache,
    Stop,
    Updates,
    encode,
    pack_ints,
    unpack_updates,
)
from quire.link.stream import Stream
from quire.link.supervise import Supervisor

UNBOUNDED = 2**31 - 1  # the engine's own queue: this side is its only customer, and counts already
CALL_SECONDS = 60.0


class EngineClient:
    """Use it from one event loop. Whatever can be refused is refused at once; nothing here blocks.

    When the engine dies, open streams fail with EngineDead, and so does every submission until the next
    engine is ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        bounds: Bounds,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        unbounded = replace(config.scheduler, max_queue_requests=UNBOUNDED, max_queue_tokens=None)
        self.admission = Admission(bounds)
        self.figures = Figures()
        self.ready: Ready | None = None  # as the last engine that started said it
        self._supervisor = Supervisor(replace(config, scheduler=unbounded), self, on_progress)
        self._channel: Channel | None = None  # None: no engine to talk to
        self._streams: dict[str, Stream] = {}
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Done]] = {}

    # ------------------------------------------------------------------ the engine's life

    async def start(self) -> Ready:
        """Returns when the engine can serve; raises one clear line if it never will."""
        return await self._supervisor.start()

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

    def submit(self, asks: Sequence[Ask]) -> Stream:
        """Hands over all of the requests or none. Raises QueueFull, InvalidRequest or EngineDead at once."""
        self.check_room(len(asks))
        channel, ready = self._channel, self.ready
        assert channel is not None  # or there was no room
        assert ready is not None
        messages = [
            _encoded(ask, ready.vocab_size) for ask in asks
        ]  # what can fail fails before anyone knows
        self.admission.check(asks, self.figures, ready.max_num_seqs)
        self.admission.enter(asks)
        stream = Stream([ask.request_id for ask in asks], self._close)
        for request_id, message in zip(stream.request_ids, messages, strict=True):
            self._streams[request_id] = stream
            channel.send_encoded(message)
        return stream

    def check_room(self, num_asks: int = 1) -> None:
        """Raises what `submit` would raise for any requests, before the work of making them is done."""
        if self._channel is None or self.ready is None:
            raise EngineDead(f"{self.status}: try again in some seconds")
        self.admission.check_room(num_asks, self.figures, self.ready.max_num_seqs)

    def stop(self, request_id: str, index: int) -> None:
        """Ends one sequence whose text holds a stop string."""
        if self._channel is not None:
            self._channel.send(Stop(request_id, index))

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

    # ------------------------------------------------------------------ operators' calls

    async def reset_prefix_cache(self) -> None:
        await self._call(ResetPrefixCache)

    async def check_integrity(self) -> str | None:
        """Recounts the pool; what is wrong with it, or None."""
        return (await self._call(CheckIntegrity)).error

    async def fresh_figures(self) -> Figures:
        return (await self._call(AskFigures)).figures

    async def _call(self, kind: type[ResetPrefixCache | CheckIntegrity | AskFigures]) -> Done:
        if self._channel is None:
            raise EngineDead(f"{self.status}: try again in some seconds")
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._channel.send(kind(call_id))
        try:
            return await asyncio.wait_for(answer, CALL_SECONDS)
        except TimeoutError:
            raise EngineDead(f"the engine gave no answer within {CALL_SECONDS:.0f} s") from None
        finally:
            del self._calls[call_id]

    # ------------------------------------------------------------------ what the supervisor tells

    def engine_up(self, ready: Ready, channel: Channel) -> None:
        self.ready = ready
        self._channel = channel
        self.figures = Figures()

    def engine_down(self, fault: EngineDead) -> None:
        self._channel = None
        self.figures = Figures()
        self.fail_open(EngineDead(f"{fault}; it is being restarted: try again in some seconds"))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(fault)

    def engine_says(self, message: FromEngine) -> None:
        match message:
            case Updates():
                self._take(message)
            case Refused():
                self._refused(message)
            case Done(call_id, figures):
                self.figures = figures
                answer = self._calls.get(call_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _take(self, message: Updates) -> None:
        self.figures = message.figures
        for one in message.began:
            self.admission.begin(one.request_id)
            stream = self._streams.get(one.request_id)
            if stream is not None:
                stream.queue_seconds[one.request_id] = one.seconds
        for update in unpack_updates(message):
            self._deliver(update)

    def _deliver(self, update: SequenceUpdate) -> None:
        stream = self._streams.get(update.request_id)
        if stream is not None:  # else it was aborted while this was on its way
            stream.push(update)

    def _refused(self, message: Refused) -> None:
        stream = self._streams.get(message.request_id)
        if stream is None:
            return
        stream.done(message.request_id)
        self._forget(message.request_id)
        stream.fail(_refusal(message))

    def _close(self, stream: Stream) -> None:
        open_ids = [one for one in stream.open_ids if one in self._streams]
        if open_ids and self._channel is not None:
            self._channel.send(Abort(open_ids))
        for request_id in stream.request_ids:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self.admission.leave(request_id)


def _encoded(ask: Ask, vocab_size: int) -> bytes:
    try:
        packed = pack_ints(ask.prompt_token_ids)
    except OverflowError:
        wrong = next(one for one in ask.prompt_token_ids if not -(2**31) <= one < 2**31)
        raise InvalidRequest(
            f"token id {wrong} is outside the vocabulary of {vocab_size}: use 0 to {vocab_size - 1}", "prompt"
        ) from None
    try:
        return encode(Add(ask.request_id, packed, ask.sampling, ask.priority, ask.cache_salt))
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"the request holds a value that cannot be passed on ({error})") from None


def _refusal(message: Refused) -> QuireError:
    if message.kind == "invalid":
        return InvalidRequest(message.message, message.param)
    if message.kind == "leaving":
        return QueueFull(message.message)
    return QuireError(message.message)

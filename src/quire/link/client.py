"""EngineClient: the engine process as an asyncio program sees it."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from quire.core.config import EngineConfig
from quire.core.errors import EngineDead, InvalidRequest
from quire.core.step import SequenceUpdate
from quire.link.adapters import NamedAdapters
from quire.link.admission import Ask, Bounds
from quire.link.channel import Channel
from quire.link.engine_process import UNBOUNDED as UNBOUNDED
from quire.link.engine_process import EngineProcess
from quire.link.messages import (
    Add,
    AnyReady,
    CheckIntegrity,
    Done,
    Figures,
    FromEngine,
    GetStats,
    LoadAdapter,
    Ready,
    Refused,
    ResetPrefixCache,
    RestoreAdapter,
    Stop,
    UnloadAdapter,
    Updates,
    encode,
    pack_ints,
    unpack_updates,
)
from quire.link.stream import Stream
from quire.link.supervise import STEP_SECONDS

CALL_SECONDS = 60.0
Call = ResetPrefixCache | CheckIntegrity | GetStats | LoadAdapter | UnloadAdapter


class EngineClient(EngineProcess[SequenceUpdate]):
    """An engine that generates."""

    def __init__(
        self,
        config: EngineConfig,
        bounds: Bounds,
        on_progress: Callable[[str, int, int], None] | None = None,
        engine_timeout: float = STEP_SECONDS,
    ) -> None:
        super().__init__(config, bounds, on_progress, engine_timeout)
        self.ready: Ready | None = None  # as the last engine that started said it
        self._named = config.adapters
        self.adapters = NamedAdapters(config.adapters)
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Done]] = {}
        self._changes: dict[int, Callable[[], None]] = {}  # by call: what its success means on this side

    async def start(self) -> Ready:
        """Returns when the engine can serve; raises one clear line if it never will."""
        self._named.check_folders()
        ready = await self._supervisor.start()
        assert isinstance(ready, Ready)
        return ready

    # ------------------------------------------------------------------ requests

    def submit(self, asks: Sequence[Ask]) -> Stream[SequenceUpdate]:
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
        stream: Stream[SequenceUpdate] = Stream([ask.request_id for ask in asks], self._close)
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

    @property
    def has_work(self) -> bool:
        """Whether the engine owes an answer."""
        return bool(self._streams or self._calls)

    # ------------------------------------------------------------------ operators' calls

    async def reset_prefix_cache(self) -> None:
        await self._call(ResetPrefixCache)

    async def check_integrity(self) -> str | None:
        """Recounts the pool; what is wrong with it, or None."""
        return (await self._call(CheckIntegrity)).error

    async def fresh_figures(self) -> Figures:
        return (await self._call(GetStats)).figures

    async def load_adapter(self, name: str, path: str) -> None:
        """Returns when requests can name it. Raises InvalidRequest with the reason if it cannot be served."""
        change = partial(self.adapters.loaded, name, path)
        done = await self._call(LoadAdapter, name, path, change=change, seconds=None)
        if done.error is not None:
            raise InvalidRequest(done.error, "lora_path")

    async def unload_adapter(self, name: str) -> None:
        """Requests that run with it go on; a load of it that is under way is given up."""
        done = await self._call(UnloadAdapter, name, change=partial(self.adapters.unloaded, name))
        if done.error is not None:
            raise InvalidRequest(done.error, "lora_name")

    async def _call(
        self,
        kind: Callable[..., Call],
        *arguments: str,
        change: Callable[[], None] | None = None,
        seconds: float | None = CALL_SECONDS,
    ) -> Done:
        """`change` happens if the call succeeds, in the order of the engine's answers, whether or not its caller still
        waits. `seconds`: None where it takes as long as it takes.
        """
        if self._channel is None:
            raise EngineDead(f"{self.status}: try again in some seconds")
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        if change is not None:
            self._changes[call_id] = change
        self._channel.send(kind(call_id, *arguments))
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise EngineDead(f"the engine gave no answer within {seconds:.0f} s") from None
        finally:
            del self._calls[call_id]

    def fail_open(self, fault: Exception) -> int:
        """As for streams, and for operators' calls too."""
        waiting = [answer for answer in self._calls.values() if not answer.done()]
        for answer in waiting:
            answer.set_exception(fault)
        return super().fail_open(fault) + len(waiting)

    # ------------------------------------------------------------------ what the supervisor tells

    def engine_up(self, ready: AnyReady, channel: Channel) -> None:
        assert isinstance(ready, Ready)
        self.ready = ready
        super().engine_up(ready, channel)
        for name, path in self.adapters.loaded_paths():  # what operators asked of the engine before this one
            channel.send(RestoreAdapter(name, path))
        for name in self.adapters.unloaded_names():
            channel.send(UnloadAdapter(next(self._call_ids), name))

    def engine_down(self, fault: EngineDead) -> None:
        super().engine_down(fault)
        self._changes.clear()

    def engine_says(self, message: FromEngine) -> None:
        match message:
            case Updates():
                self._take(message)
            case Refused():
                self._refused(message)
            case Done(call_id, figures, error):
                self.figures = figures
                change = self._changes.pop(call_id, None)
                if change is not None and error is None:
                    change()
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


def _encoded(ask: Ask, vocab_size: int) -> bytes:
    try:
        packed = pack_ints(ask.prompt_token_ids)
    except OverflowError:
        wrong = next(one for one in ask.prompt_token_ids if not -(2**31) <= one < 2**31)
        raise InvalidRequest(
            f"token id {wrong} is outside the vocabulary of {vocab_size}: use 0 to {vocab_size - 1}", "prompt"
        ) from None
    try:
        return encode(
            Add(ask.request_id, packed, ask.sampling, ask.priority, ask.cache_salt, ask.tenant, ask.adapter)
        )
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"the request holds a value that cannot be passed on ({error})") from None

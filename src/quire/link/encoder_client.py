"""EncoderClient: an engine process that makes embeddings, as an asyncio program sees it."""

from collections.abc import Callable

from quire.core.config import EngineConfig
from quire.core.errors import EngineDead, InvalidRequest
from quire.core.pooled import Pooled
from quire.link.admission import Bounds, EmbedAsk
from quire.link.channel import Channel
from quire.link.engine_process import EngineProcess
from quire.link.messages import AnyReady, Embed, Encoded, EncoderReady, FromEngine, Refused, pack_ints
from quire.link.stream import Stream
from quire.link.supervise import STEP_SECONDS


class EncoderClient(EngineProcess[Pooled]):
    """An engine that embeds."""

    def __init__(
        self,
        config: EngineConfig,
        bounds: Bounds,
        on_progress: Callable[[str, int, int], None] | None = None,
        engine_timeout: float = STEP_SECONDS,
    ) -> None:
        super().__init__(config, bounds, on_progress, engine_timeout, "embedding engine")
        self.ready: EncoderReady | None = None  # as the last engine that started said it
        self._left: dict[str, int] = {}  # request id -> texts without a vector

    async def start(self) -> EncoderReady:
        """Returns when the engine can serve; raises one clear line if it never will."""
        ready = await self._supervisor.start()
        assert isinstance(ready, EncoderReady)
        return ready

    def embed(self, ask: EmbedAsk) -> Stream[Pooled]:
        """Hands over a request with all its texts. Raises QueueFull, InvalidRequest or EngineDead at once.

        The stream gives one Pooled for each text, in the texts' order.
        """
        self.check_room()
        channel, ready = self._channel, self.ready
        assert channel is not None  # or there was no room
        assert ready is not None
        message = _message(ask, ready.vocab_size)
        self.admission.check([ask], self.figures, ready.max_num_seqs)
        self.admission.enter([ask])
        self._left[ask.request_id] = len(ask.texts)
        stream: Stream[Pooled] = Stream([ask.request_id], self._close)
        self._streams[ask.request_id] = stream
        channel.send(message)
        return stream

    def check_room(self) -> None:
        """Raises what `embed` would raise for any request, before the work of making it is done."""
        if self._channel is None or self.ready is None:
            raise EngineDead(f"{self.status}: try again in some seconds")
        self.admission.check_room(1, self.figures, self.ready.max_num_seqs)

    # ------------------------------------------------------------------ what the supervisor tells

    def engine_up(self, ready: AnyReady, channel: Channel) -> None:
        assert isinstance(ready, EncoderReady)
        self.ready = ready
        super().engine_up(ready, channel)

    def engine_says(self, message: FromEngine) -> None:
        match message:
            case Encoded(pooled, figures):
                self.figures = figures
                for one in pooled:
                    self._deliver(one)
            case Refused():
                self._refused(message)

    def _deliver(self, pooled: Pooled) -> None:
        stream = self._streams.get(pooled.request_id)
        if stream is None:
            return  # it was aborted while this was on its way
        self._left[pooled.request_id] -= 1
        if self._left[pooled.request_id] == 0:  # until its last text has run, a request waits
            self.admission.begin(pooled.request_id)
        stream.push(pooled)

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._left.pop(request_id, None)


def _message(ask: EmbedAsk, vocab_size: int) -> Embed:
    token_ids = [token_id for text in ask.texts for token_id in text]
    try:
        return Embed(ask.request_id, pack_ints(token_ids), [len(text) for text in ask.texts])
    except OverflowError:
        wrong = next(one for one in token_ids if not -(2**31) <= one < 2**31)
        raise InvalidRequest(
            f"token id {wrong} is outside the vocabulary of {vocab_size}: use 0 to {vocab_size - 1}", "input"
        ) from None

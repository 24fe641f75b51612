"""EngineClient: the engine process as an asyncio program sees it. QueueAdmission: how much may wait for it."""

import asyncio
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.core.config import ADAPTER_CONFIG_FILE, AdapterConfig, EngineConfig
from quire.core.errors import AdapterError, EngineDead, InvalidRequest, QueueFull, QuireError
from quire.core.request import EmbedRequest, QueueBounds, Request
from quire.core.stats import EngineStats, QueueStats, RoutingStats
from quire.engine.streams import OpenStreams, Stream
from quire.link.channel import Channel
from quire.link.feed_listeners import FeedListeners
from quire.link.messages import (
    Abort,
    Add,
    CheckIntegrity,
    Done,
    Embed,
    FeedRecord,
    FromEngine,
    LoadAdapter,
    Ready,
    Refused,
    ResetPrefixCache,
    ShownSequence,
    ShowRequest,
    Stop,
    SwitchStepLog,
    ToEngine,
    UnloadAdapter,
    Updates,
    WatchEngine,
    encode,
    restoring,
    unpack_updates,
)
from quire.link.step_log import StepRecord
from quire.link.supervise import STEP_SECONDS, Supervisor

if TYPE_CHECKING:
    from quire.link.relayed import RelayedEngine

CALL_SECONDS = 60.0
MAX_RETRY_SECONDS = 60
MAX_ANSWERS = 4096  # sequences of one HTTP request with several prompts; each costs memory before it runs


class QueueAdmission:
    """The requests that were submitted and have not started to run, within bounds. A refusal costs no message."""

    def __init__(self, bounds: QueueBounds) -> None:
        self.bounds = bounds
        self._waiting: dict[str, int] = {}  # request id -> prompt tokens
        self._waiting_tokens = 0
        self._last_start = 0.0
        self._seconds_per_start = 0.0  # a moving average, for Retry-After

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check(self, requests: Sequence[Request | EmbedRequest], load: QueueStats, max_num_seqs: int) -> None:
        """All of them or none: raises QueueFull, or InvalidRequest if they could never wait together."""
        num_tokens = sum(request.num_prompt_tokens for request in requests)
        self.refuse_hopeless(len(requests), num_tokens, max_num_seqs)
        self.check_room(len(requests), load, max_num_seqs)
        self.bounds.check_tokens(self._waiting_tokens, num_tokens)

    def check_room(self, num_requests: int, load: QueueStats, max_num_seqs: int) -> None:
        """As `check`, before the lengths of the prompts are known. `load` is the engine's own."""
        # With an empty queue the engine's free rows are filled at once.
        num_free_rows = max(0, max_num_seqs - load.num_running) if load.num_waiting == 0 else 0
        self.bounds.check_requests(self.num_waiting, num_requests, num_free_rows)

    def enter(self, requests: Sequence[Request | EmbedRequest]) -> None:
        for request in requests:
            num_tokens = self._waiting[request.request_id] = request.num_prompt_tokens
            self._waiting_tokens += num_tokens

    def start(self, request_id: str) -> None:
        """The request left the queue."""
        num_tokens = self._waiting.pop(request_id, None)
        if num_tokens is None:
            return  # it ended meanwhile
        self._waiting_tokens -= num_tokens
        now = time.monotonic()
        if self._last_start:
            self._seconds_per_start += 0.1 * (now - self._last_start - self._seconds_per_start)
        self._last_start = now

    def leave(self, request_id: str) -> None:
        """The request ended, in the queue or not."""
        self._waiting_tokens -= self._waiting.pop(request_id, 0)

    def retry_seconds(self) -> int:
        """When half of the queue should be gone, at the recent rate of starts."""
        expected = math.ceil(self._seconds_per_start * self.num_waiting / 2)
        return min(max(1, expected), MAX_RETRY_SECONDS)

    def refuse_hopeless(
        self, num_requests: int, num_tokens: int, max_num_seqs: int, num_sequences: int = 1
    ) -> None:
        """`num_sequences` is the number of each request, where it is not checked yet."""
        bounds = self.bounds
        if bounds.max_requests is not None and num_requests > bounds.max_requests + max_num_seqs:
            raise InvalidRequest(
                f"{num_requests} prompts in one request are more than can run and wait "
                f"({bounds.max_requests + max_num_seqs}): send fewer at a time, or raise max_queue_requests",
                "prompt",
            )
        most = max(MAX_ANSWERS, num_requests)
        if num_requests > 1 and num_requests * num_sequences > most:
            raise InvalidRequest(
                f"{num_requests} prompts with {num_sequences} sequences each are {num_requests * num_sequences} "
                f"sequences, and one request may have {most}: send fewer prompts at a time, or lower n",
                "n",
            )
        if bounds.max_tokens is not None and num_requests > 1 and num_tokens > bounds.max_tokens:
            raise InvalidRequest(
                f"the prompts have {num_tokens} tokens together and {bounds.max_tokens} may wait: "
                "send fewer at a time, or raise max_queue_tokens",
                "prompt",
            )


class NamedAdapters:
    """Adapters of the config and of its folder, and what operators loaded and unloaded since."""

    def __init__(self, config: AdapterConfig) -> None:
        self.enabled = config.enabled
        self.max_adapters = config.max_loras
        self._folder = config.lora_dir
        self._named = dict.fromkeys(config.modules())
        self._loaded: dict[str, str] = {}  # paths, by name
        self._unloaded: set[str] = set()

    def knows(self, name: str) -> bool:
        """An adapter of the folder is looked up on disk each time."""
        if name in self._loaded or (name in self._named and name not in self._unloaded):
            return True
        return self._folder is not None and _is_plain(name) and self._lies_in(self._folder, name)

    def names(self) -> list[str]:
        names = [name for name in self._named if name not in self._unloaded]
        names += self._loaded
        if self._folder is not None:
            with suppress(OSError), os.scandir(self._folder) as entries:  # the folder may be gone by now
                inside = sorted(entry.name for entry in entries)
                names += [name for name in inside if self._lies_in(self._folder, name)]
        return list(dict.fromkeys(names))

    def change(self, name: str, path: str | None) -> None:
        """It was loaded from `path`, or unloaded (None)."""
        self._loaded.pop(name, None)
        self._unloaded.discard(name)
        if path is not None:
            self._loaded[name] = path
        elif name in self._named:
            self._unloaded.add(name)

    def changes(self) -> list[tuple[str, str | None]]:
        """What a new engine process, or another process beside this one, has to `change` as well."""
        return [*self._loaded.items(), *((name, None) for name in self._unloaded)]

    @staticmethod
    def _lies_in(folder: str, name: str) -> bool:
        return os.path.isfile(os.path.join(folder, name, ADAPTER_CONFIG_FILE))


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def unbounded(config: EngineConfig) -> EngineConfig:
    """The bounds of the queue are checked before a request is sent: the engine's own queue needs none."""
    return replace(
        config, scheduler=replace(config.scheduler, max_queue_requests=None, max_queue_tokens=None)
    )


class EngineClient:
    """Use it from one event loop. Refusals are immediate; no call blocks.

    When the engine dies, open streams fail with EngineDead, and so does every submission until the next
    engine is ready.
    """

    replica: int | None = None  # its number, where several engines serve one model
    routing: RoutingStats | None = None  # likewise: what is sent to it
    can_retry = False  # whether another engine may take a request that this one lost

    def __init__(
        self,
        config: EngineConfig,
        bounds: QueueBounds,
        on_progress: Callable[[str, int, int], None] | None = None,
        engine_timeout: float = STEP_SECONDS,
        what: str = "engine",
        relay: "Callable[[EngineClient], Supervisor | RelayedEngine] | None" = None,
    ) -> None:
        """`what` names the engine in messages, where there are several. `relay` connects to an engine that another
        process supervises, or that runs elsewhere; else this process starts one here."""
        self.ready: Ready | None = None  # of the engine process that started last
        self.admission = QueueAdmission(bounds)
        self.adapters = NamedAdapters(config.adapters)
        self.queue = QueueStats()
        self.stats = EngineStats()
        self._config = config
        self._supervisor: Supervisor | RelayedEngine
        if relay is None:
            self._supervisor = Supervisor(unbounded(config), self, on_progress, engine_timeout, what)
        else:
            self._supervisor = relay(self)
        self._channel: Channel | RelayedEngine | None = None  # None: no engine to talk to
        self._streams: OpenStreams[Any] = OpenStreams(self._abort, self.request_ended)
        self.feed = FeedListeners(self._watch)
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Done]] = {}
        self._effects: dict[int, Callable[[], None]] = {}  # by call: what its success changes on this side

    # ------------------------------------------------------------------ the engine's life

    async def start(self) -> Ready:
        """Returns when the engine can serve; raises one clear line if it never will."""
        self._config.adapters.check_folders()
        return await self._supervisor.start()

    async def close(self) -> None:
        self.fail_open(EngineDead("the engine was closed"))
        await self._supervisor.close()

    def let_end(self) -> None:
        """From now on an engine that ends is not replaced."""
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
        """Failed starts and early deaths of engines, in a row."""
        return self._supervisor.num_failures

    # ------------------------------------------------------------------ requests

    @property
    def engines(self) -> "Sequence[EngineClient]":
        """The engines behind it: itself."""
        return (self,)

    def submit(
        self, requests: Sequence[Request | EmbedRequest], messages: Sequence[Add | Embed] | None = None
    ) -> Stream[Any]:
        """Sends all of the requests or none. Raises QueueFull, InvalidRequest or EngineDead at once.

        The stream has SequenceUpdates, or, of an encoder, one Pooled for each text, in their order. `messages` are
        those of the requests, where they were made before.
        """
        channel, ready = self._connected()
        self.admission.check(requests, self.queue, ready.max_num_seqs)
        encoded = [_encoded(message) for message in messages or map(message_of, requests)]
        self.admission.enter(requests)
        stream = self._streams.open([request.request_id for request in requests])
        self._send(channel, stream, encoded)
        return stream

    def _send(self, channel: "Channel | RelayedEngine", _stream: Stream[Any], encoded: list[bytes]) -> None:
        for data in encoded:
            channel.send_encoded(data)

    def check_room(self, num_requests: int = 1, num_sequences: int = 1) -> None:
        """Raises what `submit` would raise for that many requests of any length, before the work of preparing them."""
        _channel, ready = self._connected()
        self.admission.refuse_hopeless(num_requests, 0, ready.max_num_seqs, num_sequences)
        self.admission.check_room(num_requests, self.queue, ready.max_num_seqs)

    def stop(self, request_id: str, index: int) -> None:
        """Ends one sequence, in whose text a stop string appeared."""
        if self._channel is not None:
            self._channel.send(Stop(request_id, index))

    def fail_open(self, fault: Exception) -> int:
        """Ends every open stream and call with `fault`; the number of them."""
        calls = [answer for answer in self._calls.values() if not answer.done()]
        for answer in calls:
            answer.set_exception(fault)
        self.feed.fail(fault)
        return self._streams.fail_all(fault) + len(calls)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def has_work(self) -> bool:
        """Whether a request or a call waits for the engine."""
        return bool(self._streams or self._calls)

    def _abort(self, request_ids: list[str]) -> None:
        if self._channel is not None:
            self._channel.send(Abort(request_ids))

    def request_ended(self, request_id: str) -> None:
        """Answered, refused or aborted."""
        self.admission.leave(request_id)
        self._supervisor.request_ended(request_id)

    def _connected(self) -> "tuple[Channel | RelayedEngine, Ready]":
        if self._channel is None or self.ready is None:
            raise EngineDead(f"{self.status}: try again in some seconds")
        return self._channel, self.ready

    # ------------------------------------------------------------------ operators' calls

    async def reset_prefix_cache(self) -> None:
        await self._call(ResetPrefixCache)

    async def check_integrity(self) -> Done:
        """Recounts the pool; the answer's `error` is what is wrong with it, or None."""
        return await self._call(CheckIntegrity)

    async def show_request(self, request_id: str) -> Sequence[ShownSequence]:
        """The sequences of a request that has not ended; empty if there is none."""
        return (await self._call(ShowRequest, request_id)).sequences

    def _watch(self, on: bool) -> None:
        if self._channel is not None:
            self._channel.send(WatchEngine(on))

    async def start_step_log(self) -> None:
        done = await self._call(SwitchStepLog, True)
        if done.error is not None:
            raise InvalidRequest(done.error)

    async def stop_step_log(self) -> Sequence[StepRecord]:
        """What was recorded since the start; nothing if the log was not on."""
        return (await self._call(SwitchStepLog, False)).steps

    async def load_adapter(self, name: str, path: str) -> None:
        """Returns when requests can name it. Raises InvalidRequest with the reason if it cannot be served."""
        self._check_adapters_are_on("lora_path")
        effect = partial(self.adapters.change, name, path)
        done = await self._call(LoadAdapter, name, path, effect=effect, seconds=None)
        if done.error is not None:
            raise InvalidRequest(done.error, "lora_path")

    async def unload_adapter(self, name: str) -> None:
        """Running requests keep the adapter; a load of it that is under way is cancelled."""
        self._check_adapters_are_on("lora_name")
        done = await self._call(UnloadAdapter, name, effect=partial(self.adapters.change, name, None))
        if done.error is not None:
            raise InvalidRequest(done.error, "lora_name")

    def _check_adapters_are_on(self, param: str) -> None:
        """Refused here as the engine would refuse it, but without waiting for its step."""
        if not self.adapters.enabled:
            raise AdapterError(
                "adapters are off: start with --enable-lora, --lora-modules or --lora-dir", param
            )

    async def _call(
        self,
        kind: Callable[..., ToEngine],
        *arguments: str | bool,
        effect: Callable[[], None] | None = None,
        seconds: float | None = CALL_SECONDS,
    ) -> Done:
        """`effect` runs if the call succeeds, in the order of the engine's answers, also when its caller is gone.

        `seconds` is the timeout; None: no timeout.
        """
        channel, _ready = self._connected()
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        if effect is not None:
            self._effects[call_id] = effect
        channel.send(kind(call_id, *arguments))
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise EngineDead(f"the engine gave no answer within {seconds:.0f} s") from None
        finally:
            del self._calls[call_id]

    # ------------------------------------------------------------------ called by the supervisor

    def engine_up(self, ready: Ready, channel: "Channel | RelayedEngine") -> None:
        self.ready = ready
        self._channel = channel
        self._reset_stats()
        if isinstance(channel, Channel):  # else the process that supervises the engine does it
            for change in restoring(self.adapters.changes()):
                channel.send(change)

    def engine_down(self, fault: EngineDead) -> None:
        self._channel = None
        self._reset_stats()
        self.fail_open(EngineDead(f"{fault}; it is being restarted: try again in some seconds"))
        self._effects.clear()

    def _reset_stats(self) -> None:
        self.queue = QueueStats()
        self.stats = EngineStats()

    def engine_sent(self, message: FromEngine) -> None:
        match message:
            case Updates():
                self._take(message)
            case FeedRecord(data):
                self.feed.deliver(data)
            case Refused():
                self._streams.refuse(message.request_id, _refusal(message))
            case Done(call_id, queue, stats, error):
                self.queue, self.stats = queue, stats
                effect = self._effects.pop(call_id, None)
                if effect is not None and error is None:
                    effect()
                answer = self._calls.get(call_id)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _take(self, message: Updates) -> None:
        self.queue = message.queue
        if message.stats is not None:
            self.stats = message.stats
        for started in message.started:
            self.admission.start(started.request_id)
            stream = self._streams.get(started.request_id)
            if stream is not None:
                stream.queue_seconds[started.request_id] = started.seconds
        self._streams.deliver(message.pooled or unpack_updates(message))


def message_of(request: Request | EmbedRequest) -> Add | Embed:
    """InvalidRequest for a token id that cannot be sent."""
    try:
        return Add.of(request) if isinstance(request, Request) else Embed.of(request)
    except OverflowError as error:
        raise _unsendable(error) from None


def _encoded(message: Add | Embed) -> bytes:
    try:
        return encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise _unsendable(error) from None


def _unsendable(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the request holds a value that cannot be sent to the engine ({error})")


def _refusal(message: Refused) -> QuireError:
    """The engine's refusal as the error that it was."""
    if message.kind == "invalid":
        return InvalidRequest(message.message, message.param)
    if message.kind == "unavailable":
        return QueueFull(message.message)
    return QuireError(message.message)

"""Messages between the two processes: msgspec structs over one local socket. No pickle, no code."""

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, BinaryIO, TypeVar

import msgspec

from quire.core.config import EngineConfig
from quire.core.request import EmbedRequest, Pooled, Request
from quire.core.sampling import SamplingParams
from quire.core.stats import EngineStats, PoolSize, QueueStats, StartStats, VectorFormat
from quire.core.step import SequenceUpdate
from quire.engine.loop import Started, StepReport
from quire.engine.validation import Limits
from quire.link.step_log import StepRecord
from quire.observe.logs import get_logger

log = get_logger(__name__)
NO_CALL = -1  # the call id of what nothing waits for


class LinkMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An array with its name in front. Both ends are the same version of the same package."""


# ---------------------------------------------------------------------- to the engine


class Add(LinkMessage, frozen=True):
    """A request. Its prompt travels beside it as packed int32, which is much faster than a list."""

    request: Request  # without its prompt
    prompt_token_ids: bytes  # see pack_ints

    @classmethod
    def of(cls, request: Request) -> "Add":
        """OverflowError for a token id that int32 cannot hold."""
        return cls(replace(request, prompt_token_ids=[]), pack_ints(request.prompt_token_ids))

    def unpacked(self) -> Request:
        return replace(self.request, prompt_token_ids=tuple(unpack_ints(self.prompt_token_ids)))


class Embed(LinkMessage, frozen=True):
    """Texts for an encoder: their token ids one after another, and the length of each."""

    request_id: str
    token_ids: bytes  # see pack_ints
    lengths: list[int]
    second_starts: tuple[int, ...] = ()
    masked: tuple[tuple[int, ...], ...] = ()
    top_k: int = 0

    @classmethod
    def of(cls, request: EmbedRequest) -> "Embed":
        """OverflowError for a token id that int32 cannot hold."""
        token_ids = [token_id for text in request.texts for token_id in text]
        masked = tuple(map(tuple, request.masked))
        lengths, seconds = [len(text) for text in request.texts], tuple(request.second_starts)
        return cls(request.request_id, pack_ints(token_ids), lengths, seconds, masked, request.top_k)

    def unpacked(self) -> EmbedRequest:
        token_ids = unpack_ints(self.token_ids)
        ends = accumulate(self.lengths, initial=0)
        texts = [token_ids[start:end] for start, end in pairwise(ends)]
        return EmbedRequest(self.request_id, texts, self.second_starts, self.masked, self.top_k)


class Abort(LinkMessage, frozen=True):
    """Ends requests; no more updates of them are sent."""

    request_ids: list[str]


class Stop(LinkMessage, frozen=True):
    """A stop string appeared in this sequence's text."""

    request_id: str
    index: int


class EngineCall(LinkMessage, frozen=True):
    """Answered by a Done with the same id."""

    call_id: int


class ResetPrefixCache(EngineCall, frozen=True): ...


class CheckIntegrity(EngineCall, frozen=True): ...


class SwitchStepLog(EngineCall, frozen=True):
    """Starts the step log, or stops it: the answer to a stop has the records."""

    on: bool


class ShowRequest(EngineCall, frozen=True):
    """Asks for the tokens and block tables of a request's sequences."""

    request_id: str


class WatchEngine(LinkMessage, frozen=True):
    """Starts the engine's feed with a whole record, or stops it. Has no answer."""

    on: bool


class LoadAdapter(EngineCall, frozen=True):
    """Answered once the adapter is read, however long that takes; steps go on meanwhile."""

    name: str
    path: str  # inside the folder that the engine allows


class UnloadAdapter(EngineCall, frozen=True):
    name: str


class RestoreAdapter(LinkMessage, frozen=True):
    """An adapter that was loaded into the previous engine process: its name is known at once, its file is read at the
    first request for it. Has no answer.
    """

    name: str
    path: str


class Shutdown(LinkMessage, frozen=True):
    """The process ends after the step it is in; open requests are dropped."""


ToEngine = (
    Add
    | Embed
    | Abort
    | Stop
    | ResetPrefixCache
    | CheckIntegrity
    | SwitchStepLog
    | ShowRequest
    | WatchEngine
    | LoadAdapter
    | UnloadAdapter
    | RestoreAdapter
    | Shutdown
)


def restoring(changes: Sequence[tuple[str, str | None]]) -> Iterator[ToEngine]:
    """Repeats operators' changes to the previous engine process. Answers to them have no caller."""
    for name, path in changes:
        yield UnloadAdapter(NO_CALL, name) if path is None else RestoreAdapter(name, path)


# ---------------------------------------------------------------------- from the engine


class Progress(LinkMessage, frozen=True):
    what: str
    done: int
    total: int


class Note(LinkMessage, frozen=True):
    """A line for people, while the engine starts."""

    text: str


class Described(LinkMessage, frozen=True):
    """The model's text side, from which the other process makes tokenizer and chat template."""

    tokenizer_json: str | None
    tokenizer_config: dict[str, Any]  # of the tokenizer in use
    template_config: dict[str, Any]  # of the model itself


class Ready(LinkMessage, frozen=True):
    """The engine serves. Every limit, count and size that its start decided."""

    model: str
    pid: int
    described: Described
    default_sampling: SamplingParams
    limits: Limits
    start: StartStats
    lines: list[str]  # the start report
    pool: PoolSize | None = None  # None: an encoder
    vectors: VectorFormat | None = None  # None: the model generates

    @property
    def vocab_size(self) -> int:
        return self.limits.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def max_num_seqs(self) -> int:
        return self.limits.max_num_seqs


class Failed(LinkMessage, frozen=True):
    """Why the process ends: `kind` is the class of an error that Quire raised on purpose, else "fault"."""

    kind: str
    message: str


class Refused(LinkMessage, frozen=True):
    request_id: str
    kind: str  # "invalid" | "leaving" | "fault"
    message: str
    param: str | None = None


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """The most frequent update, in columns: one more token for a sequence that goes on."""

    request_ids: list[str]
    indices: list[int]
    token_ids: list[int]
    num_cached: list[int]


class Updates(LinkMessage, frozen=True):
    """What one step did: at most one message per step."""

    tokens: Tokens
    others: list[SequenceUpdate]
    pooled: list[Pooled]
    started: list[Started]
    queue: QueueStats
    stats: EngineStats | None  # now and then, not with every step


class FeedRecord(LinkMessage, frozen=True):
    """See link/feed.py."""

    data: bytes


class ShownSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence at the moment of the question."""

    index: int
    num_prompt_tokens: int
    num_computed: int
    token_ids: bytes  # see pack_ints
    block_ids: bytes
    tenant: str


class Done(LinkMessage, frozen=True):
    """Answers the call of that id; `error` says what was wrong."""

    call_id: int
    queue: QueueStats
    stats: EngineStats
    error: str | None = None
    steps: list[StepRecord] = []
    blocks: dict[str, int] = {}  # of CheckIntegrity: recounted, by state
    sequences: list[ShownSequence] = []  # of ShowRequest


FromEngine = Progress | Note | Ready | Failed | Refused | Updates | Done | FeedRecord

# ---------------------------------------------------------------------- bytes

_LENGTH = struct.Struct("<I")
_config: msgspec.msgpack.Decoder[EngineConfig] = msgspec.msgpack.Decoder(EngineConfig)
encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode


T = TypeVar("T")


def decoded(decode: Callable[[bytes], T], data: bytes) -> T | None:
    """The message; None for bytes that are none, which are dropped: they must end no process."""
    try:
        return decode(data)
    except Exception as error:  # of records that are checked when they are made, too
        log.warning("%d bytes that are no message were dropped (%s)", len(data), str(error)[:200])
        return None


def framed_config(config: EngineConfig) -> bytes:
    """The config behind its length, as an engine process reads it from its stdin."""
    data = encode(config)
    return _LENGTH.pack(len(data)) + data


def read_config(stdin: BinaryIO) -> EngineConfig:
    (length,) = _LENGTH.unpack(stdin.read(_LENGTH.size))
    return _config.decode(stdin.read(length))


def pack_ints(values: Sequence[int]) -> bytes:
    """OverflowError for a number that int32 cannot hold."""
    return array("i", values).tobytes()


def unpack_ints(data: bytes) -> list[int]:
    values = array("i")
    values.frombytes(data)
    return values.tolist()


def pack_report(report: StepReport) -> Updates:
    updates: list[SequenceUpdate] = report.updates
    pooled: list[Pooled] = []
    if updates and isinstance(updates[0], Pooled):  # an engine makes one kind
        updates, pooled = [], report.updates
    plain = [u for u in updates if _is_plain(u)]
    others = [u for u in updates if not _is_plain(u)] if len(plain) < len(updates) else []
    tokens = Tokens(
        [u.request_id for u in plain],
        [u.index for u in plain],
        [u.token_ids[0] for u in plain],
        [u.num_cached for u in plain],
    )
    return Updates(tokens, others, pooled, report.started, report.queue, report.stats)


def unpack_updates(message: Updates) -> list[SequenceUpdate]:
    columns = message.tokens
    tokens = [
        SequenceUpdate(request_id, index, (token_id,), num_cached=num_cached)
        for request_id, index, token_id, num_cached in zip(
            columns.request_ids, columns.indices, columns.token_ids, columns.num_cached, strict=True
        )
    ]
    return tokens + message.others


def _is_plain(update: SequenceUpdate) -> bool:
    return (
        update.finish_reason is None
        and len(update.token_ids) == 1
        and not update.logprobs
        and update.prompt_logprobs is None
        and update.error is None
    )

"""What the two processes say to each other: msgspec structs over one local socket. No pickle, no code."""

import struct
from array import array
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from quire.core.config import EngineConfig
from quire.core.pooled import Pooled
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An array with its name in front. Both ends are the same version of the same package."""


# ---------------------------------------------------------------------- to the engine


class Add(_Message, frozen=True):
    request_id: str
    prompt_token_ids: bytes  # int32 in this machine's order: see pack_ints
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    adapter: str | None = None


class Embed(_Message, frozen=True):
    """Texts for an encoder: their token ids one after another, and how many each has."""

    request_id: str
    token_ids: bytes  # int32, as above
    lengths: list[int]


class Abort(_Message, frozen=True):
    """Ends requests; nothing more is said about them."""

    request_ids: list[str]


class Stop(_Message, frozen=True):
    """A stop string appeared in this sequence's text."""

    request_id: str
    index: int


class ResetPrefixCache(_Message, frozen=True):
    call_id: int


class CheckIntegrity(_Message, frozen=True):
    call_id: int


class GetStats(_Message, frozen=True):
    call_id: int


class LoadAdapter(_Message, frozen=True):
    """Done comes when the adapter was read, however long that takes; steps go on meanwhile."""

    call_id: int
    name: str
    path: str  # inside the folder that the engine allows


class UnloadAdapter(_Message, frozen=True):
    call_id: int
    name: str


class RestoreAdapter(_Message, frozen=True):
    """What operators loaded into the engine before this one: the name is known at once, the file is read when someone
    asks. Nobody waits for an answer.
    """

    name: str
    path: str


class Shutdown(_Message, frozen=True):
    """The process ends after the step it is in; whatever still runs is dropped."""


ToEngine = (
    Add
    | Embed
    | Abort
    | Stop
    | ResetPrefixCache
    | CheckIntegrity
    | GetStats
    | LoadAdapter
    | UnloadAdapter
    | RestoreAdapter
    | Shutdown
)

# ---------------------------------------------------------------------- from the engine


class Progress(_Message, frozen=True):
    what: str
    done: int
    total: int


class Note(_Message, frozen=True):
    """A line for people, while the engine starts."""

    text: str


class Described(_Message, frozen=True):
    """The model's text side, from which the other process makes tokenizer and chat template."""

    tokenizer_json: str | None
    tokenizer_config: dict[str, Any]  # of the tokenizer in use
    template_config: dict[str, Any]  # of the model itself


class Ready(_Message, frozen=True):
    """Every limit, count and memory figure that the engine decided."""

    model: str
    pid: int
    described: Described
    default_sampling: SamplingParams
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    pool_bytes: int
    weights_bytes: int
    num_threads: int
    seconds: float
    lines: list[str]  # the same for people


class EncoderReady(_Message, frozen=True):
    """The same of an engine that makes embeddings."""

    model: str
    pid: int
    described: Described
    vocab_size: int
    width: int  # of a vector
    normalize: bool  # vectors are of length one
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weights_bytes: int
    num_threads: int
    seconds: float
    lines: list[str]


class Failed(_Message, frozen=True):
    """Why the process ends: `kind` is the error's class where it was foreseen, else "fault"."""

    kind: str
    message: str


class Refused(_Message, frozen=True):
    request_id: str
    kind: str  # "invalid" | "leaving" | "fault"
    message: str
    param: str | None = None


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """The usual update, in columns: one more token for a sequence that goes on."""

    request_ids: list[str]
    indices: list[int]
    token_ids: list[int]
    num_cached: list[int]


class Began(msgspec.Struct, frozen=True, array_like=True):
    """A request left the queue for the first time, after so many seconds."""

    request_id: str
    seconds: float


class AdapterFigures(msgspec.Struct, frozen=True, array_like=True):
    """What adapters cost and do; all zero where they are off."""

    num_in_pages: int = 0
    num_in_use: int = 0
    num_blocks: int = 0  # of the pool, idle adapters included
    num_blocks_in_use: int = 0
    num_on_host: int = 0
    host_bytes: int = 0
    num_reads: int = 0  # from disk; this and all below only grow
    num_failures: int = 0
    num_loads: int = 0  # from host memory into pages
    num_evictions: int = 0
    num_uses: int = 0  # sequences that began with an adapter
    running: tuple[str, ...] = ()  # some names
    waiting: tuple[str, ...] = ()


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """The engine's gauges and counters as they stand."""

    num_running: int = 0  # sequences
    num_waiting: int = 0  # requests
    num_waiting_tokens: int = 0
    num_blocks_used: int = 0
    num_requests: int = 0  # this and all below only grow
    num_finished: int = 0  # sequences
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    num_steps: int = 0
    step_seconds: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_swaps_out: int = 0  # requests
    num_swaps_in: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swap_blocks_used: int = 0  # a gauge
    offload_saved: int = 0  # blocks, as all that follow
    offload_dropped: int = 0
    offload_hits: int = 0
    offload_disk_hits: int = 0
    offload_disk_faults: int = 0
    offload_blocks_used: int = 0  # a gauge, as the next
    offload_disk_blocks: int = 0
    swap_blocks: int = 0  # how many there are, in use or not
    offload_blocks: int = 0
    adapters: AdapterFigures = AdapterFigures()


class Updates(_Message, frozen=True):
    """What one step did: at most one message per step."""

    tokens: Tokens
    others: list[SequenceUpdate]
    began: list[Began]
    figures: Figures


class Encoded(_Message, frozen=True):
    """What one step of an encoder did."""

    pooled: list[Pooled]
    figures: Figures


class Done(_Message, frozen=True):
    """Answers the call of that id; `error` says what was wrong."""

    call_id: int
    figures: Figures
    error: str | None = None


AnyReady = Ready | EncoderReady
FromEngine = Progress | Note | Ready | EncoderReady | Failed | Refused | Updates | Encoded | Done

# ---------------------------------------------------------------------- bytes

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_config: msgspec.msgpack.Decoder[EngineConfig] = msgspec.msgpack.Decoder(EngineConfig)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)


def framed_config(config: EngineConfig) -> bytes:
    """The config behind its length, as an engine process reads it from its stdin."""
    data = _encoder.encode(config)
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


def pack_updates(updates: list[SequenceUpdate], began: list[Began], figures: Figures) -> Updates:
    plain = [u for u in updates if _is_plain(u)]
    others = [u for u in updates if not _is_plain(u)] if len(plain) < len(updates) else []
    tokens = Tokens(
        [u.request_id for u in plain],
        [u.index for u in plain],
        [u.token_ids[0] for u in plain],
        [u.num_cached for u in plain],
    )
    return Updates(tokens, others, began, figures)


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

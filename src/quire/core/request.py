"""Request: what a client asked for. Sequence: one stream of tokens that answers it. QueueBounds: how many may wait."""

from array import array
from collections import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from quire.core.errors import QueueFull
from quire.core.sampling import SamplingParams

Clock = Callable[[], float]  # seconds since any fixed moment

if TYPE_CHECKING:
    Ints = array[int]
else:
    Ints = array  # array takes no subscript at run time before Python 3.12


def ints(values: Iterable[int] = ()) -> Ints:
    """A compact int32 array, the form in which ids and counts cross rooms; numpy and torch read it without a copy."""
    return array("i", values)


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for. The engine works with a copy that holds what it decided when it accepted the request."""

    request_id: str
    prompt_token_ids: abc.Sequence[int]
    sampling: SamplingParams
    # The next four are set in the accepted copy: engine.validation.RequestValidator.accept.
    seed: int = 0
    max_len: int = 0  # prompt and output together end here
    # the model's end tokens (unless ignored) and the request's own
    stop_token_ids: frozenset[int] = frozenset()
    arrival: float = 0.0  # seconds, monotonic clock
    priority: int = 0  # lower runs first with schedule="priority"
    tenant: str = ""  # the account that schedule="fair" charges
    cache_salt: str = ""
    adapter: str | None = None  # a name; in the accepted copy the key that the name stood for
    # of an encoder-decoder model, in the accepted copy: the encoder's part of the prompt, see core.encoder_input
    num_encoder_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Texts for an encoder, as token ids: each becomes one vector, or predictions of its masked tokens."""

    request_id: str
    texts: abc.Sequence[abc.Sequence[int]]
    second_starts: abc.Sequence[
        int
    ] = ()  # where the second text of each pair begins; empty: there are no pairs
    masked: abc.Sequence[abc.Sequence[int]] = ()  # of each text the positions to predict; empty: vectors
    top_k: int = 0  # predictions of each

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class Pooled:
    """An encoder's answer for one text."""

    request_id: str
    index: int  # of the text in its request
    vector: bytes  # float32, native byte order; empty with an error; of masked tokens the probabilities
    num_tokens: int
    error: str | None = None
    token_ids: bytes = b""  # int32: predicted tokens, `top_k` for each masked one


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Limits on waiting requests and on their prompt tokens; None means no limit. Running requests do not count.

    The engine's queue and the client of an engine process check with it.
    """

    max_requests: int | None = None
    max_tokens: int | None = None

    def check_requests(self, num_waiting: int, num_new: int, num_free_rows: int = 0) -> None:
        """Raises QueueFull; `num_free_rows` requests pass through the queue at once and need no place in it."""
        if self.max_requests is not None and num_waiting + num_new > self.max_requests + num_free_rows:
            raise QueueFull(
                f"{num_waiting} requests are waiting already: try again later, or raise max_queue_requests"
            )

    def check_tokens(self, num_waiting_tokens: int, num_new: int) -> None:
        """Raises QueueFull. An empty queue takes a prompt of any length."""
        if (
            self.max_tokens is not None
            and num_waiting_tokens
            and num_waiting_tokens + num_new > self.max_tokens
        ):
            raise QueueFull(
                f"{num_waiting_tokens} prompt tokens are waiting and {num_new} more would pass {self.max_tokens}: "
                "try again later, or raise max_queue_tokens"
            )


class Phase(Enum):
    """Where a sequence stands in the queues; what it computes next never depends on it."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Sequence:
    """Known tokens, computed tokens, and the blocks that hold K and V of the computed ones.

    `token_ids` are the tokens that the host has read. With a step in flight one more token may exist on the device
    only: `num_pending` counts it. `num_computed` counts positions whose K and V are in blocks, or will be once the
    steps already launched have run.

    Each field has one writer: the memory its blocks and hashes, commit the sampled tokens, the scheduler all others.
    """

    request: Request
    index: int  # which of the request's samples this is
    token_ids: Ints = field(default_factory=ints)
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int = 0  # positions found in the prefix cache at first admission
    row: int = -1
    block_ids: list[int] = field(default_factory=list)  # the block table
    host_block_ids: list[int] = field(default_factory=list)  # the same while it is swapped out
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks of known tokens
    num_indexed: int = 0  # leading blocks that are in the prefix index
    phase: Phase = Phase.WAITING
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    max_computed: int = 0  # the last token of a full sequence needs no K and V
    has_started: bool = False  # the runner has its row, but for the tokens that the host has chosen since
    score: float = 0.0  # of a beam: the sum of its tokens' log probabilities
    is_beam: bool = False  # never pending: its next token is chosen at commit, over all beams of the request

    def __post_init__(self) -> None:
        self.max_computed = self.request.max_len - 1
        self.is_beam = self.request.sampling.use_beam_search

    @property
    def num_known(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def target(self) -> int:
        """How far computation may go now."""
        known = len(self.token_ids) + self.num_pending
        return known if known < self.max_computed else self.max_computed  # min() costs more than all of this

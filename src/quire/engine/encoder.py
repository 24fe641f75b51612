"""EncoderEngine: texts become vectors, first come first served. A text is closed in one step and takes no blocks."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy
import torch

from quire.core.errors import InvalidRequest
from quire.core.request import EmbedRequest, Pooled, QueueBounds
from quire.core.stats import EngineStats, QueueStats, StepStats
from quire.engine.validation import Limits
from quire.layers.encoder import Pooling, assemble_encoder_batch
from quire.models.model import Encoder

Encode = Callable[[Sequence[Sequence[int]]], numpy.ndarray]  # token ids of R texts -> [R, width] float32


@torch.inference_mode()
def encode_texts(
    encoder: Encoder, pooling: Pooling, device: torch.device, texts: Sequence[Sequence[int]]
) -> numpy.ndarray:
    """The forward pass of one step. No text may be empty."""
    batch = assemble_encoder_batch(texts, device)
    return pooling(encoder(batch), batch).cpu().numpy()


@dataclass(frozen=True, slots=True)
class _Text:
    request_id: str
    index: int
    token_ids: Sequence[int]


class EncoderEngine:
    """One encoder, one queue. Not thread-safe: one thread adds, aborts and steps.

    It runs in the same EngineLoop as Engine. Nothing is kept between steps, so there is no memory to check or reset.
    """

    adapters = None

    def __init__(
        self,
        limits: Limits,
        max_num_batched_tokens: int,
        encode: Encode,
        bounds: QueueBounds,
    ) -> None:
        """`max_num_batched_tokens` holds at least one text of the longest length."""
        self.limits = limits
        self.max_num_batched_tokens = max_num_batched_tokens
        self.stats = StepStats()
        self.num_waiting_tokens = 0
        self._bounds = bounds
        self._encode = encode
        self._waiting: dict[str, deque[_Text]] = {}  # by request, in order of arrival; no deque is empty

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    has_requests = has_work

    @property
    def num_waiting(self) -> int:
        """Requests with a text that waits."""
        return len(self._waiting)

    def add(self, request: EmbedRequest) -> None:
        """Queues a request with all its texts, or raises InvalidRequest or QueueFull and changes nothing."""
        request_id, num_tokens = request.request_id, request.num_prompt_tokens
        if request_id in self._waiting:
            raise InvalidRequest(
                f"request id {request_id!r} is already being served: use another", "request_id"
            )
        self.limits.check_texts(request)
        self._bounds.check_requests(len(self._waiting), 1)
        self._bounds.check_tokens(self.num_waiting_tokens, num_tokens)
        texts = (_Text(request_id, index, text) for index, text in enumerate(request.texts))
        self._waiting[request_id] = deque(texts)
        self.num_waiting_tokens += num_tokens
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += num_tokens

    def abort(self, request_id: str) -> bool:
        """Drops the texts of a request that still wait. False if the request is not known."""
        texts = self._waiting.pop(request_id, ())
        self.num_waiting_tokens -= sum(len(text.token_ids) for text in texts)
        return bool(texts)

    def stop(self, request_id: str, index: int) -> bool:
        """A text has no output that could hold a stop string."""
        return False

    def step(self) -> list[Pooled]:
        """Computes the texts at the front of the queue, up to the limits of one step."""
        texts = self._take()
        if not texts:
            return []
        started = time.perf_counter()
        vectors = self._encode([text.token_ids for text in texts])
        self.stats.num_steps += 1
        self.stats.num_finished += len(texts)
        self.stats.num_computed_tokens += sum(len(text.token_ids) for text in texts)
        self.stats.step_seconds += time.perf_counter() - started
        return [_pooled(text, row) for text, row in zip(texts, vectors, strict=True)]

    def started(self, updates: Iterable[Pooled]) -> set[str]:
        """Requests that have left the queue: all their texts have run."""
        return {update.request_id for update in updates}.difference(self._waiting)

    def queue_stats(self) -> QueueStats:
        return QueueStats(num_waiting=len(self._waiting))

    def snapshot(self) -> EngineStats:
        return EngineStats(self.stats)

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def check_integrity(self) -> None:
        """There is no pool."""

    def close(self) -> None:
        """Drops the texts that wait. Calling it twice is fine."""
        self._waiting.clear()
        self.num_waiting_tokens = 0

    def _take(self) -> list[_Text]:
        """In order of arrival: a short text never overtakes a long one, so none waits for ever."""
        taken: list[_Text] = []
        room = self.max_num_batched_tokens
        while self._waiting and len(taken) < self.limits.max_num_seqs:
            texts = next(iter(self._waiting.values()))
            room -= len(texts[0].token_ids)
            if room < 0:
                break
            taken.append(texts.popleft())
            if not texts:
                del self._waiting[taken[-1].request_id]
        self.num_waiting_tokens -= sum(len(text.token_ids) for text in taken)
        return taken


def _pooled(text: _Text, vector: numpy.ndarray) -> Pooled:
    """A vector that is not finite fails its own text and no other."""
    num_tokens = len(text.token_ids)
    if not numpy.isfinite(vector).all():
        message = "the model gave a vector that is not finite: check the weights, or try dtype=float32"
        return Pooled(text.request_id, text.index, b"", num_tokens, message)
    return Pooled(text.request_id, text.index, vector.astype(numpy.float32, copy=False).tobytes(), num_tokens)

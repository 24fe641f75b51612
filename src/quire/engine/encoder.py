"""EncoderEngine: texts become vectors, first come first served. A text is finished in one step and takes no blocks."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy
import torch

from quire.core.errors import InvalidRequest
from quire.core.request import EmbedRequest, Pooled, QueueBounds
from quire.core.stats import QueueStats
from quire.engine.engine import EngineCore
from quire.engine.validation import Limits
from quire.layers.encoder import Pooling, assemble_encoder_batch
from quire.models.model import Encoder


@dataclass(frozen=True, slots=True)
class EncodeStep:
    """R whole texts that go through the encoder together."""

    texts: list[Sequence[int]]  # token ids, none empty


@dataclass(frozen=True, slots=True)
class EncodeResult:
    vectors: numpy.ndarray  # [R, width] float32
    seconds: float


@dataclass(frozen=True, slots=True)
class ScheduledTexts:
    step: EncodeStep
    origins: list[tuple[str, int]]  # [R], request and index of each text

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.step.texts))


class EncoderRunner:
    """The forward pass of an EncodeStep, and pooling."""

    def __init__(self, encoder: Encoder, pooling: Pooling, device: torch.device) -> None:
        self._encoder, self._pooling, self._device = encoder, pooling, device
        self._launched: deque[tuple[torch.Tensor, float]] = deque()

    @torch.inference_mode()
    def launch(self, step: EncodeStep) -> None:
        started = time.perf_counter()
        batch = assemble_encoder_batch(step.texts, self._device)
        self._launched.append((self._pooling(self._encoder(batch), batch), started))

    def collect(self) -> EncodeResult:
        vectors, started = self._launched.popleft()
        return EncodeResult(vectors.cpu().numpy(), time.perf_counter() - started)

    def close(self) -> None:
        self._launched.clear()


class EncoderEngine(EngineCore[Pooled]):
    """An engine that embeds. Nothing is kept between steps, so there is no memory to check or reset."""

    def __init__(self, limits: Limits, runner: EncoderRunner, bounds: QueueBounds) -> None:
        """`max_num_batched_tokens` of the limits holds at least one text of the longest length."""
        super().__init__(limits, runner, steps_in_flight=0)
        self.num_waiting_tokens = 0
        self._bounds = bounds
        self._waiting: dict[
            str, deque[tuple[int, Sequence[int]]]
        ] = {}  # (index, text) by request; none is empty

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting)

    def add(self, request: EmbedRequest) -> None:
        """Queues a request with all its texts, or raises and changes nothing."""
        request_id, num_tokens = request.request_id, request.num_prompt_tokens
        if request_id in self._waiting:
            raise InvalidRequest(
                f"request id {request_id!r} is already being served: use another", "request_id"
            )
        self.limits.check_texts(request)
        self._bounds.check_requests(len(self._waiting), 1)
        self._bounds.check_tokens(self.num_waiting_tokens, num_tokens)
        self._waiting[request_id] = deque(enumerate(request.texts))
        self.num_waiting_tokens += num_tokens
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += num_tokens

    def abort(self, request_id: str) -> bool:
        """Drops the texts of a request that still wait."""
        texts = self._waiting.pop(request_id, ())
        self.num_waiting_tokens -= sum(len(text) for _, text in texts)
        return bool(texts)

    def queue_stats(self) -> QueueStats:
        return QueueStats(num_waiting=len(self._waiting))

    def started(self, updates: Iterable[Pooled]) -> set[str]:
        """A request leaves the queue when all its texts have run."""
        return {update.request_id for update in updates}.difference(self._waiting)

    def close(self) -> None:
        super().close()
        self._waiting.clear()
        self.num_waiting_tokens = 0

    def _schedule(self) -> tuple[list[Pooled], ScheduledTexts | None]:
        """In order of arrival: a short text never overtakes a long one, so none waits for ever."""
        taken: list[Sequence[int]] = []
        origins: list[tuple[str, int]] = []
        room = self.limits.max_num_batched_tokens
        while self._waiting and len(taken) < self.limits.max_num_seqs:
            request_id, texts = next(iter(self._waiting.items()))
            index, text = texts[0]
            if len(text) > room:
                break
            room -= len(text)
            taken.append(text)
            origins.append((request_id, index))
            texts.popleft()
            if not texts:
                del self._waiting[request_id]
        self.num_waiting_tokens -= self.limits.max_num_batched_tokens - room
        return [], ScheduledTexts(EncodeStep(taken), origins) if taken else None

    def _committed(self, scheduled: ScheduledTexts, result: EncodeResult) -> list[Pooled]:
        texts = scheduled.step.texts
        self.stats.num_finished += len(texts)
        return [
            _pooled(*origin, vector, len(text))
            for origin, vector, text in zip(scheduled.origins, result.vectors, texts, strict=True)
        ]


def _pooled(request_id: str, index: int, vector: numpy.ndarray, num_tokens: int) -> Pooled:
    """A vector that is not finite fails its own text and no other."""
    if not numpy.isfinite(vector).all():
        message = "the model gave a vector that is not finite: check the weights, or try dtype=float32"
        return Pooled(request_id, index, b"", num_tokens, message)
    return Pooled(request_id, index, vector.astype(numpy.float32, copy=False).tobytes(), num_tokens)

"""EncoderEngine: texts become vectors, scores or predictions, first come first served. A text is finished in one step
and takes no blocks."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import numpy
import torch

from quire.core.errors import InvalidRequest
from quire.core.request import EmbedRequest, Pooled, QueueBounds
from quire.core.stats import QueueStats
from quire.engine.engine import EngineCore
from quire.engine.validation import Limits
from quire.kernels.registry import keep_threads
from quire.kernels.sm_share import use_stream
from quire.layers.encoder import Pooling, assemble_encoder_batch
from quire.models.encoder_heads import ClassificationHead, MaskHead
from quire.models.model import Encoder

MASKED_ROWS = 64  # masked tokens whose logits over the vocabulary are in memory together
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": partial(torch.softmax, dim=1),
    "sigmoid": torch.sigmoid,
    "none": lambda logits: logits,
}


@dataclass(frozen=True, slots=True)
class WaitingText:
    """A text of a request, with what belongs to it."""

    index: int  # in its request
    token_ids: Sequence[int]
    second_start: int
    masked: Sequence[int] = ()
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class EncodeStep:
    """R whole texts that go through the encoder together."""

    texts: list[Sequence[int]]  # token ids, none empty
    second_starts: Sequence[int] = ()  # [R], or none: there are no pairs
    masked: Sequence[Sequence[int]] = ()  # [R], positions to predict; or none
    top_k: Sequence[int] = ()  # [R], predictions of each; 0: the text gets a vector

    @classmethod
    def of(cls, texts: Sequence[WaitingText]) -> "EncodeStep":
        return cls(
            [text.token_ids for text in texts],
            [text.second_start for text in texts],
            [text.masked for text in texts],
            [text.top_k for text in texts],
        )


@dataclass(frozen=True, slots=True)
class Predictions:
    """The most likely tokens of a text's masked ones."""

    probabilities: numpy.ndarray  # [masked, top_k] float32
    token_ids: numpy.ndarray  # [masked, top_k] int32


@dataclass(frozen=True, slots=True)
class EncodeResult:
    vectors: numpy.ndarray  # [R, width] float32
    seconds: float
    predictions: dict[int, Predictions] = field(default_factory=dict)  # by row of the step


@dataclass(frozen=True, slots=True)
class ScheduledTexts:
    step: EncodeStep
    origins: list[tuple[str, int]]  # [R], request and index of each text

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.step.texts))


@dataclass(frozen=True, slots=True)
class _LaunchedTexts:
    vectors: torch.Tensor
    started: float
    predicted: dict[int, tuple[torch.Tensor, torch.Tensor]]


class EncoderRunner:
    """The forward pass of an EncodeStep; then pooling, or the scores of a classifier, and predictions."""

    def __init__(
        self, encoder: Encoder, pooling: Pooling, device: torch.device, activation: str = "softmax"
    ) -> None:
        """`activation` makes a classifier's scores of its logits: softmax, sigmoid or none."""
        self._encoder, self._pooling, self._device = encoder, pooling, device
        self._activation = _ACTIVATIONS[activation]
        self._keep_threads = keep_threads()  # that the plan set: this thread may run other engines too
        self._launched: deque[_LaunchedTexts] = deque()

    @torch.inference_mode()
    def launch(self, step: EncodeStep) -> None:
        started = time.perf_counter()
        self._keep_threads()
        use_stream()
        batch = assemble_encoder_batch(step.texts, self._device, step.second_starts)
        hidden, head = self._encoder(batch), self._encoder.head
        if isinstance(head, ClassificationHead):
            vectors = self._activation(head(hidden, batch))
        else:
            vectors = self._pooling(hidden, batch)
        predicted = self._predicted(step, hidden, head) if isinstance(head, MaskHead) else {}
        self._launched.append(_LaunchedTexts(vectors, started, predicted))

    def _predicted(
        self, step: EncodeStep, hidden: torch.Tensor, head: MaskHead
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The most likely tokens of the rows that ask for them; MASKED_ROWS of logits exist at a time."""
        starts = [0, *accumulate(map(len, step.texts))]
        predicted = {}
        for row, (positions, top_k) in enumerate(zip(step.masked, step.top_k, strict=True)):
            if top_k == 0:
                continue
            wanted = torch.tensor([starts[row] + position for position in positions], device=self._device)
            parts = [
                head(hidden[part]).softmax(dim=1).topk(top_k, dim=1) for part in wanted.split(MASKED_ROWS)
            ]
            probabilities, token_ids = (torch.cat(columns) for columns in zip(*parts, strict=True))
            predicted[row] = (probabilities, token_ids.int())
        return predicted

    def collect(self) -> EncodeResult:
        launched = self._launched.popleft()
        predictions = {
            row: Predictions(*(column.cpu().numpy() for column in columns))
            for row, columns in launched.predicted.items()
        }
        vectors = launched.vectors.cpu().numpy()
        return EncodeResult(vectors, time.perf_counter() - launched.started, predictions)

    def close(self) -> None:
        self._launched.clear()


class EncoderEngine(EngineCore[Pooled]):
    """An engine that embeds. Nothing is kept between steps, so there is no memory to check or reset."""

    def __init__(self, limits: Limits, runner: EncoderRunner, bounds: QueueBounds) -> None:
        """`max_num_batched_tokens` of the limits holds at least one text of the longest length."""
        super().__init__(limits, runner, steps_in_flight=0)
        self.num_waiting_tokens = 0
        self._bounds = bounds
        self._waiting: dict[str, deque[WaitingText]] = {}  # by request; none is empty

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
        texts = _waiting_texts(request, self.limits.vocab_size)
        self._bounds.check_requests(len(self._waiting), 1)
        self._bounds.check_tokens(self.num_waiting_tokens, num_tokens)
        self._waiting[request_id] = texts
        self.num_waiting_tokens += num_tokens
        self.stats.num_requests += 1
        self.stats.num_prompt_tokens += num_tokens

    def abort(self, request_id: str) -> bool:
        """Drops the texts of a request that still wait."""
        texts = self._waiting.pop(request_id, ())
        self.num_waiting_tokens -= sum(len(text.token_ids) for text in texts)
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
        taken: list[WaitingText] = []
        origins: list[tuple[str, int]] = []
        room = self.limits.max_num_batched_tokens
        while self._waiting and len(taken) < self.limits.max_num_seqs:
            request_id, texts = next(iter(self._waiting.items()))
            text = texts[0]
            if len(text.token_ids) > room:
                break
            room -= len(text.token_ids)
            taken.append(text)
            origins.append((request_id, text.index))
            texts.popleft()
            if not texts:
                del self._waiting[request_id]
        self.num_waiting_tokens -= self.limits.max_num_batched_tokens - room
        return [], ScheduledTexts(EncodeStep.of(taken), origins) if taken else None

    def _committed(self, scheduled: ScheduledTexts, result: EncodeResult) -> list[Pooled]:
        texts = scheduled.step.texts
        self.stats.num_finished += len(texts)
        return [
            _pooled(*origin, vector, len(text), result.predictions.get(row))
            for row, (origin, vector, text) in enumerate(
                zip(scheduled.origins, result.vectors, texts, strict=True)
            )
        ]


def _waiting_texts(request: EmbedRequest, vocab_size: int) -> deque[WaitingText]:
    """The texts with what belongs to each. Raises InvalidRequest where that does not fit them."""
    lengths = [len(text) for text in request.texts]
    seconds = request.second_starts or lengths
    masked = request.masked or [()] * len(lengths)
    if len(seconds) != len(lengths) or len(masked) != len(lengths):
        raise InvalidRequest(
            f"there are {len(lengths)} texts, {len(seconds)} starts of second texts and {len(masked)} lists of masked "
            "positions: give one for each text",
            "input",
        )
    if not 0 <= request.top_k <= vocab_size:
        raise InvalidRequest(f"top_k={request.top_k} is outside 1 to {vocab_size}: change it", "top_k")
    for length, positions in zip(lengths, masked, strict=True):
        if request.top_k and not positions:
            raise InvalidRequest("a text has no masked token to predict: put one in", "input")
        if positions and not 0 <= min(positions) <= max(positions) < length:
            raise InvalidRequest(f"a masked position is outside a text of {length} tokens", "input")
    return deque(
        WaitingText(index, text, seconds[index], masked[index], request.top_k)
        for index, text in enumerate(request.texts)
    )


def _pooled(
    request_id: str, index: int, vector: numpy.ndarray, num_tokens: int, predictions: Predictions | None
) -> Pooled:
    """A vector that is not finite fails its own text and no other."""
    token_ids = b""
    if predictions is not None:
        vector, token_ids = predictions.probabilities, predictions.token_ids.tobytes()
    if not numpy.isfinite(vector).all():
        message = "the model gave a vector that is not finite: check the weights, or try dtype=float32"
        return Pooled(request_id, index, b"", num_tokens, message)
    numbers = vector.astype(numpy.float32, copy=False).tobytes()
    return Pooled(request_id, index, numbers, num_tokens, token_ids=token_ids)

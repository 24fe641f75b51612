"""The queue of an encoder: first come first served, bounded, and one text's trouble is its own."""

from dataclasses import replace

import numpy
import pytest

from quire.core.errors import InvalidRequest, QueueFull
from quire.core.request import EmbedRequest, QueueBounds
from quire.engine.encoder import EncoderEngine, EncodeResult, EncoderRunner, EncodeStep, Predictions
from quire.engine.validation import Limits

LIMITS = Limits(vocab_size=100, max_model_len=10, max_num_seqs=3, max_num_batched_tokens=12)
BOUNDS = QueueBounds(max_requests=4, max_tokens=60)


class Summing(EncoderRunner):
    """A vector is (sum of tokens, number of tokens); token 99 gives no number."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self._rows: list[tuple[float, int]] = []

    def launch(self, step: EncodeStep) -> None:
        self.steps.append([len(one) for one in step.texts])
        self._rows = [(float("nan") if 99 in one else sum(one), len(one)) for one in step.texts]

    def collect(self) -> EncodeResult:
        return EncodeResult(numpy.array(self._rows, dtype=numpy.float32), seconds=0.5)

    def close(self) -> None: ...


def drained(engine: EncoderEngine) -> dict[tuple[str, int], list[float]]:
    found = {}
    while engine.has_work:
        for one in engine.step():
            assert one.error is None
            found[one.request_id, one.index] = numpy.frombuffer(one.vector, dtype=numpy.float32).tolist()
    assert (engine.queue_stats().num_waiting, engine.num_waiting_tokens) == (0, 0)
    return found


def test_texts_run_in_order_of_arrival_within_both_limits_of_a_step() -> None:
    runner = Summing()
    engine = EncoderEngine(LIMITS, runner, BOUNDS)
    engine.add(EmbedRequest("a", [[1] * 5, [2] * 5, [3] * 4]))
    engine.add(EmbedRequest("b", [[4]]))
    engine.add(EmbedRequest("c", [[5], [6]]))
    assert (engine.queue_stats().num_waiting, engine.num_waiting_tokens) == (3, 17)
    found = drained(engine)
    assert runner.steps == [
        [5, 5],
        [4, 1, 1],
        [1],
    ]  # the third text would not fit, and b does not overtake it
    assert found == {
        ("a", 0): [5, 5],
        ("a", 1): [10, 5],
        ("a", 2): [12, 4],
        ("b", 0): [4, 1],
        ("c", 0): [5, 1],
        ("c", 1): [6, 1],
    }
    assert (engine.stats.num_requests, engine.stats.num_finished, engine.stats.num_steps) == (3, 6, 3)
    assert (engine.stats.num_computed_tokens, engine.stats.step_seconds) == (17, 1.5)


def test_an_aborted_request_takes_no_more_steps() -> None:
    runner = Summing()
    engine = EncoderEngine(LIMITS, runner, BOUNDS)
    engine.add(EmbedRequest("a", [[1] * 10] * 3))
    engine.add(EmbedRequest("b", [[2]]))
    engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    assert drained(engine) == {("b", 0): [2, 1]}
    assert runner.steps == [[10], [1]]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "nothing to embed"),
        ([[1], []], "no tokens"),
        ([[1] * 11], "11 tokens and this model takes 10"),
        ([[100]], "token id 100 is outside the vocabulary of 100"),
        ([[-1]], "token id -1"),
    ],
)
def test_what_can_never_run_is_refused_whole(texts: list[list[int]], message: str) -> None:
    engine = EncoderEngine(LIMITS, Summing(), BOUNDS)
    with pytest.raises(InvalidRequest, match=message) as caught:
        engine.add(EmbedRequest("a", [[1], *texts] if texts else texts))
    assert caught.value.param == "input"
    assert not engine.has_work


def test_the_queue_is_bounded() -> None:
    engine = EncoderEngine(LIMITS, Summing(), BOUNDS)
    engine.add(EmbedRequest("a", [[1] * 10] * 5))
    with pytest.raises(InvalidRequest, match="already being served"):
        engine.add(EmbedRequest("a", [[1]]))
    with pytest.raises(QueueFull, match="50 prompt tokens are waiting and 20 more would pass 60"):
        engine.add(EmbedRequest("b", [[1] * 10] * 2))
    for name in "cde":
        engine.add(EmbedRequest(name, [[1]]))
    with pytest.raises(QueueFull, match="4 requests are waiting"):
        engine.add(EmbedRequest("f", [[1]]))
    assert len(drained(engine)) == 8


def test_a_vector_that_is_none_fails_its_own_text_alone() -> None:
    engine = EncoderEngine(LIMITS, Summing(), BOUNDS)
    engine.add(EmbedRequest("a", [[1], [99], [2]]))
    first, second, third = engine.step()
    assert (first.error, third.error) == (None, None)
    assert second.vector == b""
    assert "not finite" in str(second.error)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (EmbedRequest("a", [[1], [2]], second_starts=[1]), "2 texts, 1 starts of second texts"),
        (EmbedRequest("a", [[1], [2]], masked=[[0]], top_k=1), "1 lists of masked positions"),
        (EmbedRequest("a", [[1, 2]], masked=[[2]], top_k=1), "outside a text of 2 tokens"),
        (EmbedRequest("a", [[1, 2]], masked=[[]], top_k=1), "no masked token to predict"),
        (EmbedRequest("a", [[1, 2]], masked=[[0]], top_k=101), "top_k=101 is outside 1 to 100"),
    ],
)
def test_what_does_not_belong_to_the_texts_is_refused(request_: EmbedRequest, message: str) -> None:
    engine = EncoderEngine(LIMITS, Summing(), BOUNDS)
    with pytest.raises(InvalidRequest, match=message):
        engine.add(request_)
    assert not engine.has_work


def test_predictions_come_back_for_the_texts_that_ask_and_vectors_for_the_others() -> None:
    runner = Predicting()
    engine = EncoderEngine(LIMITS, runner, BOUNDS)
    engine.add(EmbedRequest("a", [[1, 2, 3]], second_starts=[2]))
    engine.add(EmbedRequest("b", [[4, 5], [6]], masked=[[0, 1], [0]], top_k=2))
    plain, first, second = engine.step()
    assert (plain.token_ids, len(plain.vector)) == (b"", 8)
    assert numpy.frombuffer(first.token_ids, dtype=numpy.int32).tolist() == [0, 0, 1, 1]
    assert numpy.frombuffer(second.vector, dtype=numpy.float32).tolist() == [0.5, 0.5]
    assert runner.seen == [2, 2, 1]  # where second texts begin: the length where there is none


class Predicting(Summing):
    """Predicts a masked token's own position, with a probability of one half."""

    def launch(self, step: EncodeStep) -> None:
        super().launch(step)
        self.seen = list(step.second_starts)
        self._predictions = {
            row: Predictions(
                numpy.full((len(positions), top_k), 0.5, dtype=numpy.float32),
                numpy.repeat(numpy.array(positions, dtype=numpy.int32)[:, None], top_k, axis=1),
            )
            for row, (positions, top_k) in enumerate(zip(step.masked, step.top_k, strict=True))
            if top_k
        }

    def collect(self) -> EncodeResult:
        return replace(super().collect(), predictions=self._predictions)

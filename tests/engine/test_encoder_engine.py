"""The queue of an encoder: first come first served, bounded, and one text's trouble is its own."""

import numpy
import pytest

from quire.core.errors import InvalidRequest, QueueFull
from quire.core.request import EmbedRequest, QueueBounds
from quire.engine.encoder import EncoderEngine, EncodeResult, EncoderRunner, EncodeStep
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

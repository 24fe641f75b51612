"""Messages arrive as they were sent, and a step's updates keep their order."""

import io

import pytest

from quire.core.config import EngineConfig
from quire.core.request import EmbedRequest, Pooled, Request
from quire.core.sampling import SamplingParams
from quire.core.stats import (
    AdapterStats,
    EngineStats,
    PoolSize,
    QueueStats,
    StartStats,
    StepStats,
    VectorFormat,
)
from quire.core.step import SequenceUpdate, TokenLogprobs
from quire.engine.loop import Started, StepReport
from quire.engine.validation import Limits
from quire.link import messages as m

SAMPLING = SamplingParams(
    n=2,
    temperature=0.5,
    stop=("a", "b"),
    logit_bias={7: -1.5},
    bad_words=("no",),
    bad_words_token_ids=((1, 2), (3,)),
    allowed_token_ids=(1, 2, 3),
    seed=2**64 - 1,
    max_tokens=None,
    logprobs=3,
)
STATS = EngineStats(StepStats(num_steps=3, step_seconds=0.5), adapters=AdapterStats(running=("a",)))
DESCRIBED = m.Described("{}", {"a": [1]}, {})
START = StartStats(num_threads=2, weights_bytes=1000, seconds=0.5)
LOGPROBS = TokenLogprobs(5, -0.5, 2, (4, 5), (-0.25, -0.5))


@pytest.mark.parametrize(
    "message",
    [
        m.Add.of(Request("r", [1, 2, 3], SAMPLING, priority=-5, cache_salt="salt", tenant="t", adapter="a")),
        m.Embed.of(EmbedRequest("r", [[1, 2], [3]])),
        m.Abort(["a", "b"]),
        m.Stop("r", 3),
        m.ResetPrefixCache(1),
        m.CheckIntegrity(2),
        m.LoadAdapter(3, "a", "path"),
        m.UnloadAdapter(4, "a"),
        m.RestoreAdapter("a", "path"),
        m.Shutdown(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_goes_to_the_engine_arrives_as_it_was_sent(message):
    assert m.decode_to_engine(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.Progress("weights", 1, 2),
        m.Note("compiling"),
        m.Failed("ConfigError", "no"),
        m.Refused("r", "invalid", "too long", "prompt"),
        m.Done(1, QueueStats(2, 1), STATS, "block 3"),
        m.Ready("m", 1, DESCRIBED, SAMPLING, Limits(9, 8, 7, (1,)), START, ["line"], PoolSize(5, 4, 96)),
        m.Ready("e", 1, DESCRIBED, SAMPLING, Limits(9, 8, 7), START, [], vectors=VectorFormat(384, True)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_comes_from_the_engine_arrives_as_it_was_sent(message):
    assert m.decode_from_engine(m.encode(message)) == message


def test_updates_of_a_sequence_keep_their_order_and_everything_they_hold():
    updates = [
        SequenceUpdate("a", 0, (11,), num_cached=16),
        SequenceUpdate("a", 1, (12,), logprobs=(LOGPROBS,), prompt_logprobs=(LOGPROBS,)),
        SequenceUpdate("b", 0, (13,), finish_reason="stop", stop_reason=13),
        SequenceUpdate("c", 0, (), finish_reason="error", error="not finite"),
        SequenceUpdate("d", 0, (14, 15)),
    ]
    packed = m.pack_report(StepReport(updates, [Started("a", 0.25)], QueueStats(3, 0), STATS))
    assert packed.tokens.token_ids == [11]  # the usual kind travels in columns
    arrived = m.decode_from_engine(m.encode(packed))
    assert isinstance(arrived, m.Updates)
    assert (arrived.started, arrived.queue, arrived.stats) == ([Started("a", 0.25)], QueueStats(3, 0), STATS)
    assert arrived.pooled == []
    assert sorted(m.unpack_updates(arrived), key=updates.index) == updates


def test_requests_arrive_with_their_tokens():
    request = Request("r", (1, 2**31 - 1), SAMPLING, tenant="t", adapter="a")
    assert m.Add.of(request).unpacked() == request
    embed = EmbedRequest("r", [[1, 2], [3], [4, 5, 6]])
    assert m.Embed.of(embed).unpacked() == embed
    embed = EmbedRequest("r", [[1, 2], [3]], (1, 1), ((0, 1), (0,)), 5)
    assert m.Embed.of(embed).unpacked() == embed


def test_vectors_of_an_encoder_arrive_in_their_own_list():
    pooled = [Pooled("a", 0, b"1234", 5), Pooled("a", 1, b"", 2, "not finite")]
    arrived = m.decode_from_engine(m.encode(m.pack_report(StepReport(pooled, [], QueueStats(), None))))
    assert isinstance(arrived, m.Updates)
    assert (arrived.pooled, m.unpack_updates(arrived), arrived.stats) == (pooled, [], None)


def test_a_config_travels_through_a_pipe_whole():
    config = EngineConfig.of(
        model="x", block_size=32, num_blocks=5, enable_prefix_caching=False, dtype="float32"
    )
    assert m.read_config(io.BytesIO(m.framed_config(config) + b"more")) == config


def test_token_ids_that_are_no_int32_are_noticed():
    assert m.unpack_ints(m.pack_ints([0, 2**31 - 1])) == [0, 2**31 - 1]
    with pytest.raises(OverflowError):
        m.pack_ints([2**31])

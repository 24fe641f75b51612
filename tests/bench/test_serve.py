"""`quire bench serve`: arrivals, traces, what the figures mean, and a run against a real server."""

import itertools
import json
import math
import random
import statistics

import pytest

from quire.bench.serve import Outcome, Round
from quire.bench.serve_report import parse_goals, parse_percentiles, round_results
from quire.bench.workload import WORDS, WorkloadPlan, arrival_times, make_workload, read_trace, replayed
from quire.core.errors import ConfigError
from quire.text.tokenizer import Tokenizer


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 8.0])
def test_gaps_have_the_mean_that_the_rate_asks_for_and_the_spread_that_burstiness_asks_for(burstiness: float):
    times = arrival_times(20_000, 5.0, burstiness, random.Random(0))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2 / math.sqrt(burstiness), rel=0.05)


def test_an_infinite_rate_is_everything_at_once_and_a_trace_keeps_its_gaps():
    assert arrival_times(3, math.inf, 1.0, random.Random(0)) == [0.0] * 3
    assert replayed([10.0, 11.0, 14.0], speed=2.0) == [0.0, 0.5, 2.0]
    for rate, burstiness in ((0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, 0.0)):
        with pytest.raises(ConfigError):
            arrival_times(3, rate, burstiness, random.Random(0))


def test_traces_of_others_are_read_with_their_times(shared):
    azure = read_trace(str(shared / "data/azure2023/AzureLLMInferenceTrace_conv.csv"))
    assert len(azure) == 19_366
    assert (azure[0].lengths.num_prompt_tokens, azure[0].lengths.num_output_tokens) == (374, 44)
    assert azure[1].at - azure[0].at == pytest.approx(4.314579, abs=1e-4)
    mooncake = read_trace(str(shared / "data/mooncake/conversation_trace.jsonl"))
    assert len(mooncake) == 12_031
    assert mooncake[0].prefix_ids[:3] == (0, 1, 2)
    assert 3000 < mooncake[-1].at < 4000  # seconds: an hour
    assert read_trace(str(shared / "data/sharegpt_lengths.csv"))[0].at is None


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "x,y\n1,2\n", "line 2: has x, y, but none of prompt_tokens"),
        ("a.csv", "prompt_tokens,output_tokens\n5,no\n", "line 2: cannot be read"),
        ("a.csv", "prompt_tokens,output_tokens\n0,5\n", "holds no request"),
        ("a.jsonl", "[1]\n", "line 1: is no JSON object"),
        ("a.jsonl", "{\n", "line 1: is no valid JSON"),
        ("no.csv", None, "cannot be read"),
    ],
)
def test_a_trace_that_is_none_says_where(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_trace(str(tmp_path / name))


def test_a_prompt_of_n_words_has_n_tokens(shared):
    tokenizer = Tokenizer((shared / "data" / "smollm2_tokenizer" / "tokenizer.json").read_text(), {})
    for word in WORDS:
        assert len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}")) == 1, word
    plan = WorkloadPlan(input_len=300, num_prompts=3, range_ratio=0.5)
    for query in make_workload(plan).queries:
        assert len(tokenizer.encode(query.prompt)) == query.lengths.num_prompt_tokens


def test_a_workload_is_the_same_for_the_same_seed_and_has_new_words_for_each_part():
    plan = WorkloadPlan(dataset="sharegpt", num_prompts=5)
    assert make_workload(plan) == make_workload(plan)
    other = make_workload(WorkloadPlan(dataset="sharegpt", num_prompts=5, part=1)).queries
    assert [query.lengths for query in other] == [query.lengths for query in make_workload(plan).queries]
    assert all(a.prompt != b.prompt for a, b in zip(other, make_workload(plan).queries, strict=True))


def test_pieces_that_a_trace_names_are_the_same_text_and_long_requests_are_left_out(tmp_path):
    rows = [
        {"timestamp": 1000 * i, "input_length": n, "output_length": 5, "hash_ids": ids}
        for i, (n, ids) in enumerate([(600, [1, 2]), (700, [1, 3]), (5000, [4]), (600, [5, 2])])
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = WorkloadPlan(dataset="trace", path=str(path), max_total_tokens=1000)
    workload = make_workload(plan)
    first, second, last = (query.prompt.split() for query in workload.queries)
    assert workload.num_too_long == 1
    assert (len(first), len(second), len(last)) == (600, 700, 600)
    assert first[:512] == second[:512] != last[:512]
    assert workload.times(None, 1.0, 2.0, seed=0) == [0.0, 0.5, 1.5]
    with pytest.raises(ConfigError, match="no times: give --request-rate"):
        make_workload(WorkloadPlan()).times(None, 1.0, 1.0, seed=0)


def outcome(first: float, end: float, num_tokens: int, **changes: object) -> Outcome:
    made = Outcome(sent=10.0, first_token=10.0 + first, ended=10.0 + end, num_output_tokens=num_tokens)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_figures_are_what_the_papers_call_them():
    outcomes = [
        outcome(0.1, 1.1, 11, gaps=[0.1] * 10, num_prompt_tokens=5),
        outcome(0.3, 0.3, 1, num_prompt_tokens=7),
        outcome(0.0, 9.0, 0, error="HTTP 429 queue_full"),
        outcome(0.0, 9.0, 0, error="HTTP 429 queue_full"),
        outcome(0.0, 9.0, 0, error="Connection reset by peer"),
    ]
    one = Round(2.0, 4.0, outcomes, [0.001] * 5, 0.5, 3)
    found = round_results(one, (50.0, 99.0), {"ttft": 200.0, "tpot": 150.0})
    assert (found["num_requests"], found["num_complete"]) == (5, 2)
    assert found["errors"] == {"HTTP 429 queue_full": 2, "Connection reset by peer": 1}
    assert found["output_tokens_per_second"] == 3.0
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["tpot_ms"]["p50"] == pytest.approx(100)  # the answer of one token has none
    assert found["normalised_ms"]["mean"] == pytest.approx((100 + 300) / 2)
    assert found["goodput"] == {"num_good": 1, "requests_per_second": 0.25, "share": 0.2}
    assert found["client"]["cpu_share"] == 0.125


@pytest.mark.parametrize("word", ["ttft", "ttft:x", "ttft:-1", "speed:3"])
def test_goals_that_are_none_are_refused(word):
    assert parse_goals(["ttft:200", "e2el:3e3"]) == {"ttft": 200.0, "e2el": 3000.0}
    with pytest.raises(ConfigError, match="write ttft:MS, tpot:MS, e2el:MS"):
        parse_goals([word])
    with pytest.raises(ConfigError, match="such as 50,90,99"):
        parse_percentiles("50,101")

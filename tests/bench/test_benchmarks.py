"""The benchmarks measure what they say, and say where it was measured."""

import json
import math

import pytest

from quire.bench.drive import Bench, plain_token_ids
from quire.bench.offline import LatencyPlan, ThroughputPlan, run_latency, run_throughput
from quire.bench.report import BenchReport, percentile, summary, write_json
from quire.bench.workload import Lengths, fixed
from quire.core.errors import ConfigError
from quire.text.tokenizer import Tokenizer


def test_throughput_counts_every_token(tiny_built, tmp_path):
    config, built = tiny_built
    lengths = [Lengths(7, 5), Lengths(20, 3), Lengths(200, 9), *fixed(4, 4, 10)]
    finished = []
    report = run_throughput(
        config, built, ThroughputPlan(lengths, "test", "mixed"), lambda: finished.append(1)
    )
    found = report.results
    assert (found["num_requests"], found["num_prompt_tokens"], found["num_output_tokens"]) == (12, 67, 48)
    assert found["num_too_long"] == 1
    assert len(finished) == 12
    assert found["max_running"] == 8
    assert found["total_tokens_per_second"] == pytest.approx(115 / found["seconds"])
    assert found["scheduler"]["fullest_running"] == 8
    assert 0 < found["scheduler"]["schedule_ms"]["mean"] < found["step_ms"]["mean"]
    assert found["num_preemptions"] == 0
    text = report.as_text()
    for word in ("requests/s", "tokens/s, all", "scheduler", "preemptions", "longer than the context"):
        assert word in text
    write_json(report, str(tmp_path / "out.json"))
    record = json.loads((tmp_path / "out.json").read_text())
    assert {"date", "machine", "versions", "settings", "results", "kernels"} <= set(record)
    assert record["settings"]["decided"]["pool_tokens"] == 1024


def test_a_record_holds_only_what_json_can():
    report = BenchReport("test", {"rate": math.inf}, {"seconds": [math.nan, 1.5]}, [])
    record = json.loads(report.as_json(), parse_constant=pytest.fail)
    assert (record["settings"], record["results"]) == ({"rate": "inf"}, {"seconds": [None, 1.5]})


def test_preemptions_of_a_small_pool_are_counted(tiny_built):
    config, built = tiny_built
    report = run_throughput(config, built, ThroughputPlan(fixed(60, 60, 12), "test"))
    assert report.results["num_output_tokens"] == 12 * 60
    # 8 sequences of 120 tokens fit 1,024 slots: nobody gives way
    assert report.results["num_preemptions"] == 0


def test_latency_measures_each_request(tiny_built):
    config, built = tiny_built
    plan = LatencyPlan(batch_size=3, input_len=9, output_len=4, iterations=2)
    found = run_latency(config, built, plan).results
    assert 0 < found["first_token_seconds"]["median"] <= found["request_seconds"]["median"]
    assert found["per_token_seconds"]["median"] > 0
    assert found["batch_seconds"]["max"] >= found["request_seconds"]["max"] * 0.9


def test_one_output_token_has_no_time_per_token(tiny_built):
    config, built = tiny_built
    found = run_latency(config, built, LatencyPlan(output_len=1, input_len=4, iterations=1)).results
    assert found["per_token_seconds"] == {}


def test_random_prompts_hold_no_special_token(tiny_built, shared):
    _, built = tiny_built
    text = (shared / "data" / "smollm2_tokenizer" / "tokenizer.json").read_text()
    tokenizer = Tokenizer(text, {})
    plain = plain_token_ids(built, tokenizer)
    assert not set(plain) & (tokenizer.special_ids | {1, 2})
    assert max(plain) < built.model.vocab_size
    without = plain_token_ids(built, None)
    assert (min(without), max(without)) == (10, 289)


def test_prompts_are_the_same_for_the_same_seed(tiny_built):
    _, built = tiny_built
    first, second = (Bench(built, seed=3).requests(fixed(6, 2, 2)) for _ in range(2))
    assert first == second != Bench(built, seed=4).requests(fixed(6, 2, 2))


def test_percentiles_lie_between_neighbours():
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert summary([3.0, 1.0, 2.0])["median"] == 2.0
    assert summary([]) == {}


def test_a_report_that_cannot_be_written_is_refused(tiny_built):
    config, built = tiny_built
    report = run_latency(config, built, LatencyPlan(output_len=1, input_len=4, iterations=1))
    with pytest.raises(ConfigError, match=r"--output-json /no/such/x\.json: cannot be written"):
        write_json(report, "/no/such/x.json")

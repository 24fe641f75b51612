"""Lengths: fixed, from traces as they are published, from named distributions."""

import statistics

import pytest

from quire.bench.workload import Lengths, fixed, from_csv, named, within
from quire.core.errors import ConfigError


def test_fixed_lengths():
    assert fixed(5, 3, 2) == [Lengths(5, 3)] * 2


@pytest.mark.parametrize(("name", "means"), [("sharegpt", (161, 338)), ("alpaca", (19, 58))])
def test_named_distributions_have_their_means_and_are_seeded(name, means):
    drawn = named(name, 4000, seed=1)
    assert drawn == named(name, 4000, seed=1) != named(name, 4000, seed=2)
    # clipping takes a little off the long end
    assert statistics.fmean(one.num_prompt_tokens for one in drawn) == pytest.approx(means[0], rel=0.15)
    assert statistics.fmean(one.num_output_tokens for one in drawn) == pytest.approx(means[1], rel=0.15)
    assert min(one.num_prompt_tokens for one in drawn) >= 4


def test_an_unknown_distribution_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="--lengths orca is not known: choose one of sharegpt, alpaca"):
        named("orca", 1, 0)


@pytest.mark.parametrize(
    "header",
    ["prompt_tokens,output_tokens", "TIMESTAMP,ContextTokens,GeneratedTokens", "\ufeffInput_Len, Output_Len"],
)
def test_traces_with_the_usual_columns(tmp_path, header):
    path = tmp_path / "trace.csv"
    time = "2023-11-16 18:15:46.68," if "TIMESTAMP" in header else ""
    path.write_text(f"{header}\n{time}10,4\n{time}20,6\n{time}0,3\n")
    drawn = from_csv(str(path), 5, seed=0)  # more than the file has; a row without a prompt is left out
    assert len(drawn) == 5
    assert set(drawn) == {Lengths(10, 4), Lengths(20, 6)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,2\n", "line 2: has a, b, but none of prompt_tokens"),
        (
            "prompt_tokens,output_tokens\n1,x\n",
            r"line 2: cannot be read \(could not convert string to float: 'x'",
        ),
        ("prompt_tokens,output_tokens\n", "holds no request"),
    ],
)
def test_a_trace_that_is_none(tmp_path, text, expected):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        from_csv(str(path), 1, 0)


def test_the_shared_traces_can_be_read(shared):
    for name in (
        "sharegpt_lengths.csv",
        "alpaca_eval_lengths.csv",
        "azure2023/AzureLLMInferenceTrace_conv.csv",
    ):
        assert len(from_csv(str(shared / "data" / name), 50, 0)) == 50


def test_requests_beyond_the_context_are_left_out_and_counted():
    assert within([Lengths(5, 5), Lengths(90, 20)], 100) == ([Lengths(5, 5)], 1)
    with pytest.raises(ConfigError, match="no request fits the context of 8 tokens, the shortest has 10"):
        within([Lengths(5, 5)], 8)

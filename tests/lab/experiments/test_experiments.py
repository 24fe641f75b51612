"""Each experiment, quickly: what it claims holds where it does not depend on time, and its picture is drawn."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from quire.bench.workload import Lengths
from quire.core.errors import ConfigError
from quire_lab.experiments.batching import POLICIES, measure_timelines
from quire_lab.experiments.flash import placed
from quire_lab.experiments.prefix import Scale, chat_trace
from quire_lab.experiments.registry import find
from quire_lab.experiments.waste import spend, table_stages
from quire_lab.report.data import DataFolder
from quire_lab.report.files import write_finding
from tests.train.conftest import make_model

pytest.importorskip("matplotlib")


def found(name, setup, folder):
    """The finding, once it was written down as the command does."""
    experiment = find(name)
    done = write_finding(experiment, experiment.run(setup), 1.0, folder)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in done.pictures)
    record = json.loads((folder / f"{name}.json").read_text())
    assert record["benchmark"] == f"lab {name}"
    assert record["machine"]["cpu"]
    assert record["versions"]["torch"]
    assert done.finding.take_away in (folder / f"{name}.txt").read_text()
    return done.finding


def held(finding, words):
    return next(check.held for check in finding.checks if words in check.claim)


def test_kvcache_gives_the_same_tokens_and_grows_by_another_power(setup, tmp_path):
    finding = found("kvcache", setup, tmp_path)
    assert held(finding, "same tokens")
    assert held(finding, "tokens computed grow as the square")
    assert len(finding.results["seconds_without_cache"]) == finding.results["length"]


def test_roofline_finds_rates_and_a_knee(setup, tmp_path):
    finding = found("roofline", setup, tmp_path)
    assert finding.results["read_bytes_per_second"] > 1e8
    assert finding.results["operations_per_second"] > 1e8
    assert [step["num_sequences"] for step in finding.results["steps"]] == [1, 2, 4, 8]


def test_numbers_follow_from_the_price(setup, tmp_path):
    results = found("numbers", setup, tmp_path).results
    rate = results["decode_tokens_per_second"][1]
    assert results["cost_per_million_tokens_alone"] == pytest.approx(1e6 / rate / 3600)
    assert results["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * (2 if results["bytes_per_parameter"] < 3 else 4)


def test_precision_measures_every_format_that_is_asked_for(setup, tmp_path):
    names = ("checkpoint", "int8", "int8 vector-wise", "nf4-b64", "nf4-b64n")
    finding = found("precision", replace(setup, formats=names, contexts=2), tmp_path)
    results = finding.results["formats"]
    assert list(results) == ["none", "int8", "int8 vector-wise", "nf4-b64", "nf4-b64n"]  # nothing is encoded
    none, nf4, double = (results[name] for name in ("none", "nf4-b64", "nf4-b64n"))
    assert (none["weight_error"], none["mean_kl"], none["equal_greedy_tokens"]) == (0.0, 0.0, 1.0)
    assert none["bits_per_linear_weight"] == 32
    assert nf4["bits_per_linear_weight"] == 4.5
    assert 4.12 < double["bits_per_linear_weight"] < 4.4
    assert nf4["weight_error"] == pytest.approx(0.09, abs=0.01)
    assert all(row["decode_tokens_per_second"]["median"] > 0 for row in results.values())
    assert results["int8"]["resident_bytes"] < none["resident_bytes"]
    for claim in ("NF4 < FP4", "saves 0.373 bits", "same bits alone and in a batch of 80"):
        assert held(finding, claim)
    assert len(finding.results["claims"]["llm_int8"]["outlier_share_by_layer"]) == 2


def test_precision_refuses_what_it_cannot_compare(setup):
    with pytest.raises(
        ConfigError, match=r"--formats int5: is not known, choose from none, checkpoint, int8"
    ):
        find("precision").run(replace(setup, formats=("int5",)))
    with pytest.raises(ConfigError, match="--formats, not --quantization"):
        find("precision").run(replace(setup, engine={**setup.engine, "quantization": "int8"}))
    with pytest.raises(ConfigError, match="on the CPU, not on cuda"):
        find("precision").run(replace(setup, engine={**setup.engine, "device": "cuda"}))


def test_blocksize_large_blocks_hold_fewer_requests(setup, tmp_path):
    finding = found("blocksize", setup, tmp_path)
    assert held(finding, "blocks of 256 holds fewer")
    assert [point["block_size"] for point in finding.results["points"]] == [1, 16, 256]


def test_prefix_computes_less_and_finds_no_more_than_repeats(setup, tmp_path):
    finding = found("prefix", setup, tmp_path)
    assert all(check.held for check in finding.checks)
    for system in finding.results["systems"]:
        assert system["off"]["hit_rate"] == 0.0 < system["on"]["hit_rate"]
        assert set(system["speedup"]) >= {"n", "median", "low", "high", "resolved", "confidence"}


def test_waste_holds_its_claims_on_stand_ins(setup, tmp_path):
    finding = found("waste", setup, tmp_path)
    for words in ("whole block", "no external fragmentation", "less than 40 %"):
        assert held(finding, words), words
    assert (tmp_path / "waste-tables.png").exists()


def test_waste_of_paging_is_under_4_percent_on_real_lengths(real_data):
    lengths = real_data.lengths("sharegpt", 60, 0).lengths
    paged = spend("sharegpt", lengths, "paged", pool_tokens=8192)
    largest = spend("sharegpt", lengths, "max", pool_tokens=8192)
    assert paged.held_waste < 0.04
    assert paged.max_slack < 16
    assert paged.shares["external"] == 0.0
    assert largest.shares["tokens"] < 0.4


def test_waste_no_lengths_make_a_sequence_waste_a_block():
    worst = [Lengths(1 + 16 * (i % 5), 1 + 16 * (i % 3)) for i in range(40)]  # always one token into a block
    spent = spend("worst", worst, "paged", pool_tokens=512)
    assert spent.max_slack == 15
    assert sum(spent.shares.values()) == pytest.approx(1.0)


def test_the_block_tables_are_those_of_the_lecture():
    prompts, later = table_stages()
    assert [entry.filled for entry in prompts.tables["A"]] == [4, 2]
    assert later.words["A"][:6] == ["Alan", "Turing", "is", "a", "computer", "scientist"]
    assert [entry.filled for entry in later.tables["A"]] == [4, 4, 1]
    physical = [entry.physical for entries in later.tables.values() for entry in entries]
    assert len(set(physical)) == len(physical)
    assert physical != sorted(physical)


def test_batching_time_lines_come_from_runs(setup):
    drawn = measure_timelines(replace(setup, time_limit=0.1)).runs
    assert set(drawn) == set(POLICIES)
    assert all(
        last.ended_share == 0.0 < static.ended_share
        for last, static in zip(drawn["continuous"], drawn["static"], strict=True)
    )
    for one in (run for runs in drawn.values() for run in runs):
        assert {row.request_id for moment in one.moments for row in moment.rows} == {
            f"S{i}" for i in range(1, 9)
        }
        assert all(moment.begins <= moment.ends for moment in one.moments)


def test_batching_static_does_well_where_lengths_are_uniform(setup, tmp_path):
    finding = found("batching", setup, tmp_path)
    assert held(finding, "static batches do well on uniform lengths")
    assert held(finding, "never computes for an answer that is over")
    assert (tmp_path / "batching-load.png").exists()


def test_preempt_gives_the_same_tokens_in_all_modes(setup, tmp_path):
    finding = found("preempt", setup, tmp_path)
    assert held(finding, "tokens of a large pool")
    assert held(finding, "preempted in every run")
    assert held(finding, "no token twice")


def test_sharing_is_an_experiment(setup, tmp_path):
    assert len(found("sharing", setup, tmp_path).results["savings"]) == 12


def test_chats_repeat_their_history(real_data, setup):
    scale = Scale(16, 512)
    real = chat_trace(real_data, 200, scale, range(2, 1000), 0, only_returning=True)
    assert real.is_real
    assert 0.2 < real.repeated_share < 0.9
    assert all(len(turn.prompt_token_ids) + turn.num_output_tokens <= 512 for turn in real.turns)
    drawn = chat_trace(replace(setup).data, 50, scale, range(2, 1000), 0)
    assert not drawn.is_real
    assert "stand-in" in drawn.source
    assert drawn.repeated_share > 0.2


def test_adapters_are_batched_and_merged_and_unified_memory_has_no_gaps(setup, tmp_path):
    finding = found("adapters", setup, tmp_path)
    assert held(finding, "no external fragmentation")
    served = finding.results["served"]
    assert {one["mode"] for one in served} == {"base", "batched", "merge"}
    assert all(one["loads"] > 0 for one in served if one["mode"] != "base")


@pytest.fixture
def busy():
    """A process that computes on every processor."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def test_on_a_busy_machine_no_sentence_says_the_opposite(setup, busy):
    finding = find("kvcache").run(replace(setup, time_limit=4.0))
    ratio = finding.results["ratio"]
    if ratio["resolved"]:
        assert ratio["low"] > 1
        assert f"{ratio['n']} pairs)" in finding.take_away
    else:
        assert "not resolved on this machine" in finding.take_away
    by_claim = {check.claim: check for check in finding.checks}
    assert by_claim["both ways give the same tokens"].held
    power = by_claim["without a cache time grows by a higher power of the length (by 0.2 at least)"]
    more = finding.results["time_exponents"]["more"]  # about 0.1 with so small a model, and rarely resolved
    if more["low"] is None or more["low"] < 0.2 <= more["high"]:
        assert power.held is None
    else:
        assert power.held is (more["low"] >= 0.2)


def test_hardly_any_time_gives_a_report_without_claims(setup):
    finding = find("prefix").run(replace(setup, time_limit=1e-6))
    assert finding.take_away.count("not resolved on this machine") == 2
    assert [system["speedup"]["n"] for system in finding.results["systems"]] == [1, 1]


def test_zero_keeps_what_the_formulas_say(setup, tmp_path):
    finding = found("zero", setup, tmp_path)
    assert held(finding, "bytes within 2 %")
    assert held(finding, "losses are those of one rank")
    assert "73.8, 86.1, 98.4 %" in finding.notes[0]


def test_tuning_compares_four_ways(setup, tmp_path):
    model = make_model(tmp_path / "tiny", max_position_embeddings=2048)
    finding = found("tuning", replace(setup, engine={"model": str(model), "device": "cpu"}), tmp_path)
    results = finding.results
    assert list(results) == ["a prompt", "three examples", "three retrieved examples", "fine-tuning"]
    assert results["fine-tuning"]["prompt_tokens"] < results["a prompt"]["prompt_tokens"]
    assert results["a prompt"]["prompt_tokens"] < results["three examples"]["prompt_tokens"]
    assert results["fine-tuning"]["preparation_seconds"] > 0


def test_flash_measures_where_it_is_asked_to(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert [str(part) for part in placed("cpu")] == ["cpu", "torch.float32"]
    assert [str(part) for part in placed("auto")] == ["cuda", "torch.bfloat16"]


def test_flash_keeps_little_for_the_backward_pass(setup, tmp_path):
    finding = found("flash", setup, tmp_path)
    assert held(finding, "plain keeps bytes by the square")
    assert held(finding, "tiles keep bytes in proportion")
    assert finding.results["sparse"][0]["share"] == 1.0
    assert "9.2 times" in finding.notes[0]
    assert " pairs)" in finding.take_away  # times are claimed by their interval, or not resolved
    assert len(finding.results["ratios"]) == 2


def test_search_compares_a_graph_with_every_vector(setup, tmp_path):
    finding = found("search", setup, tmp_path)
    points = finding.results["points"]
    assert {point["metric"] for point in points} == {"cosine", "euclidean"}
    assert max(point["recall"] for point in points) > 0.95
    assert all(0 < point["share"] <= 1.5 for point in points)  # of 400 vectors a wide search sees most
    served = {point["kind"]: point for point in finding.results["served"]}
    assert served["exact"]["recall"] == served["exact, a tenth by a filter"]["recall"] == 1.0
    if "HNSW" in served:
        assert held(finding, "HNSW, a tenth by a filter: recall@10")


def test_rag_needs_its_questions_and_says_so(setup):
    with pytest.raises(ConfigError, match=r"`rag` needs XQuAD's questions: give --data-dir"):
        find("rag").run(setup)


def test_rag_answers_from_files_what_the_model_does_not_know(setup, tmp_path):
    """With the built-in model: the lecture's question, and XQuAD's form with two paragraphs."""
    paragraphs = {"Who baked it?": "Ann baked the bread.", "Where is it?": "The house is in Rome."}
    content = [
        {"context": text, "qas": [{"question": question, "answers": [{"text": text.split()[-1][:-1]}]}]}
        for question, text in paragraphs.items()
    ]
    (tmp_path / "xquad").mkdir()
    (tmp_path / "xquad" / "xquad.en.json").write_text(
        json.dumps({"data": [{"paragraphs": [one]} for one in content]})
    )
    asked = replace(setup, engine={"device": "cpu"}, data=DataFolder(tmp_path))
    finding = found("rag", asked, tmp_path)
    assert held(finding, "33 billion, from grok.txt, and not without it")
    assert {(row["method"], row["k"]) for row in finding.results["answered"]} == {
        ("hybrid", 0), ("hybrid", 1), ("hybrid", 3), ("BM25", 1), ("dense", 1)
    }  # fmt: skip
    assert (tmp_path / "rag-question.png").exists()

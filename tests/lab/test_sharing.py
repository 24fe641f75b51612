"""Sharing: what it saves follows from lengths and widths, and the command shows it beside the paper's ranges."""

import json
from pathlib import Path

import pytest

from quire.bench.workload import Lengths
from quire.cli.main import main
from quire_lab.measure.sharing import BLOCK_SIZE, SharingWorkload, measure_saving
from quire_lab.report.sharing import METHODS, take_away


def test_parallel_samples_share_the_full_blocks_of_their_prompt() -> None:
    prompt, output, width = 40, 30, 4
    saving = measure_saving(
        SharingWorkload("alpaca", "test", [Lengths(prompt, output)] * 3), "parallel", width, 0
    )
    # samples part with their second token: from then on all but the prompt's two full blocks are their own
    lengths = range(prompt + 1, prompt + output)
    unshared = sum(width * -(-length // BLOCK_SIZE) for length in lengths) * 3
    saved = (prompt // BLOCK_SIZE) * (width - 1) * len(lengths) * 3
    assert saving.percent == pytest.approx(100 * saved / unshared, abs=1.5)
    assert saving.copies == 3 * (width - 1)


def test_beams_save_more_and_never_all() -> None:
    workload = SharingWorkload("alpaca", "test", [Lengths(20, 60)] * 6)
    for width in (2, 4):
        beams = measure_saving(workload, "beam", width, 0)
        assert (
            measure_saving(workload, "parallel", width, 0).percent < beams.percent < 100 * (width - 1) / width
        )
        assert measure_saving(workload, "beam", width, 0) == beams


def test_the_command_prints_draws_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n20,12\n33,20\n")
    picture, record = tmp_path / "sharing.png", tmp_path / "sharing.json"
    words = ["bench", "sharing", "--num-prompts", "3", "--rounds", "0", "--alpaca-csv", str(lengths)]
    assert main([*words, "--plot", str(picture), "--output-json", str(record)]) == 0
    assert "paper: 38–55 %" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(record.read_text())["results"]["savings"]) == 12


def test_the_picture_says_in_one_line_what_it_shows() -> None:
    workload = SharingWorkload("alpaca", "test", [Lengths(20, 30)] * 3)
    savings = [measure_saving(workload, method, 2, 0) for method in METHODS]
    low, high = (f"{one.percent:.0f}" for one in savings)
    assert f"parallel sampling saves {low}–{low} %, beam search saves {high}–{high} %" in take_away(savings)

"""`gpu-sharing` on a GPU's rows: a neighbour that faults and an engine that does not start cost only their lines."""

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire_lab.benchmarks import gpu_sharing as measured
from quire_lab.experiments import gpu_sharing
from quire_lab.report.experiment import Size

RECORD = Path(__file__).parents[3] / "benchmarks" / "results" / "h200_gpu_sharing.json"
REFUSAL = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=85 cannot be used on this GPU: cuBLAS leaves results unwritten"


def recorded():
    return json.loads(RECORD.read_text())


@pytest.fixture
def run(setup, monkeypatch):
    """The experiment on a GPU that measures these rows."""

    def run(rows, has_mps=True):
        def run_mode(mode, device, seconds):
            assert device == "cuda"
            return [
                {key: value for key, value in row.items() if key != "mode"}
                for row in rows
                if row["mode"] == mode
            ]

        monkeypatch.setattr(gpu_sharing.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(gpu_sharing, "mps_tool", lambda: "control" if has_mps else None)
        monkeypatch.setattr(gpu_sharing, "run_mode", run_mode)
        return gpu_sharing.run(replace(setup, size=Size.NORMAL))

    return run


def modes_of(finding):
    return [row[0] for row in finding.tables[0].rows]


def test_the_record_is_reported_with_the_neighbour_that_faults(run):
    finding = run(recorded())
    splits = [f"mps-percent {split}" for split in ("50:50", "70:30", "90:10", "95:5")]
    assert modes_of(finding) == ["alone", "time-slices", "mps", *splits]
    assert [(check.measured, check.held) for check in finding.checks] == [("1.79", True), ("0.46", True)]
    assert finding.take_away.startswith("mps-percent 95:5 gives 1.79 times")
    assert finding.tables[1].rows == [
        ["the neighbour", "faulted: CUDA error: an illegal memory access was encountered"],
        ["the engine beside it", "ended: exit -6"],
        ["one started afterwards, same daemon", "228,213 prompt tokens/s, alone 227,569"],
    ]
    assert len(finding.results["rows"]) == len(recorded()) - 1  # all but NVML's table, which is no mode of it
    assert not [note for note in finding.notes if "left out" in note]


def test_without_mps_the_rest_is_reported(run):
    finding = run([row for row in recorded() if row["mode"] in measured.WITHOUT_MPS], has_mps=False)
    assert modes_of(finding) == ["alone", "time-slices"]
    assert gpu_sharing.NO_MPS in finding.notes
    assert len(finding.tables) == 1
    assert not finding.checks


def test_a_split_that_is_refused_is_left_out_with_the_reason(run):
    refused = {"mode": "mps-percent", "split": "95:5", "role": "decodes", "exit": 1, "error": REFUSAL}
    rows = [refused if (row.get("split"), row["role"]) == ("95:5", "decodes") else row for row in recorded()]
    finding = run(rows)
    assert modes_of(finding)[-1] == "mps-percent 90:10"
    assert finding.take_away.startswith("mps-percent 90:10 gives")
    assert [check.held for check in finding.checks] == [True, False]
    assert f"left out: mps-percent 95:5 (decodes): exit 1: {REFUSAL}" in finding.notes


def test_an_engine_that_ends_beside_another_leaves_out_that_pair_only(run):
    rows = recorded()
    broken = next(row for row in rows if (row.get("split"), row["role"]) == ("70:30", "prompts"))
    broken["error"] = "RuntimeError: CUDA error"
    finding = run(rows)
    assert "mps-percent 70:30" not in modes_of(finding)
    assert "mps-percent 95:5" in modes_of(finding)
    assert "left out: mps-percent 70:30 (prompts): RuntimeError: CUDA error" in finding.notes


def test_a_share_that_does_not_start_leaves_the_other_shares(run):
    dead = {"exit": 1, "error": "needs green contexts"}
    rows = [
        {"mode": "steps", "role": row["role"], **dead} if row["role"] in ("29", "43") else row
        for row in recorded()
    ]
    finding = run(rows)
    assert "left out: steps (29, 43): exit 1: needs green contexts" in finding.notes


def test_the_neighbour_that_does_not_fault_is_not_said_to_have_faulted(run):
    rows = [row for row in recorded() if row["mode"] != "fault"]
    alive = next(row for row in rows if row["role"] == "prompts") | {"mode": "fault"}
    finding = run([*rows, alive, {"mode": "fault", "role": "fault", "exit": 1}])
    assert finding.tables[1].rows == [
        ["the neighbour", "did not fault: exit 1"],
        ["the engine beside it", "227,569 prompt tokens/s, alone 227,569"],
    ]


def test_two_engines_of_which_no_pair_starts_are_an_error(run):
    rows = [
        {"mode": mode, "role": role, "exit": 1, "error": "no memory"}
        for mode in ("alone", "time-slices")
        for role in ("decodes", "prompts")
    ]
    with pytest.raises(ConfigError, match=r"alone \(decodes, prompts\): exit 1: no memory"):
        run(rows)


def test_at_most_three_pairs_are_in_memory_at_once(monkeypatch):
    groups = []

    def run_groups(pairs, device, seconds):
        groups.append(len(pairs))
        return ([{"role": role} for role in pair] for pair in pairs)

    monkeypatch.setattr(measured, "run_groups", run_groups)
    rows = list(measured.under_mps("mps-percent", {}, "cuda", 1.0, measured.SPLITS, None))
    assert [row["split"] for row in rows] == [split for split in measured.SPLITS.split(",") for _ in range(2)]
    assert sum(role.memory for role in measured.ROLES.values()) * max(groups) < 0.9
    assert sum(groups) == len(measured.SPLITS.split(","))


def test_engines_on_a_cpu_keep_to_two_of_the_usable_cores(monkeypatch):
    monkeypatch.setattr(measured.os, "sched_getaffinity", lambda pid: {5, 3, 7})

    def cores(mode):
        return [engine["QUIRE_CORES"] for engine in measured.on_two_cores(mode).values()]

    assert cores("same-cores") == ["3,5", "3,5"]
    assert cores("own-cores") == ["3", "5"]


def test_two_engines_run_on_a_core_each():
    rows = {row["role"]: row for row in measured.run_mode("own-cores", "cpu", 0.3)}
    assert [row.get("error") for row in rows.values()] == ["", ""]
    usable = sorted(os.sched_getaffinity(0))[:2]
    assert (rows["decodes"]["cores"], rows["prompts"]["cores"]) == (usable[:1], usable[-1:])


def test_an_engine_that_does_not_get_ready_is_reported(monkeypatch):
    monkeypatch.setattr(measured, "START_SECONDS", 0.1)

    def start(stack, folder, child, environment, *more):
        process = subprocess.Popen(["sleep", "600"])
        stack.callback(process.kill)
        return process

    monkeypatch.setattr(measured, "_start", start)
    (rows,) = measured.run_groups([{"decodes": {}, "prompts": {}}], "cpu", 1.0)
    late = {"exit": -signal.SIGKILL, "error": "not ready in 0.1 s"}
    assert rows == [{"role": "decodes", **late}, {"role": "prompts", **late}]


def test_a_process_says_why_its_engine_did_not_start(tmp_path):
    with pytest.raises(SystemExit), measured.record_failure(tmp_path / "0-decodes.json", "decodes", end=exit):
        raise ConfigError(REFUSAL)
    assert json.loads((tmp_path / "0-decodes.json").read_text()) == {
        "role": "decodes",
        "exit": 1,
        "error": f"ConfigError: {REFUSAL}",
    }

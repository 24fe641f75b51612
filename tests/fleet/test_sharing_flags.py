"""Flags of `quire plan --mig` and `--fleet` that do not go together are refused, in one line that names them."""

from pathlib import Path

import pytest

from quire.cli.main import main
from quire_lab.measure import slices

MIG = ("--mig", "a100-80g")
FLEET = ("--fleet", "fleet.yaml")


@pytest.mark.parametrize(("words", "said"), [
    (("llama-7b", *MIG, "--users", "2", "--figure", "x.png"), "--figure draws 1 to 64 users, and --users asks for one"),
    (("llama-7b", *MIG, "--figure", "x.bad"), "--figure x.bad: end its name in .png or .svg"),
    (("llama-7b", *MIG, "--figure", "x"), "--figure x: end its name in .png or .svg"),
    (("llama-7b", *MIG, "--write", "folder"), "--write is for the plan of a fleet: give --fleet FILE"),
    (("llama-7b", *MIG, "--before", "mig-parted.yaml"), "--before is for the plan of a fleet: give --fleet FILE"),
    (("llama-7b", "--write", "folder"), "--write is for the plan of a fleet"),
    (("llama-7b", "--users", "2"), "--users is for a model on slices: give both"),
    (("llama-7b", "--figure", "x.png"), "--figure is for a model on slices"),
    ((*MIG, "--users", "2"), "--users is for a model on slices"),
    ((*MIG, *FLEET), "--mig changes nothing beside --fleet"),
    ((*FLEET, "--users", "2"), "--users changes nothing beside --fleet"),
    ((*FLEET, "--figure", "x.png"), "--figure changes nothing beside --fleet"),
    ((*FLEET, "--slo-request", "1s"), "--slo-request changes nothing beside --fleet"),
    ((*FLEET, "--slo-per-token", "50ms"), "--slo-per-token changes nothing beside --fleet"),
    ((*FLEET, "--prompt-tokens", "512"), "--prompt-tokens changes nothing beside --fleet"),
    ((*FLEET, "--output-tokens", "1"), "--output-tokens changes nothing beside --fleet"),
    ((*FLEET, "--gpu", "h100"), "--gpu changes nothing beside --fleet"),
    (("llama-7b", *FLEET), "MODEL changes nothing beside --fleet"),
    ((*FLEET, "--quantization", "int4"), "--quantization changes nothing beside --fleet"),
    ((*FLEET, "--platform", "kubernetes"), "--platform is of the files that --write makes: give both"),
    (("llama-7b", *MIG, "--platform", "openshift"), "--platform is for the plan of a fleet"),
    (("llama-7b", *MIG, "-tp", "2"), "--tensor-parallel-size changes nothing beside --mig"),
    (("llama-7b", *MIG, "--gpu", "h100"), "--gpu changes nothing beside --mig"),
    (("llama-7b", *MIG, "--context", "100"), "--context changes nothing beside --mig"),
    (("llama-7b", *MIG, "--device", "cpu"), "--device changes nothing beside --mig"),
    (("llama-7b", "--slo-per-token", "50ms"), "--slo-per-token is for a model on slices: give both"),
    ((*MIG, "--quantization", "int4"), "--quantization is for a model on slices"),
])  # fmt: skip
def test_a_flag_that_would_be_ignored_is_refused(words, said, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text("card: h100\nmodels: [{name: a, slice: 1g.10gb}]")
    assert main(["plan", *words]) == 2
    refused = capsys.readouterr().err
    assert said in refused
    assert refused.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.yaml"]


def test_variables_of_other_commands_do_not_stop_a_plan(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "fleet.yaml").write_text("card: h100\nmodels: [{name: a, slice: 1g.10gb}]")
    monkeypatch.setenv("QUIRE_MODEL", "org/other")
    monkeypatch.setenv("QUIRE_NUM_THREADS", "2")
    assert main(["plan", "--fleet", str(tmp_path / "fleet.yaml")]) == 0


@pytest.mark.parametrize(("name", "begins"), [("x.png", b"\x89PNG"), ("y.SVG", b"<?xml")])
def test_a_figure_has_the_format_of_its_name(name, begins, tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    points = [slices.SliceLatency("1g.10gb", users, 0.01 * users, 1.0 * users) for users in (1, 2)]
    monkeypatch.setattr(slices, "curve", lambda settings, card, slo: points)
    assert main(["plan", "opt-1.3b", *MIG, "--figure", str(tmp_path / name)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert main(["plan", "opt-1.3b", *MIG, "--figure", str(tmp_path / "none" / name)]) == 2
    assert f"none/{name}: the picture cannot be written" in capsys.readouterr().err

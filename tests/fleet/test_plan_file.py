"""The file of `quire plan --fleet`: the Deployments that its models become."""

import json
import re
from pathlib import Path

import yaml

from quire.cli.flags import engine_settings
from quire.cli.main import command_parser, main
from quire.fleet import manifests


def test_deployments_have_names_of_their_own(tmp_path: Path, capsys) -> None:
    long = "x" * 70
    models = ["a b", "a-b", "A_b", "c", f"{long}1", f"{long}2", "\u00e9", "-"]
    names = manifests.deployment_names(models)
    assert names["c"] == "quire-c"
    assert len(set(names.values())) == len(models)
    assert all(re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in names.values())
    assert manifests.deployment_names(reversed(models)) == names
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(f"card: a100-80g\nmodels: {[{'name': name, 'slice': '1g.10gb'} for name in models]}")
    assert main(["plan", "--fleet", str(fleet), "--write", str(tmp_path)]) == 0
    written = list(yaml.safe_load_all((tmp_path / "deployments.yaml").read_text()))
    assert {one["spec"]["selector"]["matchLabels"]["app"] for one in written} == set(names.values())


def test_the_arguments_of_a_deployment_are_those_of_quire_serve(tmp_path: Path) -> None:
    settings = {
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "seed": -1,
        "lora_modules": ["a=x", "b=y"],
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    fleet = tmp_path / "fleet.yaml"
    model = {"name": "a b", "model": "org/a", "slice": "1g.10gb", "settings": settings}
    fleet.write_text(yaml.safe_dump({"card": "a100-80g", "models": [model]}))
    assert main(["plan", "--fleet", str(fleet), "--write", str(tmp_path)]) == 0
    (one,) = yaml.safe_load_all((tmp_path / "deployments.yaml").read_text())
    command, *words = one["spec"]["template"]["spec"]["containers"][0]["args"]
    arguments = command_parser(command).parse(words)
    assert arguments.more_models == []
    assert arguments.served_names == ["a b"]
    wanted = {**settings, "model": "org/a"}
    wanted["speculative_config"] = json.dumps(wanted["speculative_config"])
    assert engine_settings(arguments) == wanted

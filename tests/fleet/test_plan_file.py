"""The file of `quire plan --fleet`: what is refused, and the Deployments that its models become."""

import json
import re
from pathlib import Path

import pytest
import yaml

from quire.cli.flags import engine_settings
from quire.cli.main import command_parser, main
from quire.core.errors import ConfigError
from quire.fleet import manifests
from quire.fleet.plan_file import read_fleet


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{name: a, users: 0}", "users is 0"),
        ("{name: a, rate: .inf}", "rate is inf"),
        ("{name: a, rate: 0}", "rate is 0"),
        ("{name: a, colour: red}", "'colour' is not a field"),
        ("{users: 1}", "give at least `name`"),
        ("{name: null, slice: 1g.10gb}", "name is None: give a name of one line, in quotes if need be"),
        ("{name: [a, b]}", "name is .'a', 'b'.: give a name of one line"),
        ('{name: ""}', "name is '': give a name of one line"),
        ('{name: "a\\nb"}', "name is 'a.*b': give a name of one line"),
        ("{name: a, model: null}", "model is None: give a name of one line"),
        ("{name: a, users: 3, rate: 1}", "`users` and `rate` are given: leave one of them out"),
        (
            "{name: a, slice: 1g.10gb, settings: {tensor_parallel_size: 2}}",
            "tensor_parallel_size is 2: leave it to the plan",
        ),
        ("{name: a, settings: {device: cpu}}", "device is 'cpu': leave it to the plan"),
        ("{name: a, slo_per_token: fast}", "slo_per_token is 'fast'"),
        ("{name: a}, {name: a}", "'a' is given twice"),
        ("{name: a, rate: -1}", "rate is -1: give requests per second above 0"),
        ("{name: a, rate: .nan}", "rate is nan"),
        ("{name: a, settings: 5}", "settings is 5: give settings of the engine, as {quantization: int4}"),
        ("{name: a, settings: {model: b}}", "settings is {'model': 'b'}: give settings of the engine"),
        ("{name: a, settings: {colour: red}}", "settings: unknown setting 'colour'"),
        ("{name: a, settings: {max_num_seqs: many}}", "max_num_seqs='many' must be a whole number"),
        ("{name: a, settings: {gpu_memory_utilization: x}}", "models.0. .a.: settings: "),
        ("{name: a, settings: {enforce_eager: 'no'}}", "enforce_eager is 'no': give true or false"),
        (
            "{name: a, settings: {max_num_seqs: true}}",
            "max_num_seqs is True: give its value, not true or false",
        ),
    ],
)
def test_a_fleet_file_is_refused_by_field(tmp_path: Path, model: str, message: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"card: a100-80g\nmodels: [{model}]")
    with pytest.raises(ConfigError, match=message) as refused:
        read_fleet(path)
    assert str(refused.value).startswith(str(path))


def test_a_file_that_is_no_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("card: a100-80g\nmodels:\n\t- {name: a}\n")
    with pytest.raises(ConfigError, match=r"that cannot start any token.* line 3, column 1"):
        read_fleet(path)
    path.write_text("[" * 5000)
    with pytest.raises(ConfigError, match=r"--fleet .*: maximum recursion depth exceeded"):
        read_fleet(path)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("[{name: n}]", "nodes.0. is {'name': 'n'}: give `name` and `gpus`, as {name: gpu-1, gpus: 8}"),
        ("[n]", "nodes.0. is 'n': give `name` and `gpus`"),
        ("3", "nodes is 3: give a list, such as .{name: gpu-1, gpus: 8}"),
        ("[{name: n, gpus: -2}]", "nodes.0.: gpus is -2: give a whole number from 1 to 1,024"),
        ("[{name: n, gpus: 1, colour: red}]", "nodes.0.: 'colour' is not a field"),
        ("[{name: n, gpus: 1}, {name: n, gpus: 2}]", "nodes.1.: name is 'n': give each node's own"),
        ("[{name: n; ls, gpus: 1}]", "nodes.0.: name is 'n; ls': give each node's own, of at most 57 small"),
    ],
)
def test_nodes_of_a_fleet_file_are_refused_by_field(tmp_path: Path, nodes: str, message: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"card: a100-80g\nnodes: {nodes}\nmodels: [{{name: a}}]")
    with pytest.raises(ConfigError, match=message) as refused:
        read_fleet(path)
    assert str(refused.value).startswith(str(path))


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
        "revision": None,
        "lora_modules": ["a=x", "b=y"],
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    fleet = tmp_path / "fleet.yaml"
    model = {"name": "a b", "model": "org/a", "slice": "1g.10gb", "settings": settings}
    fleet.write_text(yaml.safe_dump({"card": "a100-80g", "models": [model]}))
    assert main(["plan", "--fleet", str(fleet), "--write", str(tmp_path)]) == 0
    (one,) = yaml.safe_load_all((tmp_path / "deployments.yaml").read_text())
    words = one["spec"]["template"]["spec"]["containers"][0]["args"]
    arguments = command_parser("serve").parse(words)
    assert arguments.more_models == []
    assert arguments.served_names == ["a b"]
    wanted = {**settings, "model": "org/a"}
    wanted["speculative_config"] = json.dumps(wanted["speculative_config"])
    del wanted["revision"]
    assert engine_settings(arguments) == wanted

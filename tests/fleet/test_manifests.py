"""The files that apply a plan: what they hold, and reading a layout that is in use."""

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from quire.cli.main import main
from quire.core.errors import ConfigError
from quire.fleet import manifests
from quire.fleet.mig import CARDS, multiset
from quire.fleet.packing import Demand, pack

A100 = CARDS["a100-80g"]


def test_files_of_a_plan_go_through_the_planner_again(tmp_path: Path) -> None:
    demands = [Demand("chat", A100.profile("3g.40gb")), Demand("embed", A100.profile("1g.10gb"))] * 2
    gpus = pack(demands, A100)
    nodes = [manifests.Node("a", 1), manifests.Node("b", 2)]
    models = {"chat": ["org/chat", "--quantization", "int4"], "embed": ["org/embed"]}
    manifests.write(tmp_path, gpus, nodes, models, "openshift")
    planned = manifests.read_mig_parted((tmp_path / "mig-parted.yaml").read_text(), A100, nodes)
    assert planned == [*(multiset(gpu.layout) for gpu in gpus), Counter()]
    entries = yaml.safe_load((tmp_path / "mig-parted.yaml").read_text())["mig-configs"]["quire-b"]
    assert [entry["mig-enabled"] for entry in entries] == sorted(entry["mig-enabled"] for entry in entries)
    config_map = yaml.safe_load((tmp_path / "configmap.yaml").read_text())
    assert list(config_map["data"]) == ["config.yaml"]
    assert config_map["metadata"]["namespace"] == "nvidia-gpu-operator"
    assert yaml.safe_load(config_map["data"]["config.yaml"])["version"] == "v1"
    chat, _ = yaml.safe_load_all((tmp_path / "deployments.yaml").read_text())
    container = chat["spec"]["template"]["spec"]["containers"][0]
    assert chat["spec"]["replicas"] == 2
    assert container["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": 1}
    assert container["args"][:3] == ["org/chat", "--quantization", "int4"]
    called = tmp_path / "called"
    for tool in ("oc", "kubectl"):
        (tmp_path / tool).write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
        (tmp_path / tool).chmod(0o755)
    run = ["sh", str(tmp_path / "apply.sh")]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(run, env=environment, check=True, capture_output=True)
    done = called.read_text().splitlines()
    wait = "wait node a b --timeout=15m --for=jsonpath={.metadata.labels.nvidia\\.com/mig\\.config\\.state}=success"
    in_order = ["adm drain a b --ignore-daemonsets", "label node a b nvidia.com/mig.config.state-"]
    in_order += ["label node a nvidia.com/mig.config=quire-a --overwrite", wait, "adm uncordon a b"]
    assert [line for line in done if line in in_order] == in_order
    assert done.index(wait) < done.index("apply -f deployments.yaml")
    called.unlink()
    manifests.write(tmp_path, gpus, [manifests.Node(manifests.NO_NAME, 2)], models, "kubernetes")
    refused = subprocess.run(run, env=environment, check=False, capture_output=True, text=True)
    assert (refused.returncode, called.exists()) == (1, False)
    assert "give `nodes` in the fleet file" in refused.stderr


@pytest.mark.parametrize(("text", "said"), [
    ("version: v2", "version v1 are read, and this one has 'v2': write `version: v1`"),
    ("version: v1\nmig-configs: {a: [{devices: [0], mig-devices: {4g.40gb: 2}}]}", "4g.40gb"),
    ("version: v1\nmig-configs: {a: [{devices: [0], mig-devices: {9g.90gb: 1}}]}", "9g.90gb"),
    ("version: v1\nmig-configs: {a: [{mig-devices: {4g.40gb: 1}}]}", "mig-configs: a.0.: devices is None: give a list"),
    ("version: v1\nmig-configs: {a: [{devices: 0}]}", "devices is 0: give a list of indices, such as .0, 1., or all"),
    ("version: v1\nmig-configs: {a: [{devices: [-1]}]}", "devices is -1: give a whole number from 0 to 1,023"),
    ("version: v1\nmig-configs: {a: [{devices: [x]}]}", "devices is 'x': give a whole number from 0"),
    ("version: v1\nmig-configs: {a: [{devices: all}]}", "how many cannot be known: give `nodes` in the fleet file"),
    ("version: v1\nmig-configs: {a: [], b: []}", "has a, b, and which GPUs these are cannot be known: give `nodes`"),
    ("version: v1\nmig-configs: {a: [{devices: [0], mig-devices: {1g.10gb: x}}]}",
     "mig-devices: 1g.10gb is 'x': give a whole number from 1 to 7"),
    ("version: v1\nmig-configs: {a: [{devices: [0], mig-devices: {1g.10gb: -1}}]}", "mig-devices: 1g.10gb is -1: give"),
    ("version: v1\nmig-configs: {a: [{devices: [0], mig-devices: [1g.10gb]}]}", "give slices with their numbers, as"),
    ("version: v1\nmig-configs: {a: 5}", "mig-configs: a is 5: give a list of `devices` with their `mig-devices`"),
    ("version: v1\nmig-configs: {a: [5]}", "mig-configs: a is .5.: give a list"),
    ("version: v1\nmig-configs: 5", "this is no mig-parted file"),
    ("[]", "this is no mig-parted file"), ("{", "this is no mig-parted file"), ("", "this is no mig-parted file"),
    ("[" * 5000, "this is no mig-parted file .RecursionError"),
])  # fmt: skip
def test_a_layout_that_cannot_be_read_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        manifests.read_mig_parted(text, A100)
    assert "\n\n" not in str(refused.value)


def test_gpus_are_read_by_device_index_of_their_node() -> None:
    text = (
        "version: v1\nmig-configs:\n  quire-b: [{devices: all, mig-devices: {7g.80gb: 1}}]\n  quire-a:\n"
        + (
            "  - {devices: [0, 2], mig-enabled: false, mig-devices: {7g.80gb: 1}}\n"
            "  - {devices: [3, 1], mig-enabled: true, mig-devices: {1g.10gb: 7}}\n"
        )
    )
    none, seven, one = Counter(), Counter({"1g.10gb": 7}), Counter({"7g.80gb": 1})
    a, b, new = manifests.Node("a", 4), manifests.Node("b", 2), manifests.Node("new", 1)
    in_order = [none, seven, none, seven, one, one, none]
    assert manifests.read_mig_parted(text, A100, [a, b, new]) == in_order
    assert (
        manifests.read_mig_parted(text, A100, [a]) == in_order[:4]
    )  # a node that left takes its slices along
    with pytest.raises(
        ConfigError, match="devices, of a node with 3 GPUs, is 3: give a whole number from 0 to 2"
    ):
        manifests.read_mig_parted(text, A100, [manifests.Node("a", 3), b])
    with pytest.raises(
        ConfigError, match="mig-configs has quire-b, quire-a: name one quire-new, as its node"
    ):
        manifests.read_mig_parted(text, A100, [new])


def document(required: dict, **more) -> dict:
    return {"type": "object", "properties": required, "required": list(required), **more}


def const(value: str) -> dict:
    return {"const": value}


NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 63}
COUNT = {"type": "integer", "minimum": 1}
MIG_DEVICES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "devices": {
                "anyOf": [const("all"), {"type": "array", "items": {"type": "integer", "minimum": 0}}]
            },
            "device-filter": {"type": ["string", "array"]},
            "mig-enabled": {"type": "boolean"},
            "mig-devices": {"patternProperties": {r"^\d+g\.\d+gb$": COUNT}, "additionalProperties": False},
        },
        "required": ["devices", "mig-enabled"],
        "additionalProperties": False,
    },
}
PARTED = document(
    {"version": const("v1"), "mig-configs": {"additionalProperties": MIG_DEVICES}}, additionalProperties=False
)
SHARED_GPUS = document(
    {"resources": {"type": "array", "items": document({"name": const("nvidia.com/gpu"), "replicas": COUNT})}}
)
# what Kubernetes, the GPU operator, mig-parted and the device plugin require; tests/test_packaging.py has Deployments
SCHEMAS = {
    "mig-parted.yaml": PARTED,
    "configmap.yaml": document(
        {
            "apiVersion": const("v1"),
            "kind": const("ConfigMap"),
            "metadata": document({"name": NAME, "namespace": NAME}),
            "data": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        additionalProperties=False,
    ),
    "clusterpolicy-patch.yaml": document(
        {
            "spec": document(
                {
                    "mig": document({"strategy": {"enum": ["single", "mixed"]}}, additionalProperties=False),
                    "migManager": document({"config": document({"name": NAME})}),
                }
            )
        },
        additionalProperties=False,
    ),
    "device-plugin-mps.yaml": document({"version": const("v1"), "sharing": document({"mps": SHARED_GPUS})}),
    "device-plugin-time-slicing.yaml": document(
        {"version": const("v1"), "sharing": document({"timeSlicing": SHARED_GPUS})}
    ),
    "queries.yaml": {"type": "object", "additionalProperties": {"type": "string", "pattern": "DCGM_FI_"}},
}


@pytest.mark.parametrize("platform", ["kubernetes", "openshift"])
def test_every_file_of_a_plan_is_as_its_schema_requires(tmp_path: Path, platform: str, capsys) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    fleet, folder = tmp_path / "fleet.yaml", tmp_path / "files"
    fleet.write_text(
        "card: a100-80g\nnodes: [{name: gpu-1, gpus: 3}]\nmodels:\n"
        "- {name: Chat 7B, model: org/chat, slice: 3g.40gb, replicas: 3, settings: {quantization: int4}}\n"
        "- {name: embed, model: org/embed, slice: 1g.10gb}\n"
    )
    assert main(["plan", "--fleet", str(fleet), "--write", str(folder), "--platform", platform]) == 0
    capsys.readouterr()
    assert {path.name for path in folder.glob("*.yaml")} == {*SCHEMAS, "deployments.yaml"}
    for name, schema in SCHEMAS.items():
        documents = list(yaml.safe_load_all((folder / name).read_text()))
        assert documents
        for one in documents:
            jsonschema.validate(one, schema)
    inner = yaml.safe_load((folder / "configmap.yaml").read_text())["data"]["config.yaml"]
    jsonschema.validate(yaml.safe_load(inner), PARTED)
    planned = manifests.read_mig_parted(inner, A100)
    assert sum(planned, Counter()) == {"3g.40gb": 3, "1g.10gb": 1}
    chat = next(yaml.safe_load_all((folder / "deployments.yaml").read_text()))
    assert chat["spec"]["selector"]["matchLabels"] == chat["spec"]["template"]["metadata"]["labels"]

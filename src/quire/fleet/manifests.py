"""Files that apply a plan of MIG slices: mig-parted, the GPU operator on Kubernetes or OpenShift, and Deployments.

GPUs without MIG come first in a mixed configuration.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from quire.core.errors import ConfigError
from quire.fleet.mig import multiset
from quire.fleet.packing import Demand, PackedGpu

NAMESPACE = {"kubernetes": "gpu-operator", "openshift": "nvidia-gpu-operator"}
CONFIG_MAP = "quire-mig-config"
CONFIG_KEY = "config.yaml"  # the only key that the operator's MIG manager reads
IMAGE = "quire:latest"
PORT = 8000
# dcgm-exporter labels a slice's metrics with GPU_I_PROFILE and GPU_I_ID; DCGM_FI_DEV_GPU_UTIL is not one of them.
QUERIES = {
    "busy processors of a slice": "avg by (hostname, gpu, GPU_I_PROFILE, GPU_I_ID) (DCGM_FI_PROF_SM_ACTIVE)",
    "busy memory of a slice": "avg by (hostname, gpu, GPU_I_PROFILE, GPU_I_ID) (DCGM_FI_PROF_DRAM_ACTIVE)",
    "busy tensor cores of a slice": (
        "avg by (hostname, gpu, GPU_I_PROFILE, GPU_I_ID) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE)"
    ),
    "memory in use of a slice, share": (
        "DCGM_FI_DEV_FB_USED{GPU_I_PROFILE!=''} / "
        "(DCGM_FI_DEV_FB_USED{GPU_I_PROFILE!=''} + DCGM_FI_DEV_FB_FREE{GPU_I_PROFILE!=''})"
    ),
}


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, and how many GPUs of the plan it has."""

    name: str
    num_gpus: int


def on_nodes(gpus: Sequence[PackedGpu], nodes: Sequence[Node]) -> list[tuple[Node, list[PackedGpu]]]:
    """GPUs of the plan in the order of the nodes. ConfigError where there are too few."""
    have = sum(node.num_gpus for node in nodes)
    if have < len(gpus):
        raise ConfigError(
            f"the plan needs {len(gpus)} GPUs and the nodes have {have}: add {len(gpus) - have}"
        )
    rest, placed = list(gpus), []
    for node in nodes:
        if rest:
            placed.append((node, rest[: node.num_gpus]))
            rest = rest[node.num_gpus :]
    return placed


def mig_parted(placed: Sequence[tuple[Node, Sequence[PackedGpu]]]) -> dict[str, Any]:
    """One configuration per node: GPUs that stay whole first."""
    return {
        "version": "v1",
        "mig-configs": {config_name(node): _devices(gpus, node.num_gpus) for node, gpus in placed},
    }


def config_name(node: Node) -> str:
    return f"quire-{node.name}"


def _devices(gpus: Sequence[PackedGpu], num_gpus: int) -> list[dict[str, Any]]:
    cut = [(index, multiset(gpu.layout)) for index, gpu in enumerate(gpus)]
    unused = list(range(len(gpus), num_gpus))
    entries: list[dict[str, Any]] = []
    if unused:
        entries.append({"devices": unused, "mig-enabled": False})
    entries += [
        {"devices": [index], "mig-enabled": True, "mig-devices": dict(sorted(counts.items()))}
        for index, counts in cut
    ]
    return entries


def config_map(parted: Mapping[str, Any], platform: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": CONFIG_MAP, "namespace": NAMESPACE[platform]},
        "data": {CONFIG_KEY: dump(parted)},
    }


def cluster_policy_patch() -> dict[str, Any]:
    """For `kubectl patch clusterpolicy … --type merge`."""
    return {"spec": {"mig": {"strategy": "mixed"}, "migManager": {"config": {"name": CONFIG_MAP}}}}


def sharing_config(kind: str, replicas: int) -> dict[str, Any]:
    """Of the device plugin, for GPUs without MIG: `mps` or `timeSlicing`."""
    resources = [{"name": "nvidia.com/gpu", "replicas": replicas}]
    return {"version": "v1", "sharing": {kind: {"resources": resources}}}


def deployments(gpus: Sequence[PackedGpu], models: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """One per model and kind of slice. `models`: arguments of `quire serve` for each."""
    counts = Counter(demand for gpu in gpus for demand in gpu.demands)
    ordered = sorted(counts.items(), key=lambda item: (item[0].model, item[0].profile.name))
    return [_deployment(demand, replicas, models[demand.model]) for demand, replicas in ordered]


def _deployment(demand: Demand, replicas: int, serve: Sequence[str]) -> dict[str, Any]:
    name = (
        "".join(c if c.isalnum() else "-" for c in f"quire-{demand.model}".lower())
        .strip("-")[:63]
        .rstrip("-")
    )
    labels = {"app": name}
    probe = {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 5}
    container = {
        "name": "quire",
        "image": IMAGE,
        "args": [
            "serve",
            *serve,
            "--host",
            "0.0.0.0",
            "--port",
            str(PORT),
            "--served-model-name",
            demand.model,
        ],
        "ports": [{"containerPort": PORT, "name": "http"}],
        "resources": {"limits": {f"nvidia.com/mig-{demand.profile.name}": 1}},
        "startupProbe": {**probe, "failureThreshold": 120},
        "readinessProbe": probe,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


def commands(placed: Sequence[tuple[Node, Sequence[PackedGpu]]], platform: str) -> str:
    """A script: apply, label, and the three checks."""
    tool = "oc" if platform == "openshift" else "kubectl"
    namespace = NAMESPACE[platform]
    lines = [
        "#!/bin/sh",
        "# Applies the plan. Drain the nodes first: no process may use a GPU while its layout changes.",
        "set -e",
        f"{tool} apply -f configmap.yaml",
        f"{tool} patch clusterpolicy/cluster-policy --type merge --patch-file clusterpolicy-patch.yaml",
        *(
            f"{tool} label node {node.name} nvidia.com/mig.config={config_name(node)} --overwrite"
            for node, _ in placed
        ),
        "",
        "# 1. the state of the change: success on every node",
        f"{tool} get nodes -L nvidia.com/mig.config,nvidia.com/mig.config.state",
        "# 2. the slices that pods can ask for",
        *(f"{tool} get node {node.name} -o jsonpath='{{.status.allocatable}}'; echo" for node, _ in placed),
        "# 3. what the MIG manager did",
        f"{tool} logs -n {namespace} -l app=nvidia-mig-manager --tail=20",
        f"{tool} apply -f deployments.yaml",
    ]
    return "\n".join(lines) + "\n"


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(*documents: Any) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110)


def write(
    folder: Path,
    gpus: Sequence[PackedGpu],
    nodes: Sequence[Node],
    models: Mapping[str, Sequence[str]],
    platform: str,
) -> None:
    """All files of a plan. The folder is made if need be."""
    placed = on_nodes(gpus, nodes)
    parted = mig_parted(placed)
    files = {
        "mig-parted.yaml": dump(parted),
        "configmap.yaml": dump(config_map(parted, platform)),
        "clusterpolicy-patch.yaml": dump(cluster_policy_patch()),
        "deployments.yaml": dump(*deployments(gpus, models)),
        "device-plugin-mps.yaml": dump(sharing_config("mps", 2)),
        "device-plugin-time-slicing.yaml": dump(sharing_config("timeSlicing", 2)),
        "queries.yaml": dump(QUERIES),
        "apply.sh": commands(placed, platform),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")

"""Files that apply a plan of MIG slices: mig-parted, the GPU operator on Kubernetes or OpenShift, and Deployments.

GPUs without MIG come first in a mixed configuration.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from quire.core.errors import ConfigError
from quire.fleet.mig import COMPUTE_SLICES, Card, check_layout, multiset
from quire.fleet.packing import Demand, PackedGpu

MAX_GPUS = 1024  # of a node or a file
MAX_NAME = 63  # characters of a name or label in Kubernetes
NAMESPACE = {"kubernetes": "gpu-operator", "openshift": "nvidia-gpu-operator"}
CONFIG_MAP = "quire-mig-config"
CONFIG_KEY = "config.yaml"  # the only key that the operator's MIG manager reads
IMAGE = "quire:cuda"  # its entry point is `quire serve --host 0.0.0.0`
PORT = 8000
NO_NAME = "NODE"  # of a node where the fleet file has none
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
    """GPUs of the plan in the order of the nodes, which have enough of them."""
    rest, placed = list(gpus), []
    for node in nodes:
        if rest:
            placed.append((node, rest[: node.num_gpus]))
            rest = rest[node.num_gpus :]
    return placed


def mig_parted(placed: Sequence[tuple[Node, Sequence[PackedGpu]]]) -> dict[str, Any]:
    """One configuration per node: GPUs without slices first."""
    return {
        "version": "v1",
        "mig-configs": {config_name(node): _devices(gpus, node.num_gpus) for node, gpus in placed},
    }


def config_name(node: Node) -> str:
    return f"quire-{node.name}"


def _devices(gpus: Sequence[PackedGpu], num_gpus: int) -> list[dict[str, Any]]:
    cut = {index: multiset(gpu.layout) for index, gpu in enumerate(gpus) if gpu.demands}
    whole = [index for index in range(num_gpus) if index not in cut]
    entries: list[dict[str, Any]] = [{"devices": whole, "mig-enabled": False}] if whole else []
    entries += [
        {"devices": [index], "mig-enabled": True, "mig-devices": dict(sorted(counts.items()))}
        for index, counts in cut.items()
    ]
    return entries


def packed_before(
    text: str, card: Card, demands: Sequence[Demand], nodes: Sequence[Node] = ()
) -> list[PackedGpu]:
    """GPUs with the slices of a mig-parted file. A slice is given to a demand of its profile while there are some, on
    the fullest GPU first: which of the equal slices a pod gets is the cluster's choice.
    """
    left = list(demands)
    in_use = read_mig_parted(text, card, nodes)
    gpus = [
        PackedGpu(card, [Demand("", card.profile(name)) for name in slices.elements()]) for slices in in_use
    ]
    for gpu in sorted(gpus, key=lambda gpu: -gpu.filling):
        for index, unused in enumerate(gpu.demands):
            demand = next((demand for demand in left if demand.profile == unused.profile), None)
            if demand is not None:
                left.remove(demand)
                gpu.demands[index] = demand
    return gpus


def read_mig_parted(text: str, card: Card, nodes: Sequence[Node] = ()) -> list[Counter[str]]:
    """Slices of every GPU from a mig-parted file: those of the nodes one after the other, each by device index. A node
    without a configuration has no slices. Without `nodes`, the file must have one configuration.
    """
    try:
        document = yaml.safe_load(text)
        version = document["version"]
        configs = dict(document["mig-configs"]) if version == "v1" else {}
    except (yaml.YAMLError, RecursionError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"this is no mig-parted file ({type(error).__name__}: {error}): give the mig-parted.yaml that --write made"
        ) from error
    if version != "v1":
        raise ConfigError(
            f"mig-parted files of version v1 are read, and this one has {version!r}: write `version: v1`"
        )
    named = ", ".join(map(str, configs))
    if not nodes and len(configs) > 1:
        raise ConfigError(
            f"mig-configs has {named}, and which GPUs these are cannot be known: give `nodes` in the fleet file"
        )
    if nodes and not any(config_name(node) in configs for node in nodes):
        raise ConfigError(
            f"mig-configs has {named or 'nothing'}: name one {config_name(nodes[0])}, as its node"
        )
    sizes = {config_name(node): node.num_gpus for node in nodes} or dict.fromkeys(configs)
    gpus = []
    for name, num_gpus in sizes.items():
        slices = _slices_by_device(configs.get(name, []), num_gpus, card, f"mig-configs: {name}")
        count = num_gpus or max(slices, default=-1) + 1
        gpus += [slices.get(index, Counter()) for index in range(count)]
    return gpus


def _slices_by_device(entries: Any, num_gpus: int | None, card: Card, where: str) -> dict[int, Counter[str]]:
    """Of one configuration. `num_gpus`: of its node, None where no node is given."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{where} is {entries!r}: give a list of `devices` with their `mig-devices`")
    slices: dict[int, Counter[str]] = {}
    for number, entry in enumerate(entries):
        field = f"{where}[{number}]: mig-devices"
        counts = entry.get("mig-devices") or {}
        if not isinstance(counts, dict):
            raise ConfigError(f"{field} is {counts!r}: give slices with their numbers, as {{1g.10gb: 7}}")
        cut = Counter(
            {name: whole_number(n, f"{field}: {name}", COMPUTE_SLICES) for name, n in counts.items()}
        )
        check_layout(card, cut)
        for index in _indices(entry.get("devices"), num_gpus, f"{where}[{number}]: devices"):
            slices[index] = cut if entry.get("mig-enabled", True) else Counter()
    return slices


def _indices(devices: Any, num_gpus: int | None, where: str) -> Sequence[int]:
    if devices == "all":
        if num_gpus is None:
            raise ConfigError(f"{where} is all, and how many cannot be known: give `nodes` in the fleet file")
        return range(num_gpus)
    if not isinstance(devices, list):
        raise ConfigError(f"{where} is {devices!r}: give a list of indices, such as [0, 1], or all")
    of_node = where if num_gpus is None else f"{where}, of a node with {num_gpus} GPUs,"
    return [whole_number(index, of_node, (num_gpus or MAX_GPUS) - 1, least=0) for index in devices]


def whole_number(value: Any, where: str, most: int, least: int = 1) -> int:
    """ConfigError with the field, its value and the bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{where} is {value!r}: give a whole number from {least} to {most:,}")
    return value


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
    names = deployment_names([demand.model for demand, _ in ordered])
    return [
        _deployment(names[demand.model], demand, count, models[demand.model]) for demand, count in ordered
    ]


def deployment_names(models: Collection[str]) -> dict[str, str]:
    """A name that Kubernetes takes for each model; equal ones end in a hash of the model's name."""
    plain = {model: _resource_name(model, MAX_NAME) for model in models}
    uses = Counter(plain.values())
    for model in [model for model, name in plain.items() if uses[name] > 1]:
        plain[model] = f"{_resource_name(model, MAX_NAME - 9)}-{sha256(model.encode()).hexdigest()[:8]}"
    return plain


def _resource_name(model: str, most: int) -> str:
    return re.sub("[^a-z0-9]", "-", f"quire-{model}".lower())[:most].rstrip("-")


def _deployment(name: str, demand: Demand, replicas: int, serve: Sequence[str]) -> dict[str, Any]:
    labels = {"app": name}
    alive, ready = (
        {"httpGet": {"path": path, "port": PORT}, "periodSeconds": 5} for path in ("/health", "/ready")
    )
    container = {
        "name": "quire",
        "image": IMAGE,
        "args": [*serve, "--port", str(PORT), "--served-model-name", demand.model],
        "ports": [{"containerPort": PORT, "name": "http"}],
        "resources": {"limits": {f"nvidia.com/mig-{demand.profile.name}": 1}},
        "startupProbe": {**alive, "failureThreshold": 120},
        "livenessProbe": alive,
        "readinessProbe": ready,
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
    """A script: apply, drain, label, wait for the slices, uncordon, and the three checks. `placed`: what changes."""
    tool, admin = ("oc", "oc adm") if platform == "openshift" else ("kubectl", "kubectl")
    names, namespace = " ".join(node.name for node, _ in placed), NAMESPACE[platform]
    state, manager = "nvidia.com/mig.config.state", f"daemonset/nvidia-mig-manager -n {namespace}"
    success = r"jsonpath='{.metadata.labels.nvidia\.com/mig\.config\.state}'=success"
    refusal = "echo 'which nodes is not known: give `nodes` in the fleet file, and plan again' >&2; exit 1"
    changes = [
        f"{tool} apply -f configmap.yaml",
        f"{tool} patch clusterpolicy/cluster-policy --type merge --patch-file clusterpolicy-patch.yaml",
        f"{admin} drain {names} --ignore-daemonsets",
        "# The MIG manager reads its file when it starts, and the state of an earlier change may still be success.",
        f"{tool} label node {names} {state}-",
        f"{tool} rollout restart {manager}",
        f"{tool} rollout status {manager}",
        *(
            f"{tool} label node {node.name} nvidia.com/mig.config={config_name(node)} --overwrite"
            for node, _ in placed
        ),
        f"{tool} wait node {names} --timeout=15m --for={success}",
        f"{admin} uncordon {names}",
        "",
    ]
    lines = [
        "#!/bin/sh",
        "# Applies the plan. Pods leave nodes whose slices change: no process may use a GPU meanwhile.",
        "set -e",
        *([refusal] if names == NO_NAME else []),
        *(changes if placed else []),
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
    changed: Collection[int] | None = None,
) -> None:
    """All files of a plan. The folder is made if need be. `changed`: GPUs whose slices are made again; None: all."""
    placed = on_nodes(gpus, nodes)
    firsts = accumulate((node.num_gpus for node, _ in placed), initial=0)
    changing = [
        (node, held)
        for (node, held), first in zip(placed, firsts, strict=False)
        if changed is None or not set(changed).isdisjoint(range(first, first + len(held)))
    ]
    parted = mig_parted(placed)
    files = {
        "mig-parted.yaml": dump(parted),
        "configmap.yaml": dump(config_map(parted, platform)),
        "clusterpolicy-patch.yaml": dump(cluster_policy_patch()),
        "deployments.yaml": dump(*deployments(gpus, models)),
        "device-plugin-mps.yaml": dump(sharing_config("mps", 2)),
        "device-plugin-time-slicing.yaml": dump(sharing_config("timeSlicing", 2)),
        "queries.yaml": dump(QUERIES),
        "apply.sh": commands(changing, platform),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {folder}: {error.strerror}: name a folder that can be written") from error

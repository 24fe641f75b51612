"""`quire plan --fleet` with whole GPUs: from the fleet's file to groups, predicted attainment and commands."""

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.bench.capacity import GPU_CONTEXT_BYTES
from quire.bench.table import aligned
from quire.core.errors import ConfigError, QuireError
from quire.engine.build.ranks import can_be_cut
from quire.fleet.plan_file import FleetFile, FleetModel, WholeCards
from quire.quant.choice import NO_FLOAT8
from quire.weights.architectures import SHAPES
from quire_lab.placement.profile import (
    Sized,
    held_bytes,
    request_bytes,
    serve,
    size_model,
    usable_bytes,
)
from quire_lab.placement.search import (
    Case,
    Filled,
    nodes_of,
    replicas_by_model,
    replicated,
    search,
    shapes_of,
)
from quire_lab.placement.simulate import Group, ModelOnShape, Outcome, ParallelShape, gamma_trace, simulate
from quire_lab.simulate.devices import SimulatedDevice, device_names, find_device

NUM_REQUESTS = (
    2000  # of the trace that guides the search; another one, with another seed, tests what was found
)
TESTED_REQUESTS = 10_000
USUAL_SCALE = 5.0
PORT = 8000
STAGES = (
    "pipeline stages (-pp) are served on CPUs so far, not on GPUs: `max_pp: 1` in the file plans without them"
)


@dataclass(frozen=True)
class Plan:
    fleet: FleetFile
    whole: WholeCards
    case: Case
    filled: Filled
    tested: Outcome  # of what was found, on another trace
    baselines: Mapping[str, Outcome]  # on the same
    devices: Mapping[str, SimulatedDevice]

    @property
    def record(self) -> dict[str, Any]:
        names = [model.name for model in self.fleet.models]
        places = replicas_by_model(self.filled.groups, len(names))
        return {
            "attainment": self.tested.attainment,
            "replication": {name: outcome.attainment for name, outcome in self.baselines.items()},
            "groups": [
                {
                    "gpu": group.gpu, "node": node, "devices": list(gpus), "tp": group.shape.tp, "pp": group.shape.pp,
                    "models": [names[model] for model in group.models],
                }
                for group, node, gpus in self._groups
            ],
            "models": [
                {
                    "name": model.name, "rate": model.rate, "cv": model.slo.get("cv", 1.0),
                    "deadline_s": self.case.deadlines[index], "groups": places[index],
                    "attainment": _share(self.tested, index),
                }
                for index, model in enumerate(self.fleet.models)
            ],
            "commands": self.commands,
            "notes": self.notes,
        }  # fmt: skip

    @property
    def _groups(self) -> list[tuple[Group, int, tuple[int, ...]]]:
        """With the node of each and its GPUs there."""
        nodes = nodes_of(self.filled.groups, self.whole.gpus, self.whole.gpus_per_node)
        assert nodes is not None, "only groups that lie on one node are tried"
        return [(group, *where) for group, where in zip(self.filled.groups, nodes, strict=True)]

    @property
    def _hosts(self) -> list[str]:
        """Of each node: this machine where there is only one."""
        count = 1 + max(node for _, node, _ in self._groups)
        return ["127.0.0.1"] if count == 1 else [f"node-{number}" for number in range(count)]

    @property
    def notes(self) -> list[str]:
        return [STAGES] if any(group.shape.pp > 1 for group in self.filled.groups) else []

    @property
    def commands(self) -> list[str]:
        """Of each model of each group, and of a router before models that several groups have."""
        lines: list[str] = []
        urls: dict[str, list[str]] = {}
        hosts, port = self._hosts, PORT
        for group, node, gpus in self._groups:
            for index in group.models:
                model, served = self.fleet.models[index], self.case.table[group.gpu, group.shape][index]
                assert served is not None, "a group has models that fit it"
                port += 1
                urls.setdefault(model.name, []).append(f"http://{hosts[node]}:{port}")
                command = self._command(model, served, group, gpus, port)
                lines.append(command if len(hosts) == 1 else f"{command} --host 0.0.0.0  # on {hosts[node]}")
        for name, many in urls.items():
            if len(many) > 1:
                port += 1
                lines.append(f"quire route {' '.join(many)} --port {port}  # {name}")
        return lines

    def _command(
        self, model: FleetModel, served: ModelOnShape, group: Group, gpus: Sequence[int], port: int
    ) -> str:
        share = (served.num_bytes - GPU_CONTEXT_BYTES) / self.devices[group.gpu].memory_bytes
        source, name, *flags = map(shlex.quote, [model.source, model.name, *model.flags])
        shape = [f"-{name} {number}" for name, number in group.shape._asdict().items() if number > 1]
        visible = ",".join(str(gpu) for gpu in gpus)
        words = [
            f"CUDA_VISIBLE_DEVICES={visible} quire serve {source}", *shape, *flags,
            f"--gpu-memory-utilization {share:.3f}", f"--max-num-seqs {max(1, len(served.steps))}",
            f"--served-model-name {name}", f"--port {port}",
        ]  # fmt: skip
        return " ".join(words)

    @property
    def text(self) -> str:
        names = [model.name for model in self.fleet.models]
        rows = [["group", "GPUs", "shape", "models"]]
        for index, (group, node, gpus) in enumerate(self._groups):
            held = ", ".join(names[model] for model in group.models) or "none: free"
            where = f"{self._hosts[node]}: {group.gpu} {', '.join(map(str, gpus))}"
            rows.append([str(index), where, str(group.shape), held])
        table = [["model", "requests/s", "cv", "deadline", "in time", "groups"]]
        places = replicas_by_model(self.filled.groups, len(names))
        for index, model in enumerate(self.fleet.models):
            table.append([
                model.name, f"{model.rate:g}", f"{model.slo.get('cv', 1.0):g}",
                f"{self.case.deadlines[index]:.2f} s", f"{_share(self.tested, index):.1%}",
                ", ".join(map(str, places[index])) or "none",
            ])  # fmt: skip
        against = ", ".join(f"{name} {outcome.attainment:.1%}" for name, outcome in self.baselines.items())
        return "\n\n".join([
            f"{self.tested.attainment:.1%} of requests in time (simulated); {against}",
            aligned(rows, right=(0,)), aligned(table, right=(1, 2, 3, 4)),
            "\n".join(["start it with:", *self.commands]), *(f"note: {note}" for note in self.notes),
        ])  # fmt: skip


def _share(outcome: Outcome, model: int) -> float:
    return outcome.num_served[model] / max(1, outcome.num_requests[model])


def make_plan(fleet: FleetFile, seed: int = 0) -> Plan:
    """ConfigError with the model, the number and the nearest thing that works."""
    whole = fleet.whole
    assert whole is not None, "a file with slices is packed"
    devices = {name: _device(name) for name in whole.gpus}
    shapes = {
        name: shapes_of(min(count, whole.gpus_per_node), whole.max_tp, whole.max_pp)
        for name, count in whole.gpus.items()
    }
    sized = [_sized(model) for model in fleet.models]
    table = {
        (name, shape): [serve(model, devices[name], shape) for model in sized]
        for name in devices
        for shape in sorted(shapes[name], key=lambda shape: shape.size)
    }
    deadlines = [
        _deadline(model, sized[index], index, table, devices) for index, model in enumerate(fleet.models)
    ]
    rates = [model.rate for model in fleet.models]
    cvs = [model.slo.get("cv", 1.0) for model in fleet.models]
    case = Case(
        whole.gpus, {name: usable_bytes(device) for name, device in devices.items()}, shapes, table, deadlines,
        gamma_trace(rates, cvs, NUM_REQUESTS, seed), whole.gpus_per_node,
    )  # fmt: skip
    filled = search(case)
    other = gamma_trace(rates, cvs, TESTED_REQUESTS, seed + 1)

    def test(groups: Sequence[Group]) -> Outcome:
        return simulate(other, groups, table, deadlines)

    kinds = {"one model per GPU": 1, "replicas of several models per GPU": None}
    baselines = {name: test(replicated(case, most).groups) for name, most in kinds.items()}
    return Plan(fleet, whole, case, filled, test(filled.groups), baselines, devices)


def _device(name: str) -> SimulatedDevice:
    known = [gpu for gpu in device_names() if find_device(f"simulated:{gpu}").on_gpu]
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise ConfigError(f"gpus: {name!r} is not known: choose from {', '.join(known)}{hint}")
    return find_device(f"simulated:{name}")


def _sized(model: FleetModel) -> Sized:
    lengths = [
        int(model.slo.get(name, usual)) for name, usual in (("prompt_tokens", 512), ("output_tokens", 128))
    ]
    try:
        return size_model({**model.settings, "model": model.source}, *lengths)
    except QuireError as error:
        near = [] if model.source in SHAPES else difflib.get_close_matches(model.source, SHAPES, n=1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise ConfigError(f"{model.name}: {error}{hint}") from error


def _deadline(
    model: FleetModel,
    sized: Sized,
    index: int,
    table: Mapping[tuple[str, ParallelShape], Sequence[ModelOnShape | None]],
    devices: Mapping[str, SimulatedDevice],
) -> float:
    """In seconds. A scale multiplies the latency of a lone request on the smallest shape that holds the model."""
    possible = {key: served.lone for key, row in table.items() if (served := row[index]) is not None}
    if not possible:
        raise ConfigError(f"{model.name}: {_no_room(sized, table, devices)}")
    if "slo_request" not in model.slo:
        smallest = min(possible, key=lambda key: (key[1].size, possible[key]))
        return model.slo.get("slo_scale", USUAL_SCALE) * possible[smallest]
    deadline = model.slo["slo_request"]
    (gpu, shape), least = min(possible.items(), key=lambda item: item[1])
    if least > deadline:
        raise ConfigError(
            f"{model.name}: a lone request takes {least:.3g} s at best (on {gpu}, {shape}), and slo_request is "
            f"{deadline:g} s: give at least {least:.3g} s, or shorten output_tokens={sized.output_tokens}"
        )
    return deadline


def _no_room(
    sized: Sized, table: Mapping[tuple[str, ParallelShape], Any], devices: Mapping[str, SimulatedDevice]
) -> str:
    """With the least number of GPUs that would hold the model."""
    if sized.needs_float8 and not any(device.float8 for device in devices.values()):
        return f"{', '.join(devices)}: {NO_FLOAT8}"
    gpu, device = max(devices.items(), key=lambda item: item[1].memory_bytes)
    largest = max((shape for name, shape in table if name == gpu), key=lambda shape: shape.size)
    have = f"{usable_bytes(device) / 1e9:.1f} GB of each {gpu}"
    if not can_be_cut(sized.model.architecture):
        need = (held_bytes(sized, ParallelShape(1, 1)) + request_bytes(sized, ParallelShape(1, 1))) / 1e9
        why = f"{sized.model.architecture} cannot be cut into ranks and needs {need:.1f} GB, with {have}"
        return f"{why}: use a larger GPU or fewer bits (settings: {{quantization: int4}})"
    need = (held_bytes(sized, largest) + request_bytes(sized, largest)) / 1e9
    powers = (ParallelShape(1 << tp, 1 << pp) for pp in range(4) for tp in range(4))
    enough = [shape for shape in powers if serve(sized, device, shape) is not None]
    more = f"{min(enough, key=lambda shape: shape.size).size} × {gpu} would hold it; " if enough else ""
    return (
        f"no group holds it: {largest.size} × {gpu} ({largest}) would need {need:.1f} GB of each and has {have}: {more}"
        "or use fewer bits (settings: {quantization: int4})"
    )

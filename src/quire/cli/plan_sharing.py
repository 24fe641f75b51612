"""`quire plan --mig` and `--fleet`: slices of a GPU, which one meets an SLO, and many models on few GPUs."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire.bench.table import aligned, counted, in_bytes
from quire.cli.flags import engine_settings
from quire.cli.parser import Parser
from quire.core import laboratory
from quire.core.errors import ConfigError, QuireError
from quire.fleet import nvml
from quire.fleet.manifests import NAMESPACE, NO_NAME, Node, packed_before, whole_number, write
from quire.fleet.mig import MEMORY_SLICES, Card, find_card, layouts, multiset, without_double
from quire.fleet.packing import Demand, PackedGpu, changed, lower_bound, moved, num_used, pack
from quire.fleet.plan_file import OF_DEVICE, SLO_FIELDS, FleetFile, FleetModel, read_fleet, slo_value

AUTO = "auto"
_OF_FILES = ("write", "before", "platform")
_PARTS = ("users", *SLO_FIELDS, "figure", *_OF_FILES)  # flags that need others
_OTHERS = [
    "gpu",
    "memory",
    "bandwidth",
    "tflops",
    "price_per_hour",
    "context",
    "concurrency",
    "train",
    "parameters",
]


def add_arguments(parser: Parser) -> None:
    group = parser.group("sharing GPUs")
    group.add_argument(
        "--mig",
        metavar="GPU",
        help="slices and layouts of this GPU (auto: of this machine's); with a model: the slice that it needs",
    )
    group.add_argument("--slo-per-token", metavar="TIME", help="goal per token (default: 50ms)")
    group.add_argument("--slo-request", metavar="TIME", help="goal per request (default: 10s)")
    group.add_argument("--users", type=int, help="requests at once (default: a table of 1 to 64)")
    group.add_argument("--prompt-tokens", type=int, help="tokens of a prompt (default: 512)")
    group.add_argument("--output-tokens", type=int, help="tokens of an answer (default: 128)")
    group.add_argument("--figure", type=Path, metavar="FILE", help="PNG or SVG of latency over users")
    group.add_argument("--fleet", type=Path, metavar="FILE", help="place the models of this YAML file")
    group.add_argument("--write", type=Path, metavar="FOLDER", help="write the files that apply the plan")
    group.add_argument("--platform", choices=tuple(NAMESPACE), help="for --write (default: kubernetes)")
    group.add_argument(
        "--before",
        type=Path,
        metavar="FILE",
        help="with --fleet: the mig-parted.yaml in use; its slices stay as far as possible",
    )


def is_asked(arguments: argparse.Namespace) -> bool:
    has_part = not arguments.given_flags.isdisjoint(_PARTS)
    return arguments.mig is not None or arguments.fleet is not None or has_part


def run(arguments: argparse.Namespace) -> int:
    settings = engine_settings(arguments)
    _check_flags(arguments, settings)
    if arguments.fleet is not None:
        return _fleet(arguments)
    card = _card_here() if arguments.mig == AUTO else find_card(arguments.mig)
    if "model" not in settings:
        print(_as_json(card) if arguments.json else _tables(card))
        return 0
    slices = laboratory.load("measure.slices", "`quire plan MODEL --mig`")
    asked = {name: value for name in SLO_FIELDS if (value := getattr(arguments, name)) is not None}
    slo = slices.Slo.of(
        {name: slo_value(name, value, f"--{name.replace('_', '-')}") for name, value in asked.items()}
    )
    if arguments.users is not None:
        return _one(arguments, slices, settings, card, slo)
    curves = laboratory.load("report.slice_curves", "`quire plan MODEL --mig`")
    if arguments.figure is not None:
        laboratory.load("report.figure", "--figure").check_matplotlib()
    points = slices.curve(settings, card, slo)
    if arguments.json:
        print(json.dumps([point.record(slo) for point in points], indent=2))
    else:
        print(curves.table(points, card, slo))
    if arguments.figure is not None:
        curves.draw(points, card, slo, arguments.figure)
    return 0


def _check_flags(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """ConfigError for a flag that would change nothing; variables and --config are also for other commands."""
    words = arguments.given_flags | ({"model"} if arguments.model_named is not None else set())
    given = [name for name in ("mig", *_PARTS, *_OTHERS, *settings) if name in words]
    for name in given:
        flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        if arguments.fleet is not None:
            if name not in _OF_FILES:
                raise ConfigError(
                    f"{flag} changes nothing beside --fleet, whose file has GPUs and users: leave it out"
                )
        elif name in _OF_FILES:
            raise ConfigError(f"{flag} is for the plan of a fleet: give --fleet FILE, or leave it out")
        elif arguments.mig is not None and name in (*_OTHERS, *OF_DEVICE):
            raise ConfigError(f"{flag} changes nothing beside --mig, which simulates slices: leave it out")
        elif name != "mig" and (arguments.mig is None or "model" not in settings):
            raise ConfigError(
                f"{flag} is for a model on slices: give both, as in `quire plan llama-7b --mig h100`"
            )
    if arguments.platform is not None and arguments.write is None:
        raise ConfigError("--platform is of the files that --write makes: give both")
    if {"users", "figure"} <= set(given):
        raise ConfigError(
            "--figure draws 1 to 64 users, and --users asks for one number: leave one of them out"
        )
    if arguments.figure is not None and arguments.figure.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"--figure {arguments.figure}: end its name in .png or .svg")


def _card_here() -> Card:
    """The GPU that is here; what NVML's table has otherwise than ours goes to stderr."""
    title, found = nvml.read_card()
    card = find_card(title)
    lines = nvml.differences(card, found) or [f"its {len(found)} slices are those of the table"]
    print("\n".join(f"quire: NVML, {title}: {line}" for line in lines), file=sys.stderr)
    return card


def _one(arguments: argparse.Namespace, slices: Any, settings: Any, card: Card, slo: Any) -> int:
    users = whole_number(arguments.users, "--users", slices.MAX_USERS)
    point = slices.smallest(settings, card, slo, users)
    if arguments.json:
        print(json.dumps(point.record(slo), indent=2))
    else:
        print(
            f"{point.profile} of {card.name} is the smallest slice for {counted(point.users, 'user')}: "
            f"{1e3 * point.per_token:.1f} ms per token and {point.per_request:.2f} s per request (95th percentiles, "
            f"simulated; SLO {1e3 * slo.per_token:g} ms and {slo.per_request:g} s)"
        )
    return 0


def _tables(card: Card) -> str:
    header = ["slice", "compute of 7", "memory of 8", "SMs", "memory", "starts at"]
    rows = [
        [p.name, str(p.compute), str(p.memory), str(p.num_sms),
         in_bytes(p.megabytes << 20), ", ".join(map(str, p.starts))]
        for p in card.profiles
    ]  # fmt: skip
    plain, every = layouts(without_double(card)), layouts(card.profiles)
    drawn = [_drawn(layout) for layout in plain]
    return "\n".join(
        [
            f"slices of {card.name}:",
            aligned([header, *rows], right=(1, 2, 3, 4)),
            f"\n{len(plain)} layouts of memory slices 0 to {MEMORY_SLICES - 1} ({len(every)} with 1g of two):",
            *(f"{index:3}  {line}" for index, line in enumerate(drawn, 1)),
        ]
    )


def _drawn(layout: Any) -> str:
    cells = ["·" * 4] * MEMORY_SLICES
    for placement in layout:
        width = 5 * placement.profile.memory - 1
        text = placement.profile.name.split(".")[0].center(width, "-")
        cells[placement.start] = text
        for taken in list(placement.slices)[1:]:
            cells[taken] = ""
    return "|" + "|".join(cell for cell in cells if cell) + "|"


def _as_json(card: Card) -> str:
    record = {
        "card": card.name,
        "slices": [
            {"name": p.name, "compute": p.compute, "memory": p.memory, "starts": p.starts,
             "num_sms": p.num_sms, "bytes": p.megabytes << 20}
            for p in card.profiles
        ],
        "layouts": [[[p.profile.name, p.start] for p in layout] for layout in layouts(card.profiles)],
    }  # fmt: skip
    return json.dumps(record, indent=2)


def _fleet(arguments: argparse.Namespace) -> int:
    fleet = read_fleet(arguments.fleet)
    if fleet.whole is not None:
        return _placed(arguments, fleet)
    plans: list[_FleetPlan] = []
    left_out: list[str] = []
    for card in fleet.cards:
        try:
            plans.append(_pack(fleet, card, arguments.before))
        except ConfigError as error:
            left_out.append(f"{card.name}: {error}")
    if not plans:
        raise ConfigError("; ".join(left_out))
    for line in left_out:
        print(f"quire: left out: {line}", file=sys.stderr)
    best = min(plans, key=lambda plan: num_used(plan.gpus))
    if arguments.json:
        print(json.dumps(_plan_record(best), indent=2))
    else:
        print("\n".join(_plan_text(plan, len(fleet.models)) for plan in plans))
        if len(fleet.cards) > 1:
            print(f"{best.card.name} needs the fewest GPUs: {num_used(best.gpus)}")
    if arguments.write is not None:
        nodes = fleet.nodes or (Node(NO_NAME, len(best.gpus)),)
        served = {model.name: [model.source, *model.flags] for model in fleet.models}
        again = changed(best.before, best.gpus) if best.before else None
        write(arguments.write, best.gpus, nodes, served, arguments.platform or "kubernetes", again)
        print(f"quire: wrote the files that apply it to {arguments.write}", file=sys.stderr)
    return 0


@dataclass(frozen=True, slots=True)
class _FleetPlan:
    """Slices of a fleet's models on one kind of GPU. `before`: GPUs of the layout in use."""

    card: Card
    demands: Sequence[Demand]
    before: Sequence[PackedGpu]
    gpus: Sequence[PackedGpu]


def _pack(fleet: FleetFile, card: Card, path: Path | None) -> _FleetPlan:
    bar = tqdm(fleet.models, f"slices of {card.name}", disable=None, leave=False)
    demands = [demand for model in bar for demand in demands_of(model, card)]
    before = [] if path is None else _before(path, card, demands, fleet.nodes)
    gpus = pack(demands, card, before)
    have = sum(node.num_gpus for node in fleet.nodes)
    if fleet.nodes and have < len(gpus):
        instead = ", or plan without --before" if before and len(pack(demands, card)) <= have else ""
        raise ConfigError(
            f"the plan needs {len(gpus)} GPUs and the nodes have {have}: add {len(gpus) - have}{instead}"
        )
    return _FleetPlan(card, demands, before, gpus)


def _before(path: Path, card: Card, demands: Sequence[Demand], nodes: Sequence[Node]) -> list[PackedGpu]:
    try:
        return packed_before(path.read_text(encoding="utf-8"), card, demands, nodes)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"--before {path}: {error}") from error


def _placed(arguments: argparse.Namespace, fleet: FleetFile) -> int:
    """Whole GPUs: groups of them with the models of each."""
    if arguments.before is not None:
        raise ConfigError(f"--before is for slices of GPUs: {arguments.fleet} has whole ones, leave it out")
    if arguments.write is not None:
        raise ConfigError(
            f"--write is for slices of GPUs: {arguments.fleet} has whole ones, start the commands printed"
        )
    planning = laboratory.load("placement.plan", "`quire plan --fleet` with whole GPUs")
    plan = planning.make_plan(fleet)
    print(json.dumps(plan.record, indent=2) if arguments.json else plan.text)
    return 0


def demands_of(model: FleetModel, card: Card) -> list[Demand]:
    """The smallest slice that meets the model's SLO; as few replicas as do where no slice serves all users."""
    if model.slice is not None:
        return [Demand(model.name, card.profile(model.slice))] * model.replicas
    slices = laboratory.load("measure.slices", "`quire plan --fleet`")
    settings = {**model.settings, "model": model.source}
    try:
        chosen, replicas = slices.fewest_replicas(
            settings, card, slices.Slo.of(model.slo), model.users, model.replicas
        )
    except QuireError as error:
        raise ConfigError(f"{model.name}: {error}") from error
    return [Demand(model.name, card.profile(chosen.profile))] * replicas


def gpu_record(gpu: PackedGpu) -> dict[str, Any]:
    slices = [{"model": demand.model, "slice": demand.profile.name} for demand in gpu.demands]
    return {"layout": dict(sorted(multiset(gpu.layout).items())), "slices": slices}


def _plan_record(plan: _FleetPlan) -> dict[str, Any]:
    record: dict[str, Any] = {"card": plan.card.name, "gpus": [gpu_record(gpu) for gpu in plan.gpus]}
    if plan.before:
        record |= {
            "new_slices": moved(plan.before, plan.gpus),
            "changed_gpus": changed(plan.before, plan.gpus),
        }
    return record


def _plan_text(plan: _FleetPlan, num_models: int) -> str:
    card, demands = plan.card, plan.demands
    rows = [["GPU", "filled", "slices and models"]]
    for index, gpu in enumerate(plan.gpus):
        words = ", ".join(f"{demand.profile.name} {demand.model}" for demand in gpu.demands)
        rows.append([str(index), f"{100 * gpu.filling:.0f} %", words or "no slices"])
    alone = sum(len(pack([demand] * count, card)) for demand, count in Counter(demands).items())
    text = (
        f"{counted(num_models, 'model')}, {counted(len(demands), 'slice')}: {num_used(plan.gpus)} × {card.name} "
        f"instead of {alone} with one model each (lower bound: {lower_bound(demands)})\n"
        f"{aligned(rows, right=(0, 1))}"
    )
    if plan.before:
        indices = changed(plan.before, plan.gpus)
        text += (
            f"\n{moved(plan.before, plan.gpus)} of {len(demands)} slices are new; mig-parted makes all slices of "
            f"{counted(len(indices), 'changed GPU')} again: {', '.join(map(str, indices)) or 'none'}"
        )
    return text

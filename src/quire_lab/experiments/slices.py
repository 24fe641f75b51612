"""`slices`: published statements on MIG slices, beside what the simulated slices give; and a fleet that is packed."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.cli.plan_sharing import demands_of, gpu_record
from quire.core.config import EngineConfig
from quire.fleet.mig import CARDS
from quire.fleet.packing import Demand, lower_bound, pack
from quire.fleet.plan_file import FleetModel, read_fleet
from quire.models import registry
from quire_lab.measure.simulated_runs import basis
from quire_lab.measure.slices import USERS, SliceLatency, Slo, curve, most_users
from quire_lab.report.experiment import Bar, Check, Experiment, Finding, Setup, Table
from quire_lab.report.slice_curves import picture_of
from quire_lab.simulate.build import open_shape, simulated_parts

CARD = CARDS["a100-80g"]
SLO = Slo()  # 50 ms per token and 10 s per request, 512 tokens in and 128 out
SMALL = 13.5e9  # parameters of the largest model that is called 13B
FLEET = Path(__file__).parents[3] / "examples" / "fleet.yaml"  # of a checkout


@dataclass(frozen=True, slots=True)
class Statement:
    """Published: on this slice the model serves up to `users` under 50 ms per token and 10 s per request."""

    model: str
    slice: str
    users: int


# Zhu, Wang et al., MASCOTS 2024 (vLLM on an A100), and the lecture on it
STATEMENTS = (
    Statement("flan-t5-xl", "1g.20gb", 8),
    Statement("flan-t5-xl", "2g.20gb", 16),
    Statement("mistral-7b", "4g.40gb", 8),
)
PUBLISHED = {"models": 54, "at_most_13b": 29, "gpus_before": 31, "gpus_after": 13}


def run(setup: Setup) -> Finding:
    users = setup.pick((1, 8, 16, 32), USERS, USERS)
    models = sorted({statement.model for statement in STATEMENTS})
    fleet = read_fleet(FLEET).models if FLEET.is_file() else ()
    with setup.progress(len(models) + len(fleet), "models") as bar:
        points = {}
        for model in models:
            points[model] = curve({"model": model}, CARD, SLO, users)
            bar()
        packed = _pack(fleet, bar) if fleet else {}
    return _finding(points, packed)


def _pack(fleet: Sequence[FleetModel], bar: Bar) -> dict[str, Any]:
    """The fleet on one GPU per replica, and packed; and the same of its small models alone."""
    wanted: list[Demand] = []
    sizes = {}
    for model in fleet:
        wanted += demands_of(model, CARD)
        sizes[model.name] = _num_parameters(model)
        bar()
    small = {name for name, size in sizes.items() if size <= SMALL}
    return {
        "models": len(fleet),
        "at_most_13b": len(small),
        "parameters": sizes,
        "all": _packed(wanted),
        "of_at_most_13b": _packed([demand for demand in wanted if demand.model in small]),
    }


def _packed(wanted: Sequence[Demand]) -> dict[str, Any]:
    began = time.perf_counter()
    gpus = pack(wanted, CARD)
    return {
        "gpus_before": len(wanted),
        "gpus_after": len(gpus),
        "lower_bound": lower_bound(wanted),
        "seconds": time.perf_counter() - began,
        "slices": dict(sorted(Counter(demand.profile.name for demand in wanted).items())),
        "gpus": [gpu_record(gpu) for gpu in gpus],
    }


def _num_parameters(model: FleetModel) -> int:
    config = EngineConfig.of(model=model.source, device=f"simulated:{CARD.name}", **model.settings)
    described = registry.describe(open_shape(config).config)
    return simulated_parts(config, described, ()).weights.num_parameters


def _finding(points: dict[str, list[SliceLatency]], packed: dict[str, Any]) -> Finding:
    rows, checks, judged = [], [], []
    for stated in STATEMENTS:
        of_model = points[stated.model]
        most = most_users(of_model, stated.slice, SLO)
        here = next(p for p in of_model if p.profile == stated.slice and p.users == stated.users)
        first = next((p.profile for p in of_model if p.users == stated.users and p.meets(SLO)), "none")
        latency = f"{1e3 * here.per_token:.1f} ms, {here.per_request:.2f} s" if not here.why else here.why
        computed = f"{most} or more" if most == max(p.users for p in of_model) else f"{most}"
        rows.append([stated.model, stated.slice, f"{stated.users}", computed, latency, first])
        name = f"{stated.model} on {stated.slice}"
        checks += [
            Check(f"{name} serves {stated.users} users", latency, here.meets(SLO)),
            Check(f"{name} serves no more than {stated.users} users", computed, most <= stated.users),
        ]
        judged.append({**asdict(stated), "computed_users": most, "smallest_slice": first})
    head = ["model", "slice", "users, published", "users, computed", "at the published", "smallest for these"]
    tables = [Table("Published statements beside the simulated slices", head, rows, left=2)]
    notes = [
        *basis({"model": ", ".join(points), "device": f"simulated:{CARD.name}"}),
        f"published: Zhu, Wang et al., MASCOTS 2024, vLLM on A100; its lengths are not known, these are "
        f"{SLO.prompt_tokens} tokens in and {SLO.output_tokens} out, 95th percentiles",
    ]
    if packed:
        tables.append(_fleet_table(packed))
        count = packed["at_most_13b"]
        checks.append(
            Check("29 of the 54 models have at most 13B", f"{count} of {packed['models']}", count == 29)
        )
        notes.append("the fleet is a fixture, examples/fleet.yaml: sizes as published, users drawn by hand")
    else:
        notes.append("examples/fleet.yaml comes with a checkout and is not here: no fleet was packed")
    agreed = sum(check.held is True for check in checks)
    return Finding(
        f"{agreed} of {len(checks)} statements agree with the simulated slices"
        + (f"; 54 models need {packed['all']['gpus_after']} GPUs." if packed else "."),
        tables,
        [picture_of(points["mistral-7b"], CARD, SLO, "slices")],
        {
            "statements": judged,
            "fleet": packed,
            "points": {name: [asdict(p) for p in of_model if not p.why] for name, of_model in points.items()},
        },
        {"card": CARD.name, "slo": asdict(SLO)},
        checks,
        notes,
    )


def _fleet_table(packed: dict[str, Any]) -> Table:
    def row(name: str, part: dict[str, Any]) -> list[str]:
        counts = [part["gpus_before"], part["gpus_after"], part["lower_bound"]]
        return [name, *map(str, counts), f"{part['seconds']:.3f}"]

    published = ["published", f"{PUBLISHED['gpus_before']}", f"{PUBLISHED['gpus_after']}", "", ""]
    rows = [
        row(f"all {packed['models']} models", packed["all"]),
        row(f"the {packed['at_most_13b']} of at most 13B", packed["of_at_most_13b"]),
        published,
    ]
    head = ["fleet", f"{CARD.name}, a model each", "packed", "needed at least", "s of packing"]
    return Table("A fleet of 54 models", head, rows)


EXPERIMENT = Experiment(
    "slices",
    "Which slice of a GPU is enough",
    "A small model with few users needs a part of a GPU. Which part keeps 50 ms per token, and how many GPUs does a "
    "whole fleet need?",
    run,
)

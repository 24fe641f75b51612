"""The file of `quire plan --fleet`: GPUs, nodes, and models with their users and SLOs."""

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from quire.core.config import EngineConfig, setting_groups
from quire.core.errors import ConfigError
from quire.fleet.manifests import MAX_GPUS, Node, whole_number
from quire.fleet.mig import Card, find_card

MAX_MODELS, MAX_USERS, MAX_BYTES = 1000, 100_000, 1 << 20
SLO_FIELDS = ("slo_per_token", "slo_request", "prompt_tokens", "output_tokens")
_FIELDS = {"cards", "card", "nodes", "models", *SLO_FIELDS}
_MODEL_FIELDS = {"name", "model", "users", "rate", "slice", "replicas", "settings", *SLO_FIELDS}
# the same of a file with `gpus`: whole cards, on which models are placed in groups
_WHOLE_SLO_FIELDS = ("slo_request", "slo_scale", "cv", "prompt_tokens", "output_tokens")
_WHOLE_FIELDS = {"gpus", "gpus_per_node", "max_tp", "max_pp", "models", *_WHOLE_SLO_FIELDS}
_WHOLE_MODEL_FIELDS = {"name", "model", "rate", "settings", *_WHOLE_SLO_FIELDS}
MAX_RATE = 1e4
# of the engine, and not given: a slice is one GPU of its own, and the plan of whole GPUs decides the others as well
OF_DEVICE = ("device", "tensor_parallel_size", "pipeline_parallel_size", "num_threads", "sm_share")
_OF_GROUP = (*OF_DEVICE, "gpu_memory_utilization", "max_num_seqs")
# of a node: it is part of a label, and of a command in apply.sh
_NODE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,55}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class FleetModel:
    name: str
    source: str
    users: int
    slo: Mapping[str, float]  # fields of SLO_FIELDS: the model's own, else the file's
    settings: Mapping[str, Any]  # of the engine, such as quantization
    slice: str | None  # given: nothing is simulated
    replicas: int
    rate: float = 0.0  # requests per second; 0: users are given

    @property
    def flags(self) -> list[str]:
        """The settings as words of `quire serve`."""
        words: list[str] = []
        for name, value in self.settings.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                for item in value if isinstance(value, list) else [value]:
                    words += [f"--{flag}", json.dumps(item) if isinstance(item, dict) else str(item)]
        return words


@dataclass(frozen=True, slots=True)
class WholeCards:
    """GPUs without MIG, on which models are placed in groups."""

    gpus: Mapping[str, int]  # how many of each name
    gpus_per_node: int  # a group lies on one node
    max_tp: int
    max_pp: int


@dataclass(frozen=True, slots=True)
class FleetFile:
    cards: tuple[Card, ...]
    nodes: tuple[Node, ...]
    models: tuple[FleetModel, ...]
    whole: WholeCards | None = None  # in place of cards and nodes


def seconds(text: str | float, name: str) -> float:
    """50ms, 10s, 0.05."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(ms|s)?\s*", str(text))
    value = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0) if match else 0.0
    if not 0 < value < 1e6:
        raise ConfigError(f"{name} is {text!r}: give a time above zero, such as 50ms or 10s")
    return value


def read_fleet(path: Path) -> FleetFile:
    """ConfigError with the model and the field that is wrong."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES:,} bytes: name at most {MAX_MODELS} models")
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--fleet {path}: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"--fleet {path} holds no mapping: see docs/sharing.md for its form")
    whole = "gpus" in document
    _known(document, _WHOLE_FIELDS if whole else _FIELDS, str(path))
    entries = document.get("models")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_MODELS:
        raise ConfigError(f"{path}: `models` must be a list of 1 to {MAX_MODELS} models")
    common = {name: document[name] for name in (*SLO_FIELDS, *_WHOLE_SLO_FIELDS) if name in document}
    models = tuple(
        _model(entry, common, f"{path}: models[{index}]", whole) for index, entry in enumerate(entries)
    )
    twice = sorted({m.name for m in models if sum(other.name == m.name for other in models) > 1})
    if twice:
        raise ConfigError(f"{path}: the name {twice[0]!r} is given twice: rename one")
    if whole:
        return FleetFile((), (), models, _whole_cards(document, str(path)))
    if {"card", "cards"} <= document.keys():
        raise ConfigError(f"{path}: `card` and `cards` are given: leave one of them out")
    names = document.get("cards") or [document.get("card")]
    cards = tuple(find_card(str(name)) for name in (names if isinstance(names, list) else [names]))
    if len(set(cards)) < len(cards):
        raise ConfigError(f"{path}: cards has {', '.join(card.name for card in cards)}: give each kind once")
    return FleetFile(cards, _nodes(document.get("nodes"), f"{path}: nodes"), models)


def _nodes(entries: Any, where: str) -> tuple[Node, ...]:
    nodes: dict[str, Node] = {}
    listed = [] if entries is None else entries
    if not isinstance(listed, list):
        raise ConfigError(f"{where} is {entries!r}: give a list, such as [{{name: gpu-1, gpus: 8}}]")
    for index, entry in enumerate(listed):
        if not isinstance(entry, dict) or not {"name", "gpus"} <= entry.keys():
            raise ConfigError(
                f"{where}[{index}] is {entry!r}: give `name` and `gpus`, as {{name: gpu-1, gpus: 8}}"
            )
        _known(entry, {"name", "gpus"}, f"{where}[{index}]")
        name = str(entry["name"])
        if not _NODE_NAME.fullmatch(name) or name in nodes:
            own = "each node's own, of at most 57 small letters, digits, - and ."
            raise ConfigError(f"{where}[{index}]: name is {name!r}: give {own}")
        nodes[name] = Node(name, whole_number(entry["gpus"], f"{where}[{index}]: gpus", MAX_GPUS))
    return tuple(nodes.values())


def _whole_cards(document: Mapping[str, Any], where: str) -> WholeCards:
    gpus = document["gpus"]
    if not isinstance(gpus, dict) or not gpus:
        raise ConfigError(f"{where}: gpus is {gpus!r}: give names with their numbers, such as {{h200: 8}}")
    counts = {
        str(name): whole_number(count, f"{where}: gpus: {name}", MAX_GPUS) for name, count in gpus.items()
    }
    limits = {
        name: whole_number(document.get(name, 8), f"{where}: {name}", most)
        for name, most in (("gpus_per_node", MAX_GPUS), ("max_tp", 64), ("max_pp", 64))
    }
    return WholeCards(counts, **limits)


def _model(entry: Any, common: Mapping[str, Any], where: str, whole: bool) -> FleetModel:
    if not isinstance(entry, dict) or "name" not in entry:
        raise ConfigError(f"{where} is {entry!r}: give at least `name`")
    named = {"name": entry["name"], "model": entry.get("model", entry["name"])}
    for field, value in named.items():
        if isinstance(value, list | dict | None) or not str(value).isprintable() or not str(value).strip():
            raise ConfigError(f"{where}: {field} is {value!r}: give a name of one line, in quotes if need be")
    where = f"{where} ({entry['name']})"
    _known(entry, _WHOLE_MODEL_FIELDS if whole else _MODEL_FIELDS, where)
    if {"users", "rate"} <= entry.keys():
        raise ConfigError(f"{where}: `users` and `rate` are given: leave one of them out")
    slo_fields = _WHOLE_SLO_FIELDS if whole else SLO_FIELDS
    own = {name: entry[name] for name in slo_fields if name in entry}
    if "slo_request" in own or "slo_scale" in own:  # in place of the file's, whichever that gives
        common = {name: value for name, value in common.items() if name not in ("slo_request", "slo_scale")}
    slo = {name: slo_value(name, value, f"{where}: {name}") for name, value in {**common, **own}.items()}
    if whole and "rate" not in entry:
        raise ConfigError(f"{where}: give `rate`, its requests per second")
    return FleetModel(
        name=str(named["name"]), source=str(named["model"]), users=_users(entry, slo, where), slo=slo,
        rate=float(entry.get("rate", 0.0)), settings=_settings(entry, where, _OF_GROUP if whole else OF_DEVICE),
        slice=None if entry.get("slice") is None else str(entry["slice"]),
        replicas=whole_number(entry.get("replicas", 1), f"{where}: replicas", MAX_MODELS),
    )  # fmt: skip


def _users(entry: Mapping[str, Any], slo: Mapping[str, float], where: str) -> int:
    """Requests at once. A rate gives as many as arrive while one may take its slo_request (Little's law)."""
    if "rate" not in entry:
        return whole_number(entry.get("users", 1), f"{where}: users", MAX_USERS)
    rate = entry["rate"]
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < MAX_RATE:
        raise ConfigError(
            f"{where}: rate is {rate!r}: give requests per second above 0 and below {MAX_RATE:,.0f}; a model without "
            "requests needs no place"
        )
    return max(1, math.ceil(rate * slo.get("slo_request", 10.0)))


def slo_value(name: str, value: Any, where: str) -> float:
    """Checked: seconds of an SLO, or tokens."""
    if name in ("slo_scale", "cv"):
        low, high = (1.0, 1000.0) if name == "slo_scale" else (0.1, 20.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(f"{where} is {value!r}: give a number from {low:g} to {high:g}")
        return float(value)
    return seconds(value, where) if name.startswith("slo") else whole_number(value, where, MAX_USERS)


def _settings(entry: Mapping[str, Any], where: str, planned: Collection[str]) -> dict[str, Any]:
    """Of the engine, checked here: a wrong one would be found by the first pod only."""
    given = entry.get("settings")
    if not isinstance({} if given is None else given, dict) or "model" in (given or {}):
        raise ConfigError(
            f"{where}: settings is {given!r}: give settings of the engine, as {{quantization: int4}}"
        )
    settings = {str(name): value for name, value in (given or {}).items() if value is not None}
    switches = {field.name for fields in setting_groups().values() for field in fields if field.type is bool}
    for name, value in settings.items():
        if name in planned:
            raise ConfigError(f"{where}: settings: {name} is {value!r}: leave it to the plan")
        if isinstance(value, bool) != (name in switches):
            wanted = "true or false" if name in switches else "its value, not true or false"
            raise ConfigError(f"{where}: settings: {name} is {value!r}: give {wanted}")
    try:
        EngineConfig.of(**settings)
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: settings: {error}") from error
    return settings


def _known(entry: Mapping[str, Any], fields: set[str], where: str) -> None:
    unknown = sorted(set(map(str, entry)) - fields)
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]!r} is not a field: choose from {', '.join(sorted(fields))}")

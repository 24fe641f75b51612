"""The file of `quire plan --fleet`: GPUs, nodes, and models with their users and promises."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from quire.core.errors import ConfigError
from quire.fleet.manifests import Node
from quire.fleet.mig import Card, find_card

MAX_MODELS, MAX_USERS, MAX_BYTES = 1000, 100_000, 1 << 20
_FIELDS = {
    "cards",
    "card",
    "nodes",
    "models",
    "slo_per_token",
    "slo_request",
    "prompt_tokens",
    "output_tokens",
}
_PROMISES = ("slo_per_token", "slo_request", "prompt_tokens", "output_tokens")
_MODEL_FIELDS = {"name", "model", "users", "rate", "slice", "replicas", "settings", *_PROMISES}


@dataclass(frozen=True, slots=True)
class FleetModel:
    name: str
    source: str
    users: int
    promise: Mapping[str, float]  # of this model, over the file's
    settings: Mapping[str, Any]  # of the engine, such as quantization
    slice: str | None  # given: nothing is simulated
    replicas: int


@dataclass(frozen=True, slots=True)
class FleetFile:
    cards: tuple[Card, ...]
    nodes: tuple[Node, ...]
    models: tuple[FleetModel, ...]


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
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--fleet {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"--fleet {path} holds no mapping: see docs/sharing.md for its form")
    _known(document, _FIELDS, str(path))
    names = document.get("cards") or [document.get("card")]
    cards = tuple(find_card(str(name)) for name in (names if isinstance(names, list) else [names]))
    entries = document.get("models")
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_MODELS:
        raise ConfigError(f"{path}: `models` must be a list of 1 to {MAX_MODELS} models")
    common = {name: document[name] for name in _PROMISES if name in document}
    models = tuple(_model(entry, common, index) for index, entry in enumerate(entries))
    twice = sorted({m.name for m in models if sum(other.name == m.name for other in models) > 1})
    if twice:
        raise ConfigError(f"{path}: the name {twice[0]!r} is given twice: rename one")
    nodes = tuple(Node(str(node["name"]), int(node["gpus"])) for node in document.get("nodes", ()))
    return FleetFile(cards, nodes, models)


def _model(entry: Any, common: Mapping[str, Any], index: int) -> FleetModel:
    if not isinstance(entry, dict) or "name" not in entry:
        raise ConfigError(f"models[{index}] is {entry!r}: give at least `name`")
    where = f"models[{index}] ({entry['name']})"
    _known(entry, _MODEL_FIELDS, where)
    given = {**common, **{name: entry[name] for name in _PROMISES if name in entry}}
    promise = {
        name: seconds(value, f"{where}: {name}")
        if name.startswith("slo")
        else _count(value, f"{where}: {name}", MAX_USERS)
        for name, value in given.items()
    }
    return FleetModel(
        name=str(entry["name"]),
        source=str(entry.get("model", entry["name"])),
        users=_users(entry, promise, where),
        promise=promise,
        settings=dict(entry.get("settings") or {}),
        slice=entry.get("slice"),
        replicas=_count(entry.get("replicas", 1), f"{where}: replicas", MAX_MODELS),
    )


def _users(entry: Mapping[str, Any], promise: Mapping[str, float], where: str) -> int:
    """Requests at once. A rate gives as many as arrive while one may take its promised time (Little's law)."""
    if "rate" not in entry:
        return _count(entry.get("users", 1), f"{where}: users", MAX_USERS)
    rate = entry["rate"]
    if not isinstance(rate, int | float) or not 0 < rate < 1e4 or not math.isfinite(rate):
        raise ConfigError(
            f"{where}: rate is {rate!r}: give requests per second above 0 and below 10,000, or `users`"
        )
    return max(1, math.ceil(rate * promise.get("slo_request", 10.0)))


def _count(value: Any, where: str, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{where} is {value!r}: give a whole number from 1 to {most:,}")
    return value


def _known(entry: Mapping[str, Any], fields: set[str], where: str) -> None:
    unknown = sorted(set(map(str, entry)) - fields)
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]!r} is not a field: choose from {', '.join(sorted(fields))}")

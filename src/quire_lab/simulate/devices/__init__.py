"""Devices that can be simulated: one JSON file each, with the data sheet's rates and the fitted factors.

A file has either `factors` and `fit` (what they were fitted on, when, and how well) or `derived_from`, the device whose
factors it takes: such a device was never measured, and says so. `lora` and `lora_fit` are the same for adapters;
without them adapters' factors are assumed from the others.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError
from quire.engine.build.resolve import SIMULATED
from quire.fleet.mig import MEMORY_SLICES, find_card
from quire_lab.simulate.cost_model import FACTOR_NAMES, Factors, Rates
from quire_lab.simulate.lora_cost import LORA_FACTOR_NAMES, LoraFactors, assumed_factors

DEFAULT_DEVICE = "h200"
MAX_RANKS = 64
_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class ShareCurve:
    """What some of a GPU's SMs get of its bandwidth and FLOP/s: 1 − (1 − share) ** exponent, more than their share."""

    reads: float
    computes: float  # above 1, since the whole GPU runs into its limit of power

    def read(self, share: float) -> float:
        return 1.0 - (1.0 - share) ** self.reads

    def rates(self, whole: Rates, share: float) -> Rates:
        computed = 1.0 - (1.0 - share) ** self.computes
        return replace(whole, flops=whole.flops * computed, bandwidth=whole.bandwidth * self.read(share))


# Fitted to products alone in green contexts of 8 to 128 of an H200's 132 SMs: 666, 1,273, 2,263, 3,396 and 3,586 GB/s,
# and 56, 111, 218, 421 and 717 TFLOP/s.
SHARE_CURVE = ShareCurve(reads=3.40, computes=1.29)


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """One device, or `ranks` equal ones that share a model."""

    name: str
    title: str
    on_gpu: bool
    memory_bytes: int  # of one
    rates: Rates
    factors: Factors
    source: str  # of the data sheet's rates
    fit: Mapping[str, Any]  # what the factors were fitted on, when, and how well
    lora: LoraFactors  # of adapters
    lora_fit: Mapping[str, Any]  # the same of them; empty: they are assumed
    derived_from: str | None = None
    ranks: int = 1
    whole: str | None = None  # of a MIG slice: the GPU's name
    float8: bool = True  # has matrix units for it

    @property
    def in_words(self) -> str:
        many = f"{self.ranks} × " if self.ranks > 1 else ""
        basis = f"derived from {self.derived_from}" if self.derived_from else f"fitted on {self.fit['on']}"
        return f"{many}{self.title}, simulated ({basis})"


def device_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def find_device(setting: str) -> SimulatedDevice:
    """From `simulated`, `simulated:a100-40g`, `simulated:2xa100-40g`, or a JSON file of one's own after the colon.

    A part of a GPU: `simulated:a100-80g-2g.20gb` is a MIG slice, `simulated:h200-sm29` has 29 % of the processors.
    """
    name = setting.removeprefix(SIMULATED).removeprefix(":") or DEFAULT_DEVICE
    if part := re.fullmatch(r"(.+)-(\d+g\.\d+gb|sm\d+)", name):
        return _part(find_device(f"{SIMULATED}:{part[1]}"), name, part[2])
    ranks = 1
    if match := re.fullmatch(r"(\d+)x(.+)", name):
        ranks, name = int(match[1]), match[2]
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"device={setting!r} asks for {ranks} ranks: choose 1 to {MAX_RANKS}")
    record = _read(name, setting)
    basis = record if "factors" in record else _read(str(record.get("derived_from")), setting)
    try:
        return _device(name, record, basis, ranks)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"device={setting!r}: its file is not as it should be ({error!r})") from error


def _part(whole: SimulatedDevice, name: str, part: str) -> SimulatedDevice:
    """A slice of MIG has its processors, memory and share of bandwidth; a share of processors has all memory."""
    num_bytes, is_slice = whole.memory_bytes, not part.startswith("sm")
    if is_slice and whole.ranks > 1:
        raise ConfigError(
            f"device {name!r}: slices cannot be joined, MIG leaves them no link; simulate whole GPUs, such as "
            f"simulated:{whole.ranks}x{whole.name}"
        )
    if not is_slice:
        processors = int(part[2:]) / 100
        if not 0 < processors <= 1:
            raise ConfigError(f"device {name!r} asks for {part[2:]} % of the processors: choose 1 to 100")
        rates = SHARE_CURVE.rates(whole.rates, processors)
    else:
        card = find_card(whole.name)
        profile = card.profile(part)
        processors, memory = card.sm_share(profile), profile.memory / MEMORY_SLICES
        num_bytes = min(
            num_bytes, profile.megabytes << 20
        )  # CUDA may give less than NVML of the largest slice
        rates = replace(
            whole.rates,
            flops=whole.rates.flops * processors,  # other slices draw power, too
            bandwidth=whole.rates.bandwidth * min(memory, SHARE_CURVE.read(processors)),
        )
    return replace(
        whole,
        name=name,
        title=f"{whole.title}, {part}",
        memory_bytes=num_bytes,
        rates=rates,
        derived_from=whole.derived_from or whole.name,
        whole=whole.name if is_slice else None,
    )


def _device(name: str, record: Mapping[str, Any], basis: Mapping[str, Any], ranks: int) -> SimulatedDevice:
    rates = Rates(**{field.name: float(record.get(field.name, 0.0)) for field in fields(Rates)})
    if ranks > 1 and not rates.link_bandwidth:
        raise ConfigError(f"device {name!r} has no link to others: simulate one of it")
    return SimulatedDevice(
        name=Path(name).stem,
        title=record["title"],
        on_gpu=bool(record["on_gpu"]),
        memory_bytes=int(record["memory_bytes"]),
        rates=rates,
        factors=_factors(basis),
        source=record["source"],
        fit=basis["fit"],
        lora=_lora(basis),
        lora_fit=basis.get("lora_fit", {}),
        derived_from=record.get("derived_from"),
        ranks=ranks,
        float8=bool(record.get("float8", True)),
    )


def _lora(basis: Mapping[str, Any]) -> LoraFactors:
    """Fitted, or what the dense layers' factors suggest."""
    if "lora" in basis:
        return LoraFactors(**{name: float(basis["lora"][name]) for name in LORA_FACTOR_NAMES})
    return assumed_factors(_factors(basis))


def _factors(basis: Mapping[str, Any]) -> Factors:
    return Factors(**{name: float(basis["factors"][name]) for name in FACTOR_NAMES})


def _read(name: str, setting: str) -> dict[str, Any]:
    path = Path(name).expanduser() if name.endswith(".json") else _FOLDER / f"{name}.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(device_names())
        raise ConfigError(
            f"device={setting!r} is not known: after `simulated:` name one of {known}, or a .json file that "
            "`quire bench fit` wrote"
        ) from None
    except ValueError as error:
        raise ConfigError(f"device={setting!r}: {path.name} is no JSON ({error})") from error
    if not isinstance(record, dict):
        raise ConfigError(f"device={setting!r}: {path.name} holds no JSON object")
    return record

"""Tiles that were measured on this chip, kept in the cache. Of Triton only the version is asked for, where it is there.

One small JSON file per chip and shape of heads, in `tuned` under the cache folder. Whatever is not exactly what this
version wrote for this chip is passed over: then the built-in tiles serve, as if nothing had been measured.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from quire.kernels.attention.tuning import TUNINGS, Ranges, Tuning
from quire.kernels.cache_files import remove_all, write_whole
from quire.kernels.compile import cache_folder
from quire.observe.logs import get_logger

logger = get_logger(__name__)

FORMAT = 1
NAMES = "attention-*.json"
# A change in one of these may change which tiles are best: what was measured before it counts no more.
MEASURED_CODE = ("triton_decode", "triton_plan", "triton_prompt", "triton_step", "triton_tile", "tuning")

_POWERS = frozenset({16, 32, 64, 128, 256})
# What a file may ask for. A damaged number must not reach a compiler.
_ALLOWED: dict[str, frozenset[Any]] = {
    "decode_tile": _POWERS,
    "decode_warps": frozenset({1, 2, 4, 8, 16}),
    "decode_stages": frozenset(range(1, 9)),
    "decode_registers": frozenset({None, *range(32, 256)}),
    "decode_pieces": frozenset(range(1, 65)),
    "fused_reduction": frozenset({True, False}),
    "prompt_rows": _POWERS,
    "prompt_tile": _POWERS,
    "prompt_warps": frozenset({1, 2, 4, 8, 16}),
    "prompt_stages": frozenset(range(1, 9)),
    "prompt_programs": frozenset(range(1, 65)),
}


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a layer's attention looks like to its kernels."""

    num_kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    kv_dtype: str  # as the pool's layout names it
    query_bytes: int  # of one number of q
    block_size: int

    def __str__(self) -> str:
        return (
            f"{self.num_kv_heads} KV heads of {self.head_dim}, {self.group} queries each, "
            f"blocks of {self.block_size} in {self.kv_dtype}"
        )


@dataclass(frozen=True, slots=True)
class TuningKey:
    """For what tiles were measured: they serve this and nothing else."""

    chip: str
    capability: str  # of the chip, such as "9.0"
    triton: str  # its version
    code: str  # digest of the kernels
    heads: HeadShape


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of a report: microseconds per layer and product, geometric means over the cases of a range."""

    what: str
    default_us: float
    best_us: float
    chosen: str  # "default", or the tiles in words


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was chosen for each range of rows, and what was seen."""

    ranges: Ranges
    measured: tuple[Measured, ...]


def key_of(heads: HeadShape, device: str | torch.device) -> TuningKey:
    """The key of this chip, this Triton and these kernels."""
    device = torch.device(device)
    chip, capability = "interpreter", "0.0"
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return TuningKey(chip, capability, _triton_version(), _code_digest(), heads)


def load(key: TuningKey) -> Tuned | None:
    """What was measured for exactly this, or None. Never raises: a start does not depend on a cache."""
    path = path_of(key)
    try:
        found = _parse(path.read_text(encoding="utf-8"))
        if found[0] != key:
            raise ValueError("it was measured for something else")
    except FileNotFoundError:
        return None
    except Exception as fault:  # a file may be damaged in any way
        logger.debug("%s is passed over, the built-in tiles serve: %s", path, fault)
        return None
    return found[1]


def store(key: TuningKey, tuned: Tuned) -> Path:
    """Keeps it; the path of its file."""
    path = path_of(key)
    record = {
        "format": FORMAT,
        "key": asdict(key),
        "ranges": [{"max_rows": limit, "tuning": asdict(tuning)} for limit, tuning in tuned.ranges],
        "measured": [asdict(line) for line in tuned.measured],
    }
    write_whole(path, json.dumps(record, indent=1))
    return path


def cached() -> list[tuple[TuningKey, Tuned]]:
    """All that is kept and can be read, of whatever chip and version."""
    found = []
    for path in sorted(folder().glob(NAMES)):
        try:
            found.append(_parse(path.read_text(encoding="utf-8")))
        except Exception as fault:  # as in `load`
            logger.debug("%s is passed over: %s", path, fault)
    return found


def forget() -> int:
    """Removes all that is kept; how many files there were."""
    return remove_all(folder(), NAMES)


def folder() -> Path:
    """Where measured tiles lie. It may not exist yet."""
    return cache_folder() / "tuned"


def path_of(key: TuningKey) -> Path:
    """The file of a key."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:20]
    return folder() / f"attention-{digest}.json"


def serves_here(key: TuningKey) -> bool:
    """Whether this version's kernels would take it, on its chip."""
    return (key.triton, key.code) == (_triton_version(), _code_digest())


def _parse(text: str) -> tuple[TuningKey, Tuned]:
    """The content of a file. Raises for anything that this version did not write."""
    record = json.loads(text)
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']!r}, not {FORMAT}")
    named = dict(record["key"])
    key = TuningKey(**{**named, "heads": HeadShape(**named["heads"])})
    ranges = tuple((entry["max_rows"], _tuning(entry["tuning"])) for entry in record["ranges"])
    if [limit for limit, _ in ranges] != [limit for limit, _ in TUNINGS]:
        raise ValueError("its ranges of rows are not these")
    return key, Tuned(ranges, tuple(_measured(line) for line in record["measured"]))


def _tuning(entry: Mapping[str, Any]) -> Tuning:
    if set(entry) != {field.name for field in fields(Tuning)}:
        raise ValueError("its tiles have other fields")
    for name, value in entry.items():
        # To a set, True and 1.0 are 1.
        kinds = (bool,) if name == "fused_reduction" else (int, type(None))
        if type(value) not in kinds or value not in _ALLOWED[name]:
            raise ValueError(f"{name} is {value!r}")
    return Tuning(**entry)


def _measured(entry: Mapping[str, Any]) -> Measured:
    return Measured(
        str(entry["what"]), float(entry["default_us"]), float(entry["best_us"]), str(entry["chosen"])
    )


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _code_digest() -> str:
    digest = hashlib.sha256()
    for name in MEASURED_CODE:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]

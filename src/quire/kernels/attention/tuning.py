"""AttentionTuning: tile sizes of the attention kernels, their defaults, and the cache of measured ones.

The cache has a file per GPU and head shape; without one the defaults serve. Of Triton only the version is read.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from quire.kernels.measurement import TunedCache

# A change in one of these files may change which tiles are best: older measurements are ignored.
MEASURED_CODE = ("triton_decode", "triton_plan", "triton_prompt", "triton_tile", "tuning")

_POWERS = frozenset({16, 32, 64, 128, 256})
# Values that a file may hold: a damaged number must not reach a compiler.
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
class AttentionTuning:
    """Sizes that change speed and never results, but for the last bits. Measured defaults for Hopper."""

    decode_tile: int = 64  # keys per iteration
    decode_warps: int = 2
    decode_stages: int = 2
    # Per thread at most: with fewer, more programs share a multiprocessor.
    decode_registers: int | None = None
    decode_pieces: int = 4  # pieces per multiprocessor that decodes are cut into, about
    fused_reduction: bool = True  # the last piece of a row to finish adds its pieces up; else a second kernel
    prompt_rows: int = 128  # queries × heads of a group per program
    prompt_tile: int = 64  # keys per iteration
    prompt_warps: int = 8
    prompt_stages: int = 3
    prompt_programs: int = 32  # per multiprocessor at most; further tiles go round


Ranges = tuple[tuple[int, AttentionTuning], ...]  # (most rows, tuning), ascending

# One row needs many small pieces to reach every multiprocessor; more rows need programs that start fast and fit a
# multiprocessor many at a time, since in a served model the power limit lowers the clock.
# Measured on an H200, the second with GEMMs between the layers; `quire tune` measures on other GPUs.
TUNINGS: Ranges = (
    (16, AttentionTuning(decode_tile=32, decode_pieces=16)),
    (1 << 30, AttentionTuning()),
)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """A layer's attention, as its kernels see it."""

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
    """The GPU, versions and heads that tiles were measured for; they serve nothing else."""

    chip: str
    capability: str  # of the chip, such as "9.0"
    triton: str  # its version
    code: str  # digest of the kernels
    heads: HeadShape


@dataclass(frozen=True, slots=True)
class MeasuredTiles:
    """One line of a report: microseconds per layer and GEMM, geometric means over the batches of a range."""

    what: str
    default_us: float
    best_us: float
    chosen: str  # "default", or the tile sizes


@dataclass(frozen=True, slots=True)
class TunedTiles:
    """The tiles chosen for each range of rows, and the measurements."""

    ranges: Ranges
    measured: tuple[MeasuredTiles, ...]


def key_of(heads: HeadShape, device: str | torch.device) -> TuningKey:
    """The key of this GPU, this Triton and these kernels."""
    device = torch.device(device)
    chip, capability = "interpreter", "0.0"
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return TuningKey(chip, capability, _triton_version(), _code_digest(), heads)


def serves_here(key: TuningKey) -> bool:
    """Whether this version's kernels accept these tiles on their GPU."""
    return (key.triton, key.code) == (_triton_version(), _code_digest())


def store(key: TuningKey, tiles: TunedTiles) -> Path:
    """Writes the cache file and returns its path."""
    return cache.store(
        key,
        ranges=[{"max_rows": limit, "tuning": asdict(tuning)} for limit, tuning in tiles.ranges],
        measured=[asdict(line) for line in tiles.measured],
    )


def _parse(record: Mapping[str, Any]) -> tuple[TuningKey, TunedTiles]:
    """The content of a file. Raises for anything that this version did not write."""
    named = dict(record["key"])
    key = TuningKey(**{**named, "heads": HeadShape(**named["heads"])})
    ranges = tuple((entry["max_rows"], _tuning(entry["tuning"])) for entry in record["ranges"])
    if [limit for limit, _ in ranges] != [limit for limit, _ in TUNINGS]:
        raise ValueError("its ranges of rows are not these")
    return key, TunedTiles(ranges, tuple(_measured(line) for line in record["measured"]))


cache: TunedCache[TuningKey, TunedTiles] = TunedCache("attention", 1, _parse, "the default tiles serve")


def _tuning(entry: Mapping[str, Any]) -> AttentionTuning:
    if set(entry) != {field.name for field in fields(AttentionTuning)}:
        raise ValueError("its tiles have other fields")
    for name, value in entry.items():
        # To a set, True and 1.0 are 1.
        kinds = (bool,) if name == "fused_reduction" else (int, type(None))
        if type(value) not in kinds or value not in _ALLOWED[name]:
            raise ValueError(f"{name} is {value!r}")
    return AttentionTuning(**entry)


def _measured(entry: Mapping[str, Any]) -> MeasuredTiles:
    return MeasuredTiles(
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

"""Measures cuBLASLt's algorithms for a GEMM on this GPU, and caches which was the fastest.

PyTorch's own choice stays unless another algorithm is faster beyond doubt. The cache has a file per GPU and library
version. An algorithm is stored as its index among the candidates of the library's heuristic, which is queried again at
every start: a damaged file can name a slower algorithm, not a wrong one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.linear.cublaslt import MAX_CANDIDATES, Algorithm, GemmPlan, GemmShape, version
from quire.kernels.linear.reference import gemm
from quire.kernels.measurement import TunedCache, choose, queued_seconds
from quire.kernels.sm_share import gpu_name

TORCH_DEFAULT = -1  # the index that stands for PyTorch's own choice
FINALISTS = 2  # candidates timed again, beside PyTorch's choice
ROUNDS = 2
REFUSED = float("inf")  # seconds
# Weights read per timing: as in a model, they must come from memory, not from the GPU's cache.
COLD_BYTES = 256 << 20
MAX_ERROR = 1e-2  # ‖difference‖ / ‖PyTorch's result‖ for 16-bit numbers

WeightAndBias = tuple[Tensor, Tensor | None]
Launch = Callable[[Tensor, Tensor | None], Tensor]
Choices = dict[str, dict[int, int]]  # GEMM shape -> tokens -> candidate's index, or TORCH_DEFAULT


def fastest(plan: GemmPlan, pairs: Sequence[WeightAndBias]) -> int:
    """The index of the fastest candidate, or TORCH_DEFAULT. Takes about ten milliseconds."""
    shape, device = plan.shape, pairs[0][0].device
    x = torch.randn(plan.num_tokens, shape.num_columns, device=device, dtype=shape.dtype)
    out = torch.zeros(plan.num_tokens, shape.num_rows, device=device, dtype=shape.out_dtype)
    pairs = _cold(pairs)
    launches: dict[int, Launch] = {TORCH_DEFAULT: _torch_launch(shape, x, out)}
    for index, algorithm in enumerate(plan.candidates):
        launches[index] = _plan_launch(plan, algorithm, x, out)
    chosen = _surely_fastest(launches, pairs)
    if chosen != TORCH_DEFAULT and not _agrees(launches[chosen], launches[TORCH_DEFAULT], pairs[0], out):
        return TORCH_DEFAULT
    return chosen


def _surely_fastest(launches: dict[int, Launch], pairs: Sequence[WeightAndBias]) -> int:
    """Times every candidate once, then the best of them and PyTorch's choice in turns."""
    once = {index: _seconds(launch, pairs) for index, launch in launches.items() if index != TORCH_DEFAULT}
    others = sorted((seconds, index) for index, seconds in once.items() if seconds < REFUSED)
    finalists = [TORCH_DEFAULT, *(index for _, index in others[:FINALISTS])]
    launches[TORCH_DEFAULT](*pairs[0])  # the first launch may load code
    times: dict[int, list[list[float]]] = {finalist: [] for finalist in range(len(finalists))}
    for number in range(ROUNDS):
        # In alternating order, so that a drifting clock favours none.
        for finalist in sorted(times, reverse=bool(number % 2)):
            launch = launches[finalists[finalist]]
            times[finalist].append([queued_seconds(_over(launch, pairs), len(pairs))])
    return finalists[choose(times)]


def _torch_launch(shape: GemmShape, x: Tensor, out: Tensor) -> Launch:
    def launch(weight: Tensor, bias: Tensor | None) -> Tensor:
        return gemm(x, weight, bias, out if shape.residual else None, shape.relu, shape.widened)

    return launch


def _plan_launch(plan: GemmPlan, algorithm: Algorithm, x: Tensor, out: Tensor) -> Launch:
    def launch(weight: Tensor, bias: Tensor | None) -> Tensor:
        plan.run(algorithm, x, weight, bias, out)
        return out

    return launch


def _seconds(launch: Launch, pairs: Sequence[WeightAndBias]) -> float:
    """Seconds of one run, after a launch that may load code; REFUSED if the library rejects it."""
    try:
        launch(*pairs[0])
        return queued_seconds(_over(launch, pairs), len(pairs))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # the library may reject what its heuristic proposed
        return REFUSED


def _over(launch: Launch, pairs: Sequence[WeightAndBias]) -> Callable[[], None]:
    def run() -> None:
        for pair in pairs:
            launch(*pair)

    return run


def _cold(pairs: Sequence[WeightAndBias]) -> Sequence[WeightAndBias]:
    """The fewest weights that are read from memory each time, not from the GPU's cache."""
    weight = pairs[0][0]
    return pairs[: -(-COLD_BYTES // (weight.numel() * weight.element_size()))]


def _agrees(launch: Launch, default: Launch, pair: WeightAndBias, out: Tensor) -> bool:
    """Whether both results are equal but for rounding."""
    results = []
    for run in (default, launch):
        out.fill_(1.0)  # the residual, if there is one
        results.append(run(*pair).float().clone())
    error = float((results[1] - results[0]).norm() / results[0].norm())
    return error <= MAX_ERROR


@dataclass(frozen=True, slots=True)
class ChipKey:
    """The GPU and versions that choices were measured with."""

    chip: str
    library: str
    torch: str


def key_of(device: torch.device) -> ChipKey:
    return ChipKey(gpu_name(device), version(), torch.__version__)


def store(key: ChipKey, choices: Choices) -> None:
    """Adds these choices to the cached ones."""
    if not choices:
        return
    merged = cache.load(key) or {}
    for shape, indices in choices.items():
        merged.setdefault(shape, {}).update(indices)
    cache.store(key, chosen=merged)


def _parse(record: Mapping[str, Any]) -> tuple[ChipKey, Choices]:
    """The content of a file. Raises for anything that this version did not write."""
    chosen = {str(shape): _indices(entries) for shape, entries in record["chosen"].items()}
    return ChipKey(**record["key"]), chosen


def _indices(entries: dict[str, int]) -> dict[int, int]:
    indices = {int(tokens): index for tokens, index in entries.items()}
    if not indices:
        raise ValueError("a GEMM without a number of tokens")
    for index in indices.values():
        if type(index) is not int or not TORCH_DEFAULT <= index < MAX_CANDIDATES:
            raise ValueError(f"{index!r} names no algorithm")
    return indices


cache: TunedCache[ChipKey, Choices] = TunedCache("products", 1, _parse, "GEMMs are measured again")

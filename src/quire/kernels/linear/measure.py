"""Measures a product's algorithms on this chip. PyTorch's own choice stays unless another is surely faster."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.kernels.linear.cublaslt import Found, Kind, Product
from quire.kernels.linear.reference import product
from quire.kernels.timing import choose, queued_seconds

PYTORCHS = -1  # the choice that needs no algorithm of ours
FINALISTS = 2  # beside PyTorch's choice: those are timed again
ROUNDS = 2
REFUSED = float("inf")  # seconds
COLD_BYTES = 256 << 20  # weights go round until so much was read: in a model, too, they come from memory
MAX_ERROR = 1e-2  # ‖difference‖ / ‖PyTorch's result‖ for 16-bit numbers

Pair = tuple[Tensor, Tensor | None]  # a weight and its bias
Launch = Callable[[Tensor, Tensor | None], Tensor]


def fastest(plan: Product, pairs: Sequence[Pair]) -> int:
    """The index of the fastest candidate, or PYTORCHS. Takes some ten milliseconds."""
    kind, device = plan.kind, pairs[0][0].device
    x = torch.randn(plan.num_tokens, kind.num_columns, device=device, dtype=kind.dtype)
    out = torch.zeros(plan.num_tokens, kind.num_rows, device=device, dtype=kind.out_dtype)
    pairs = _cold(pairs)
    launches: dict[int, Launch] = {PYTORCHS: _pytorchs(kind, x, out)}
    for index, found in enumerate(plan.candidates):
        launches[index] = _ours(plan, found, x, out)
    chosen = _surely_fastest(launches, pairs)
    if chosen != PYTORCHS and not _agrees(launches[chosen], launches[PYTORCHS], pairs[0], out):
        return PYTORCHS
    return chosen


def _surely_fastest(launches: dict[int, Launch], pairs: Sequence[Pair]) -> int:
    """Of all that run, timed once; then the best of them and PyTorch's, timed in turns."""
    once = {index: _seconds(launch, pairs) for index, launch in launches.items() if index != PYTORCHS}
    others = sorted((seconds, index) for index, seconds in once.items() if seconds < REFUSED)
    finalists = [PYTORCHS, *(index for _, index in others[:FINALISTS])]
    launches[PYTORCHS](*pairs[0])  # this, too, may load code first
    times: dict[int, list[list[float]]] = {place: [] for place in range(len(finalists))}
    for number in range(ROUNDS):
        for place in sorted(times, reverse=bool(number % 2)):  # to and fro, lest a drifting clock favours one
            times[place].append([queued_seconds(_over(launches[finalists[place]], pairs), len(pairs))])
    return finalists[choose(times)]


def _pytorchs(kind: Kind, x: Tensor, out: Tensor) -> Launch:
    def launch(weight: Tensor, bias: Tensor | None) -> Tensor:
        return product(x, weight, bias, out if kind.residual else None, kind.relu, kind.widened)

    return launch


def _ours(plan: Product, found: Found, x: Tensor, out: Tensor) -> Launch:
    def launch(weight: Tensor, bias: Tensor | None) -> Tensor:
        plan.run(found, x, weight, bias, out)
        return out

    return launch


def _seconds(launch: Launch, pairs: Sequence[Pair]) -> float:
    """Once, after a launch that may load code; REFUSED if it cannot run."""
    try:
        launch(*pairs[0])
        return queued_seconds(_over(launch, pairs), len(pairs))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # the heuristic may name what the library then refuses
        return REFUSED


def _over(launch: Launch, pairs: Sequence[Pair]) -> Callable[[], None]:
    def run() -> None:
        for pair in pairs:
            launch(*pair)

    return run


def _cold(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """As few as are read from memory each time, not from the chip's cache."""
    weight = pairs[0][0]
    return pairs[: -(-COLD_BYTES // (weight.numel() * weight.element_size()))]


def _agrees(launch: Launch, default: Launch, pair: Pair, out: Tensor) -> bool:
    """Whether both give the same, but for rounding."""
    results = []
    for one in (default, launch):
        out.fill_(1.0)  # what a residual adds
        results.append(one(*pair).float().clone())
    error = float((results[1] - results[0]).norm() / results[0].norm())
    return error <= MAX_ERROR

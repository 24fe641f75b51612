"""Experts: the matrices of a mixture's experts in one number format, and their products for the tokens routed there."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.moe.records import AwayExperts, ClampedGate, Routing
from quire.kernels.moe.reference import chosen, clamped_gate
from quire.quant.encoded import Weight
from quire.quant.format import Matrix, NumberFormat
from quire.quant.full import FullMatrix, InvariantMatrix
from quire.quant.int8 import Int8Matrix

GATE_UP, DOWN = "gate_up", "down"


def make_experts(
    number_format: NumberFormat, kernel: ModuleType, device: torch.device, count: int, hidden: int, inner: int
) -> "Experts":
    """`count` experts hidden -> inner -> hidden. In full precision they lie in one tensor; in other formats each
    expert has its own matrices, which run on a CPU only: a loop over chosen experts would make a GPU wait for the host.
    """
    stacked, down = (
        number_format.matrix(count * 2 * inner, hidden),
        number_format.matrix(count * hidden, inner),
    )
    if isinstance(stacked, FullMatrix) and isinstance(down, FullMatrix):
        return StackedExperts(stacked, down, kernel, count)
    if device.type == "cuda":
        raise ConfigError(
            f"quantization={number_format.name.partition('-')[0]!r} has no grouped GEMM for experts on a GPU: choose "
            "quantization='none', or run on the CPU"
        )
    pairs = [
        (number_format.matrix(2 * inner, hidden), number_format.matrix(hidden, inner)) for _ in range(count)
    ]
    return SeparateExperts(pairs, kernel)


class Experts(ABC):
    """What a mixture needs of its experts. Matrices are gate, then up; and down."""

    native = False  # the product is one native operation, which a tape can record

    @abstractmethod
    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        residual: Tensor,
        shared: Tensor | None,
        clamped: ClampedGate | None,
    ) -> Tensor:
        """x [T, hidden] -> residual + the weighted sum of each token's experts (+ the shared expert's)."""

    @abstractmethod
    def load(self, expert: int, matrix: str, first_row: int, rows: Weight) -> None:
        """Fills the rows of one expert's GATE_UP or DOWN matrix from `first_row` on."""

    @abstractmethod
    def matrices(self) -> Mapping[str, Matrix]:
        """All matrices, by name."""

    @abstractmethod
    def tensors(self) -> list[list[Tensor]]:
        """Of each expert, its parts of the stored tensors; views."""


class StackedExperts(Experts):
    """Full precision: [E, 2F, H] and [E, H, F], multiplied by one kernel for all experts."""

    def __init__(self, gate_up: FullMatrix, down: FullMatrix, kernel: ModuleType, count: int) -> None:
        self._matrices = {GATE_UP: gate_up, DOWN: down}
        self._count = count
        self._kernel = kernel
        self._invariant = isinstance(gate_up, InvariantMatrix)
        self._placed: tuple[Tensor, Tensor, AwayExperts] | None = None  # None: all are in the matrices

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        residual: Tensor,
        shared: Tensor | None,
        clamped: ClampedGate | None,
    ) -> Tensor:
        gate_up, down, away = self._placed or (*self._stacks(), None)
        return self._kernel.experts(
            x, gate_up, down, routing, residual, shared, self._invariant, clamped, away
        )

    def _stacks(self) -> tuple[Tensor, Tensor]:
        """[E, 2F, H] and [E, H, F]."""
        matrices = (matrix.state()["weight"] for matrix in self._matrices.values())
        gate_up, down = (weight.unflatten(0, (self._count, -1)) for weight in matrices)
        return gate_up, down

    def place(self, memory: Tensor, num_away: int) -> tuple[Tensor, Tensor, AwayExperts]:
        """Moves the last `num_away` experts to `memory`, uint8 as many as they take, and keeps the others.

        Matrices then have sizes, and no numbers.
        """
        stacks, kept, away, first = self._stacks(), [], [], 0
        for stack in stacks:
            leaving = stack[self._count - num_away :]
            part = memory[first : first + leaving.nbytes].view(stack.dtype).view(leaving.shape)
            kept.append(stack[: self._count - num_away].clone())
            away.append(part.copy_(leaving))
            first += leaving.nbytes
        places = [*range(self._count - num_away), *range(-1, -1 - num_away, -1)]
        others = AwayExperts(
            away[0], away[1], torch.tensor(places, dtype=torch.int32, device=stacks[0].device)
        )
        for matrix in self._matrices.values():
            matrix.release()
        self._placed = kept[0], kept[1], others
        return self._placed

    def load(self, expert: int, matrix: str, first_row: int, rows: Weight) -> None:
        stacked = self._matrices[matrix]
        stacked.load(expert * (stacked.num_rows // self._count) + first_row, rows)

    def matrices(self) -> Mapping[str, Matrix]:
        return self._matrices

    def tensors(self) -> list[list[Tensor]]:
        stacks = [matrix.state()["weight"].chunk(self._count) for matrix in self._matrices.values()]
        return [list(parts) for parts in zip(*stacks, strict=True)]


class SeparateExperts(Experts):
    """Two matrices per expert. In int8 one native operation runs the chosen ones, otherwise a loop on the host."""

    def __init__(self, pairs: list[tuple[Matrix, Matrix]], kernel: ModuleType) -> None:
        self._pairs = pairs
        self._kernel = kernel
        self._inner = pairs[0][1].num_columns
        self.native = (
            hasattr(kernel, "int8_experts")
            and self._inner % 16 == 0
            and all(type(matrix) is Int8Matrix for pair in pairs for matrix in pair)
        )
        self._addresses: Tensor | None = None  # [E, 6], of the matrices' tensors

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        residual: Tensor,
        shared: Tensor | None,
        clamped: ClampedGate | None,
    ) -> Tensor:
        if self.native and clamped is None:
            return self._kernel.int8_experts(
                x, self._current_addresses(), self._inner, routing, residual, shared
            )
        results = x.new_empty(*routing.experts.shape, x.shape[1])
        for expert, tokens, places in chosen(routing):
            gate_up, down = self._pairs[expert]
            if clamped is None:
                result = down.linear(gate_up.linear_silu_mul(x[tokens], None), None, None)
            else:
                both = gate_up.linear(x[tokens], None, None) + clamped.gate_up_bias[expert]
                result = down.linear(clamped_gate(both, clamped), None, None) + clamped.down_bias[expert]
            results[tokens, places] = result
        return self._kernel.combine(results, routing, residual, shared)

    def _current_addresses(self) -> Tensor:
        """Found at the first product: until then matrices are loaded, or take over other tensors."""
        if self._addresses is None:
            names = ("packed", "scales", "sums")
            self._addresses = torch.tensor(
                [[m.state()[name].data_ptr() for m in pair for name in names] for pair in self._pairs]
            )
        return self._addresses

    def load(self, expert: int, matrix: str, first_row: int, rows: Weight) -> None:
        self._pairs[expert][matrix == DOWN].load(first_row, rows)

    def matrices(self) -> Mapping[str, Matrix]:
        return {
            f"{expert}.{name}": matrix
            for expert, pair in enumerate(self._pairs)
            for name, matrix in zip((GATE_UP, DOWN), pair, strict=True)
        }

    def tensors(self) -> list[list[Tensor]]:
        return [[tensor for matrix in pair for tensor in matrix.state().values()] for pair in self._pairs]

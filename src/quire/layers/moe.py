"""MixtureOfExperts: a feed-forward layer in which a router sends each token through a few of many experts."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.kernels.moe.records import ClampedGate
from quire.layers.expert_memory import ExpertMemory, PinnedExperts
from quire.layers.factory import LayerFactory
from quire.layers.linear import Linear
from quire.layers.lora import LoraBatch
from quire.layers.parameters import Composite, Loader, Stateful, Table, check_finite
from quire.layers.streaming import CopyStream, PinnedMemory
from quire.quant.encoded import Weight, floats
from quire.quant.experts import DOWN, GATE_UP, StackedExperts, make_experts
from quire.quant.full import FullMatrix


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """Experts of one layer."""

    num_experts: int
    top_k: int  # experts that a token goes through
    hidden: int
    inner: int  # of an expert
    shared_inner: int  # of the expert that every token goes through; 0: there is none
    renormalize: bool  # weights of the chosen experts sum to 1
    clamp: tuple[float, float] | None = None  # of ClampedGate; then the router and all matrices have biases

    @property
    def expert_elements(self) -> int:
        """Numbers of one expert's matrices."""
        return 3 * self.hidden * self.inner


@dataclass(frozen=True, slots=True)
class MixtureNames:
    """What a checkpoint calls the parts of a mixture, below the layer's prefix."""

    module: str  # such as "mlp."
    gate: str = "gate_proj"  # of an expert
    up: str = "up_proj"
    down: str = "down_proj"


class MixtureOfExperts(Composite):
    """x + the weighted sum of its experts. The router stays in floats, its last row is the shared expert's gate."""

    def __init__(self, factory: LayerFactory, shape: MixtureShape) -> None:
        self.shape = shape
        self._kernel = factory.kernel("moe")
        self._logits = getattr(self._kernel, "logits", None)  # None: as any other GEMM
        number_format, rows = factory.number_format, shape.num_experts + (shape.shared_inner > 0)
        if self._logits is None:  # in full precision, or the experts are refused
            self.router = number_format.matrix(rows, shape.hidden)
        else:
            gemm = number_format.gemm
            self.router = FullMatrix(rows, shape.hidden, factory.dtype, factory.device, gemm)
        self._experts = make_experts(
            number_format, self._kernel, factory.device, shape.num_experts, shape.hidden, shape.inner
        )
        self.memory: ExpertMemory | None = None  # None: all experts stay where they are used
        self.shared_gate_up: Linear | None = None
        self.shared_down: Linear | None = None
        if shape.shared_inner:
            self.shared_gate_up = factory.linear(2 * shape.shared_inner, shape.hidden)
            self.shared_down = factory.linear(shape.hidden, shape.shared_inner)
        self.recordable = factory.recordable and self._experts.native and shape.clamp is None
        self.router_bias = self.gate_up_bias = self.down_bias = None
        if shape.clamp is not None:
            count, of = shape.num_experts, (factory.dtype, factory.device)
            self.router_bias = Table((count,), torch.float32, factory.device)
            self.gate_up_bias = Table((count, 2 * shape.inner), *of)
            self.down_bias = Table((count, shape.hidden), *of)

    def __call__(self, x: Tensor, residual: Tensor, lora: LoraBatch | None = None) -> Tensor:
        """x [T, hidden], normalised, and residual [T, hidden] -> [T, hidden]."""
        shape = self.shape
        if self._logits is None:
            logits = self.router.logits(x)
        else:
            logits = self._logits(x, self.router.state()["weight"])
        if self.router_bias is not None:
            logits = logits + self.router_bias.value
        routing = self._kernel.choose(logits, shape.num_experts, shape.top_k, shape.renormalize)
        if self.memory is not None:
            self.memory.before(routing.experts)
        shared = None
        if self.shared_gate_up is not None and self.shared_down is not None:
            shared = self.shared_down(self.shared_gate_up.silu_mul(x, lora), None, lora)
        result = self._experts(x, routing, residual, shared, self._clamped())
        if self.memory is not None:
            self.memory.after(routing.experts)
        return result

    def move_experts(self, piece: Tensor, num_away: int, copies: CopyStream, memory: PinnedMemory) -> None:
        """`num_away` experts go to `piece`, a part of `memory` of their size; from now on use decides which."""
        assert isinstance(self._experts, StackedExperts), "other formats of experts do not run on a GPU"
        gate_up, down, away = self._experts.place(piece, num_away)
        self.memory = PinnedExperts((gate_up, down), away, copies, memory)

    def tensors_of_experts(self) -> list[list[Tensor]]:
        """Of each expert, its parts of all tensors; views."""
        return self._experts.tensors()

    def _clamped(self) -> ClampedGate | None:
        if self.shape.clamp is None or self.gate_up_bias is None or self.down_bias is None:
            return None
        return ClampedGate(*self.shape.clamp, self.gate_up_bias.value, self.down_bias.value)

    def layers(self) -> dict[str, Stateful]:
        experts = {f"experts.{name}": matrix for name, matrix in self._experts.matrices().items()}
        return {**super().layers(), **experts}

    def loaders(self, prefix: str, names: MixtureNames) -> dict[str, Loader]:
        """For a checkpoint with one tensor per expert and matrix. Adapters can add to the shared expert only."""
        shape, module = self.shape, prefix + names.module
        loaders = self.router_loaders(f"{module}gate")
        for expert in range(shape.num_experts):
            start = f"{module}experts.{expert}."
            loaders[f"{start}{names.gate}.weight"] = self._loader(expert, GATE_UP, 0)
            loaders[f"{start}{names.up}.weight"] = self._loader(expert, GATE_UP, shape.inner)
            loaders[f"{start}{names.down}.weight"] = self._loader(expert, DOWN, 0)
        if self.shared_gate_up is not None and self.shared_down is not None:
            shared, inner = f"{module}shared_expert.", shape.shared_inner
            loaders[f"{module}shared_expert_gate.weight"] = Loader(
                (1, shape.hidden), lambda rows: self.router.load(shape.num_experts, rows)
            )
            rows = {f"{shared}gate_proj": inner, f"{shared}up_proj": inner}
            loaders |= self.shared_gate_up.part_loaders(rows)
            loaders |= self.shared_down.loaders(f"{shared}down_proj")
        return loaders

    def router_loaders(self, name: str) -> dict[str, Loader]:
        shape = self.shape
        loaders = {
            f"{name}.weight": Loader(
                (shape.num_experts, shape.hidden), lambda rows: self.router.load(0, rows)
            )
        }
        if self.router_bias is not None:
            loaders[f"{name}.bias"] = self.router_bias.loader()
        return loaders

    def bias_loaders(self, gate_up: str, down: str) -> dict[str, Loader]:
        """Of a clamped mixture: one tensor for all experts, in which gate and up take turns."""
        assert self.gate_up_bias is not None, "only a clamped mixture has biases"
        assert self.down_bias is not None, "only a clamped mixture has biases"
        return {
            gate_up: self.gate_up_bias.loader(lambda rows: torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)),
            down: self.down_bias.loader(),
        }

    def split_bias_loaders(self, experts: str) -> dict[str, Loader]:
        """The same from tensors for gate, up and down."""
        assert self.gate_up_bias is not None, "only a clamped mixture has biases"
        assert self.down_bias is not None, "only a clamped mixture has biases"
        gate, up = self.gate_up_bias.value.chunk(2, dim=1)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": self.down_bias.value}

        def take(part: Tensor, rows: Weight) -> None:
            check_finite(floats(rows))
            part.copy_(floats(rows))

        return {
            f"{experts}{name}.bias": Loader(tuple(part.shape), partial(take, part))
            for name, part in parts.items()
        }

    def load_expert(self, expert: int, matrix: str, rows: Tensor) -> None:
        """One expert's whole GATE_UP or DOWN matrix."""
        self._experts.load(expert, matrix, 0, rows)

    def _loader(self, expert: int, matrix: str, first_row: int) -> Loader:
        shape = self.shape
        size = (shape.hidden, shape.inner) if matrix == DOWN else (shape.inner, shape.hidden)

        def take(rows: Weight) -> None:
            self._experts.load(expert, matrix, first_row, rows)

        return Loader(size, take)

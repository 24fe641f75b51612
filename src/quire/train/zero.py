"""ZeRO: optimizer states (stage 1), gradients (2) and parameters (3) divided between ranks of torch.distributed.

Own, because torch's ZeroRedundancyOptimizer shards by whole parameters and only states, and FSDP2 shards modules:
here the trained numbers are one flat vector, and models are no modules.

With P parameters, N ranks and K bytes of optimizer states for each parameter (12 in mixed precision: a float32 copy and
Adam's two states), a rank keeps 2P + 2P + KP bytes in stage 0, 2P + 2P + KP / N in stage 1, 2P + (2 + K) P / N in stage
2 and (4 + K) P / N in stage 3.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quire.core.errors import ConfigError
from quire.train.frozen import StoredWeight
from quire.train.lora import LoraParameters

STAGES = (0, 1, 2, 3)
MIXED_STATE = 12  # bytes: float32 parameters, momentum and variance
HALF, SINGLE = 2, 4


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one rank."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def full_training(num_parameters: int, ranks: int) -> tuple[StageMemory, ...]:
    """All parameters trained with Adam in mixed precision."""
    half = HALF * num_parameters
    return _stages(ranks, half, half, MIXED_STATE * num_parameters)


def lora_training(base_bytes: float, trained: int, ranks: int) -> tuple[StageMemory, ...]:
    """A frozen base and `trained` float32 parameters, with states of AdamW in 32 bits: what `quire finetune` keeps."""
    single = SINGLE * trained
    return _stages(ranks, base_bytes + single, single, 2 * single)


def _stages(ranks: int, parameters: float, gradients: float, optimizer: float) -> tuple[StageMemory, ...]:
    first_divided = ((3, parameters), (2, gradients), (1, optimizer))
    return tuple(
        StageMemory(stage, *(part / (ranks if stage >= first else 1) for first, part in first_divided))
        for stage in STAGES
    )


class StateShards:
    """This rank's part of the trained vector: elements `first` … `last` - 1; all of it in stage 0."""

    def __init__(self, parameters: LoraParameters, stage: int = 0, rank: int = 0, world: int = 1) -> None:
        if stage not in STAGES:
            raise ConfigError(f"ZeRO stage {stage} is not known: choose 0 to 3")
        self.stage, self.rank, self.world = (stage, rank, world) if world > 1 else (0, 0, 1)
        self._parameters = parameters
        size = len(parameters.flat)
        self.length = -(-size // self.world) if self.stage else size
        self.first = min(size, self.rank * self.length) if self.stage else 0
        self.last = min(size, self.first + self.length)
        self._own: Tensor | None = None  # stage 3: the parameters between steps
        self._grads = torch.zeros(self.last - self.first, device=parameters.flat.device)
        if self.stage < 2:
            self._grads = parameters.make_grad()
        else:
            for offset, leaf in parameters.leaves:
                leaf.register_post_accumulate_grad_hook(self._reducer(offset))
        if self.stage == 3:
            self.release()

    # ------------------------------------------------------------------ a step

    def gather(self) -> None:
        """Before a step, and before parameters are read: all of them are here."""
        if self.stage == 3 and self._own is not None:
            flat = self._parameters.flat
            flat.untyped_storage().resize_(flat.numel() * flat.element_size())
            own, self._own = self._own, None
            self._all_gather(own)

    def release(self) -> None:
        """After it: stage 3 keeps its own part only."""
        if self.stage == 3 and self._own is None:
            flat = self._parameters.flat
            self._own = flat[self.first : self.last].clone()
            flat.untyped_storage().resize_(0)

    def reduce(self) -> float:
        """After the last backward pass: sums gradients over ranks, and returns their norm."""
        if self.world == 1:
            return float(self._grads.norm())
        if self.stage < 2:
            dist.all_reduce(self._grads)
            return float(self._grads.norm())
        square = self._grads.square().sum()
        dist.all_reduce(square)
        return float(square.sqrt())

    @property
    def parameters(self) -> Tensor:
        """What this rank updates."""
        return self._parameters.flat[self.first : self.last]

    @property
    def grads(self) -> Tensor:
        return self._grads[self.first : self.last] if self.stage < 2 else self._grads

    def update(self) -> None:
        """After the optimizer: every rank gets every part, and gradients are zero."""
        if self.stage:
            self._all_gather(self.parameters.clone())
        self._grads.zero_()

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def on_any(self, flag: bool) -> bool:
        """Whether `flag` is set on one of the ranks."""
        return bool(self.total(torch.tensor(float(flag), device=self._parameters.flat.device)))

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    @property
    def num_bytes(self) -> dict[str, int]:
        """Of the trained vector, between steps."""
        flat = self._parameters.flat
        kept = self._own if self._own is not None else flat
        return {"parameters": kept.numel() * 4, "gradients": self._grads.numel() * 4}

    # ------------------------------------------------------------------ inside

    def _all_gather(self, own: Tensor) -> None:
        flat = self._parameters.flat
        padded = torch.zeros(self.length, device=flat.device)
        padded[: len(own)] = own
        with torch.no_grad():
            flat.copy_(_gathered(padded, self.world)[: len(flat)])

    def _reducer(self, offset: int) -> Callable[[Tensor], None]:
        """Sums a leaf's gradient at the ranks that own it, and drops it here."""

        def reduce(leaf: Tensor) -> None:
            assert leaf.grad is not None
            grad, leaf.grad = leaf.grad.reshape(-1), None
            for owner in range(offset // self.length, (offset + len(grad) - 1) // self.length + 1):
                first = max(offset, owner * self.length)
                last = min(offset + len(grad), (owner + 1) * self.length)
                part = grad[first - offset : last - offset].contiguous()
                dist.reduce(part, owner)
                if owner == self.rank:
                    self._grads[first - self.first : last - self.first] += part

        return reduce


def _gathered(own: Tensor, world: int) -> Tensor:
    """Equal parts of all ranks in one tensor, in their order."""
    whole = own.new_empty(world * len(own))
    # its name until PyTorch 2.12
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, own)
    return whole


class ShardedWeight(StoredWeight):
    """Stage 3 of a frozen matrix: this rank's share of it, gathered for each product."""

    def __init__(self, weight: Tensor, rank: int, world: int) -> None:
        self._shape, self._world = weight.shape, world
        length = -(-weight.numel() // world)
        self._own = torch.zeros(length, dtype=weight.dtype, device=weight.device)
        own = weight.reshape(-1)[rank * length : (rank + 1) * length]
        self._own[: len(own)] = own

    def restore(self) -> Tensor:
        return _gathered(self._own, self._world)[: self._shape.numel()].view(self._shape)

    @property
    def num_bytes(self) -> int:
        return self._own.numel() * self._own.element_size()


def start_ranks(rank: int, world: int, address: str, device: torch.device) -> None:
    """Joins the process group at tcp://`address`: NCCL on GPUs, gloo elsewhere."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://{address}", rank=rank, world_size=world)


def end_ranks() -> None:
    with suppress(Exception):
        dist.destroy_process_group()


def lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)

"""AdamW over one flat vector, with states in 32 or 8 bits, on the device or in host memory; schedules of its rate."""

import math
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from quire.core.errors import TrainingError
from quire.quant.codebook import nearest, signed_map

BLOCK = 256  # numbers that share a scale
CHUNK = 1 << 24  # numbers updated at a time: bounds the float32 copies


@cache
def _positive(device: torch.device) -> Tensor:
    """256 steps above 0, of seven decades; never 0 itself, which would divide by nothing."""
    low = torch.logspace(-7, 0, 256, dtype=torch.float64)
    return low.float().to(device)


class Moments:
    """One state vector: float32, or 8 bits with a scale for each block of 256 numbers."""

    def __init__(
        self, size: int, device: torch.device, bits: int, signed: bool, pinned: bool = False
    ) -> None:
        self._signed, self._size, self.bits = signed, size, bits
        where: dict[str, object] = {"device": "cpu", "pin_memory": True} if pinned else {"device": device}
        if bits == 32:
            self.parts = {"values": torch.zeros(size, **where)}  # type: ignore[call-overload]
        else:
            num_blocks = -(-size // BLOCK)
            self.parts = {
                "codes": torch.zeros(num_blocks * BLOCK, dtype=torch.uint8, **where),  # type: ignore[call-overload]
                "scales": torch.zeros(num_blocks, **where),  # type: ignore[call-overload]
            }

    def read(self, first: int, last: int, device: torch.device) -> Tensor:
        """float32; `first` begins a block."""
        if self.bits == 32:
            return self.parts["values"][first:last].to(device)
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        codes = self.parts["codes"][first : blocks.stop * BLOCK].to(device).view(-1, BLOCK)
        values = self._table(device)[codes.long()] * self.parts["scales"][blocks].to(device)[:, None]
        return values.view(-1)[: last - first]

    def write(self, first: int, last: int, values: Tensor) -> None:
        if self.bits == 32:
            self.parts["values"][first:last].copy_(values)
            return
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        padded = torch.nn.functional.pad(values, (0, blocks.stop * BLOCK - last)).view(-1, BLOCK)
        scales = padded.abs().amax(1)
        unit = padded / torch.where(scales > 0, scales, 1.0)[:, None]
        self.parts["codes"][first : blocks.stop * BLOCK].copy_(
            nearest(self._table(values.device), unit).view(-1)
        )
        self.parts["scales"][blocks].copy_(scales)

    def _table(self, device: torch.device) -> Tensor:
        return signed_map(device) if self._signed else _positive(device)


class AdamW:
    """Decoupled weight decay, as torch.optim.AdamW. In 8 bits the second state is kept as its root.

    `paged`: states in pinned host memory, a part at a time on the device while it is updated.
    """

    library = ""  # whose states they are; empty: Quire's own
    why_own = ""  # where they would have been a library's

    def __init__(
        self,
        size: int,
        device: torch.device,
        bits: int = 32,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        paged: bool = False,
    ) -> None:
        self._betas, self._eps, self._decay = betas, eps, weight_decay
        self.num_steps = 0
        self.paged = paged
        try:
            self._make(size, device, bits, paged)
        except torch.cuda.OutOfMemoryError:  # the device is full: host memory holds the states
            self.paged = True
            self._make(size, device, bits, True)

    def _make(self, size: int, device: torch.device, bits: int, pinned: bool) -> None:
        pinned = pinned and device.type == "cuda"
        self._first = Moments(size, device, bits, signed=True, pinned=pinned)
        self._second = Moments(size, device, bits, signed=False, pinned=pinned)

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.state().values())

    @torch.no_grad()
    def step(self, parameters: Tensor, grads: Tensor, rate: float) -> None:
        """parameters [n] in place, by grads [n]."""
        self.num_steps += 1
        beta1, beta2 = self._betas
        correction1 = 1 - beta1**self.num_steps
        correction2 = math.sqrt(1 - beta2**self.num_steps)
        for first in range(0, len(parameters), CHUNK):
            last = min(first + CHUNK, len(parameters))
            values, grad = parameters[first:last], grads[first:last]
            mean = self._first.read(first, last, values.device).mul_(beta1).add_(grad, alpha=1 - beta1)
            second = self._second.read(first, last, values.device)
            square = second if self._second.bits == 32 else second.square_()
            square = square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = square.sqrt()
            if self._decay:
                values.mul_(1 - rate * self._decay)
            values.addcdiv_(mean, (root / correction2).add_(self._eps), value=-rate / correction1)
            self._first.write(first, last, mean)
            self._second.write(first, last, square if self._second.bits == 32 else root)

    def state(self) -> dict[str, Tensor]:
        parts = {f"first.{name}": part for name, part in self._first.parts.items()}
        return parts | {f"second.{name}": part for name, part in self._second.parts.items()}

    def load(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        self.num_steps = num_steps
        own = self.state()
        if own.keys() != state.keys():
            raise TrainingError(
                "the checkpoint's optimizer states are not those of this run: 8 bits are bitsandbytes' where it is "
                "installed and --offload-optimizer is off, otherwise Quire's own; go on as it was, or --overwrite"
            )
        for name, part in own.items():
            part.copy_(state[name])


class LibraryAdamW(AdamW):
    """bitsandbytes' AdamW in 8 bits: its tables of codes, and one kernel for a step."""

    library = "bitsandbytes"

    def _make(self, size: int, device: torch.device, bits: int, pinned: bool) -> None:
        from bitsandbytes import functional

        self._update = functional.optimizer_update_8bit_blockwise
        self._tables = [functional.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]
        self._codes = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in self._tables]
        self._scales = [torch.zeros(-(-size // BLOCK), device=device) for _ in self._tables]

    @torch.no_grad()
    def step(self, parameters: Tensor, grads: Tensor, rate: float) -> None:
        self.num_steps += 1
        numbers = (*self._betas, 0.0, 0.0, self._eps, self.num_steps, rate)
        self._update(
            "adam", grads, parameters, *self._codes, *numbers, *self._tables, *self._scales, self._decay
        )

    def state(self) -> dict[str, Tensor]:
        parts = zip(("first", "second"), self._codes, self._scales, strict=True)
        return {
            f"{self.library}.{name}.{what}": part
            for name, *both in parts
            for what, part in zip(("codes", "scales"), both, strict=True)
        }


def adamw(
    size: int, device: torch.device, bits: int, weight_decay: float, paged: bool, own: bool = False
) -> AdamW:
    """States of 8 bits on the device are bitsandbytes' where it is installed and works, unless `own` is set."""
    why = ""
    if bits == 8 and not paged and not own and find_spec("bitsandbytes"):
        try:
            values, grads = torch.zeros(BLOCK, device=device), torch.ones(BLOCK, device=device)
            LibraryAdamW(BLOCK, device, bits).step(values, grads, 0.1)
            if not (values < 0).all():
                raise RuntimeError("its step is wrong")
            return LibraryAdamW(size, device, bits, weight_decay)
        except Exception as error:  # a build for other devices or versions, or a device without room
            why = f"bitsandbytes does not work here ({error}): the optimizer's states are Quire's own"
    optimizer = AdamW(size, device, bits, weight_decay, paged=paged)
    optimizer.why_own = why
    return optimizer


def rate_at(step: int, num_steps: int, warmup: int, peak: float, schedule: str) -> float:
    """The learning rate of step 0 … num_steps - 1: linear warm-up, then constant, or down to 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    match schedule:
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            return peak * (1 - done)
    return peak

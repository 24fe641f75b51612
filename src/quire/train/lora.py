"""LoRA matrices as parameters: all of them in one flat vector, so that optimizers and shards see one tensor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.errors import ConfigError
from quire.layers.linear import HEAD
from quire.layers.lora import LoraBatch, LoraSite, install_sites
from quire.layers.parameters import Loader
from quire.train.settings import ALL


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One module's matrices."""

    site: LoraSite
    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]


class LoraParameters:
    """A and B of every adapted module, float32 views into `flat`.

    It is also the kernel that layers call at their sites, in place of kernels/lora.
    """

    def __init__(self, rank: int, alpha: float, dropout: float = 0.0) -> None:
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        self.flat = torch.empty(0)
        self.pairs: dict[int, LoraPair] = {}  # by the index of the site
        self.leaves: list[tuple[int, Tensor]] = []  # (offset in flat, leaf)
        self.adapted = LoraBatch(None, None, kinds=0)  # type: ignore[arg-type]  # of every batch: there are no tables
        self.training = False  # dropout applies

    def make(self, sites: Sequence[LoraSite], device: torch.device, seed: int) -> None:
        """Matrices of these sites, as PEFT begins them: A uniform within 1 / sqrt(inputs), B zero."""
        self.flat = torch.zeros(sum(self.rank * (s.num_inputs + s.num_outputs) for s in sites), device=device)
        generator, offset = torch.Generator().manual_seed(seed), 0
        for site in sites:
            matrices: list[Tensor] = []
            for shape in ((self.rank, site.num_inputs), (site.num_outputs, self.rank)):
                leaf = self.flat[offset : offset + math.prod(shape)].view(shape).detach()
                if not matrices:
                    bound = site.num_inputs**-0.5
                    leaf.copy_(torch.empty(shape).uniform_(-bound, bound, generator=generator))
                self.leaves.append((offset, leaf.requires_grad_()))
                matrices.append(leaf)
                offset += leaf.numel()
            self.pairs[site.index] = LoraPair(site, *matrices)
        kinds = sum(1 << kind for kind in {site.kind for site in sites})
        self.adapted = LoraBatch(None, None, kinds)  # type: ignore[arg-type]

    def make_grad(self) -> Tensor:
        """A flat vector that backward passes add gradients to, kept by the caller."""
        grad = torch.zeros_like(self.flat)
        for offset, leaf in self.leaves:
            leaf.grad = grad[offset : offset + leaf.numel()].view(leaf.shape)
        return grad

    def tensors(self) -> dict[str, Tensor]:
        """As PEFT names them."""
        named = {}
        for pair in self.pairs.values():
            named[f"base_model.model.{pair.site.name}.lora_A.weight"] = pair.a.detach()
            named[f"base_model.model.{pair.site.name}.lora_B.weight"] = pair.b.detach()
        return named

    def add(
        self, x: Tensor, y: Tensor, tables: None, segments: None, first_site: int, bounds: tuple[int, ...]
    ) -> None:
        """y[:, part] += alpha / rank * B A dropout(x) for every part of a fused projection that has matrices."""
        if self.training and self.dropout:
            x = F.dropout(x, self.dropout)
        parts, matrices = [], []
        for part, span in enumerate(pairwise(bounds)):
            pair = self.pairs.get(first_site + part)
            if pair is not None:
                parts.append(span)
                matrices += [pair.a, pair.b]
        if parts:
            _AddedAdapters.apply(y, x, self.alpha / self.rank, parts, *matrices)


class _AddedAdapters(torch.autograd.Function):
    """In place on y, so that of a wide projection nothing but its own result is written."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, scale: float, parts: list[tuple[int, int]], *matrices: Tensor
    ) -> Tensor:
        inner = []
        for (first, last), a, b in zip(parts, matrices[::2], matrices[1::2], strict=True):
            inner.append(F.linear(x, a.to(x.dtype)).mul_(scale))
            y[:, first:last].addmm_(inner[-1], b.to(x.dtype).t())
        ctx.mark_dirty(y)
        ctx.save_for_backward(x, *inner, *matrices)
        ctx.scale, ctx.parts = scale, parts
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.parts)
        x, *saved = ctx.saved_tensors
        inner, matrices = saved[:count], saved[count:]
        of_x: Tensor | None = None
        of_matrices: list[Tensor | None] = []
        for (first, last), low, a, b in zip(ctx.parts, inner, matrices[::2], matrices[1::2], strict=True):
            grad = grads[0][:, first:last]
            of_low = (grad @ b.to(x.dtype)).mul_(ctx.scale)
            of_matrices += [(of_low.t() @ x).to(a.dtype), (grad.t() @ low).to(b.dtype)]
            if ctx.needs_input_grad[1]:
                narrow = a.to(x.dtype)
                of_x = of_low @ narrow if of_x is None else of_x.addmm_(of_low, narrow)
        return grads[0], of_x, None, None, *of_matrices


def install(
    loaders: Mapping[str, Loader],
    targets: Sequence[str],
    parameters: LoraParameters,
    device: torch.device,
    seed: int,
) -> None:
    """Gives every linear layer that `targets` names its matrices. ConfigError where a target names none.

    A target is `all-linear`, the last part of a module's name (q_proj) or the end of it (0.self_attn.q_proj).
    """
    sites = install_sites(loaders, parameters)  # type: ignore[arg-type]  # a kernel is a module elsewhere
    linear = [site for site in sites if not site.is_embedding and site.name != HEAD]
    names = sorted({site.name.rpartition(".")[2] for site in linear})
    chosen: dict[int, LoraSite] = {}
    for target in targets:
        named = [s for s in linear if target == ALL or s.name == target or s.name.endswith(f".{target}")]
        if not named:
            raise ConfigError(
                f"target module {target!r} names no linear layer of this model: choose of {', '.join(names)} or {ALL}"
            )
        chosen |= {site.index: site for site in named}
    parameters.make([chosen[index] for index in sorted(chosen)], device, seed)

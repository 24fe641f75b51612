"""Runs each GEMM with the fastest cuBLASLt algorithm measured on this GPU; falls back to torch.

Which algorithm is fastest depends on the matrix, the number of tokens and the GPU; the library's heuristic is often
some per cent slower than the best, sometimes much more. So the GEMMs of a model's CUDA graphs are measured once.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.kernels.linear import autotune
from quire.kernels.linear.autotune import TORCH_DEFAULT, WeightAndBias, fastest
from quire.kernels.linear.cublaslt import ALIGNMENT, Algorithm, GemmPlan, GemmShape
from quire.kernels.linear.reference import gemm
from quire.observe.logs import get_logger

logger = get_logger(__name__)

MAX_PAIRS = 32  # weights collected per shape: enough to read small ones from memory each time
DTYPES = (torch.float16, torch.bfloat16)


class GemmAutotuner:
    """One model's GEMMs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # by shape and tokens; torch serves the rest
        self._chosen: dict[tuple[GemmShape, int], tuple[GemmPlan, Algorithm]] = {}
        self._seen: dict[GemmShape, list[WeightAndBias]] | None = None  # not None while GEMMs are collected
        self.summary = ""  # a report of the algorithms chosen; empty: none was

    def gemm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
        widened: bool = False,
    ) -> Tensor:
        """As the reference. The residual, if any, may be overwritten with the result."""
        if not self._chosen and self._seen is None:
            return gemm(x, weight, bias, residual, relu, widened)
        shape = GemmShape(
            weight.shape[0], weight.shape[1], x.dtype, bias is not None, residual is not None, relu, widened
        )
        if self._seen is not None and x.dtype in DTYPES:
            pairs = self._seen.setdefault(shape, [])
            if len(pairs) < MAX_PAIRS:
                pairs.append((weight, bias))
        plan, algorithm = self._chosen.get((shape, x.shape[0]), (None, None))
        aligned = all(map(_is_aligned, (x, weight, bias, residual)))
        if plan is None or algorithm is None or not aligned:
            return gemm(x, weight, bias, residual, relu, widened)
        out = residual
        if out is None:
            out = x.new_empty(x.shape[0], shape.num_rows, dtype=shape.out_dtype)
        plan.run(algorithm, x, weight, bias, out)
        return out

    @contextmanager
    def tuning(self, sizes: Sequence[int]) -> Iterator[None]:
        """Collects the GEMMs of the forward passes inside it; then measures the ones that are not in the cache."""
        self._seen = {}
        try:
            yield
            seen = self._seen
        finally:
            self._seen = None
        if not seen:
            return
        try:
            with torch.cuda.device(self._device), torch.inference_mode():
                self._tune(seen, sizes)
        except (OSError, RuntimeError) as fault:  # no such library: only speed is lost
            logger.warning("GEMMs run with PyTorch's algorithms, they could not be measured: %s", fault)
        torch.cuda.empty_cache()

    def _tune(self, seen: dict[GemmShape, list[WeightAndBias]], sizes: Sequence[int]) -> None:
        began = time.perf_counter()
        key = autotune.key_of(self._device)
        known, new = autotune.cache.load(key) or {}, autotune.Choices()
        for shape, pairs in seen.items():
            measured = self._choose(shape, pairs, sizes, known.get(str(shape), {}))
            if measured:
                new[str(shape)] = measured
        how = f"measured in {time.perf_counter() - began:.1f} s" if new else "measured before"
        self.summary = f"{len(self._chosen)} faster than by PyTorch's choice, {how}"
        try:
            autotune.store(key, new)
        except OSError as fault:
            self.summary += f", not kept: {fault.strerror}"

    def _choose(
        self, shape: GemmShape, pairs: list[WeightAndBias], sizes: Sequence[int], known: dict[int, int]
    ) -> dict[int, int]:
        """Picks the fastest algorithm for each number of tokens; returns the newly measured choices."""
        measured: dict[int, int] = {}
        for size in sizes:
            if size == 1 and not shape.widened:  # `narrow_linear` serves
                continue
            try:
                plan = GemmPlan(shape, size, self._device)
                if size not in known:
                    measured[size] = fastest(plan, pairs)
                index = measured.get(size, known.get(size, TORCH_DEFAULT))
                if TORCH_DEFAULT < index < len(plan.candidates):
                    self._chosen[shape, size] = plan, plan.candidates[index]
            except torch.OutOfMemoryError:  # larger ones would not fit either
                break
            except RuntimeError as fault:
                logger.debug("GEMM %s of %d tokens is left to PyTorch: %s", shape, size, fault)
        return measured


def _is_aligned(tensor: Tensor | None) -> bool:
    """Whether the tensor is dense and aligned, as the algorithms require."""
    return tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0)


make_gemm = GemmAutotuner  # takes the device

"""Products by the fastest of cuBLASLt's algorithms where that was measured, and as PyTorch does them elsewhere.

What is fastest depends on the matrix, the number of tokens and the chip, and the library's heuristic errs by some per
cent often and by far sometimes. So what a model's graphs hold is measured once per chip.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from quire.kernels.linear import kept
from quire.kernels.linear.cublaslt import ALIGNMENT, Found, Kind, Product
from quire.kernels.linear.measure import PYTORCHS, Pair, fastest
from quire.kernels.linear.reference import product
from quire.observe.logs import get_logger

logger = get_logger(__name__)

MAX_PAIRS = 32  # matrices of a kind that are noted: enough to go round small ones
DTYPES = (torch.float16, torch.bfloat16)


class Products:
    """One model's products."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chosen: dict[tuple[Kind, int], tuple[Product, Found]] = {}  # by kind and tokens; else PyTorch's
        self._seen: dict[Kind, list[Pair]] | None = None  # not None while products are noted
        self.summary = ""  # what was chosen, for people; empty: nothing was

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        relu: bool = False,
        widened: bool = False,
    ) -> Tensor:
        """As the reference. The residual, if any, may hold the result."""
        if not self._chosen and self._seen is None:
            return product(x, weight, bias, residual, relu, widened)
        kind = Kind(
            weight.shape[0], weight.shape[1], x.dtype, bias is not None, residual is not None, relu, widened
        )
        if self._seen is not None and x.dtype in DTYPES:
            pairs = self._seen.setdefault(kind, [])
            if len(pairs) < MAX_PAIRS:
                pairs.append((weight, bias))
        plan, algorithm = self._chosen.get((kind, x.shape[0]), (None, None))
        plain = all(map(_is_plain, (x, weight, bias, residual)))
        if plan is None or algorithm is None or not plain:
            return product(x, weight, bias, residual, relu, widened)
        out = residual
        if out is None:
            out = x.new_empty(x.shape[0], kind.num_rows, dtype=kind.out_dtype)
        plan.run(algorithm, x, weight, bias, out)
        return out

    @contextmanager
    def tuning(self, sizes: Sequence[int]) -> Iterator[None]:
        """Passes of the model inside it show which products there are; then those that are new here are measured."""
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
        except (OSError, RuntimeError) as fault:  # no such library: speed is lost, nothing else
            logger.warning("products run as PyTorch chooses, they could not be measured: %s", fault)
        torch.cuda.empty_cache()

    def _tune(self, seen: dict[Kind, list[Pair]], sizes: Sequence[int]) -> None:
        began = time.perf_counter()
        key = kept.key_of(self._device)
        known, new = kept.load(key), kept.Choices()
        for kind, pairs in seen.items():
            places = known.get(str(kind), {})
            found = self._choose(kind, pairs, sizes, places)
            if found:
                new[str(kind)] = found
        how = f"measured in {time.perf_counter() - began:.1f} s" if new else "measured before"
        self.summary = f"{len(self._chosen)} faster than by PyTorch's choice, {how}"
        try:
            kept.store(key, new)
        except OSError as fault:
            self.summary += f", not kept: {fault.strerror}"

    def _choose(
        self, kind: Kind, pairs: list[Pair], sizes: Sequence[int], known: dict[int, int]
    ) -> dict[int, int]:
        """Takes what is fastest for each number of tokens; what had to be measured for that."""
        measured: dict[int, int] = {}
        for size in sizes:
            if size == 1 and not kind.widened:  # `narrow_linear` serves
                continue
            try:
                plan = Product(kind, size, self._device)
                if size not in known:
                    measured[size] = fastest(plan, pairs)
                place = measured.get(size, known.get(size, PYTORCHS))
                if PYTORCHS < place < len(plan.candidates):
                    self._chosen[kind, size] = plan, plan.candidates[place]
            except torch.OutOfMemoryError:  # larger ones would not fit either
                break
            except RuntimeError as fault:
                logger.debug("%s of %d tokens is left to PyTorch: %s", kind, size, fault)
        return measured


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether its memory is as the algorithms expect."""
    return tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0)

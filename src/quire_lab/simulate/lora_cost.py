"""LoraCost: what adapters add to a step on a simulated device.

    batched: launches × launch + A and B × read + products × compute + activations × read     beside the base's products
             and what comes to pages passes over the host's link, beside the pass where no row of it waits for it
    merged:  nothing for rows; a switch reads and writes the touched weights twice, and waits for A and B over the link

A and B are read once for each different adapter of the step, products and activations counted for each token. The four
factors are fitted to the kernels alone (quire_lab.benchmarks.lora_fit); the other terms are assumed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from quire.adapters.packing import Tiles
from quire.adapters.peft import PackedAdapter
from quire.core.step import Step
from quire.layers.lora import LoraSite
from quire_lab.simulate.cost_model import Factors, Rates


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """Fitted: seconds of one layer's launch, and how many times the ideal each other term takes."""

    launch: float  # seconds
    read: float
    products: float
    activations: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


LORA_FACTOR_NAMES = tuple(field.name for field in fields(LoraFactors))


def assumed_factors(base: Factors) -> LoraFactors:
    """Where adapters were not measured: as the dense layers, and a launch as a fifth of all that a layer starts."""
    return LoraFactors(base.layer / 5, base.weights, base.products, base.weights)


@dataclass(frozen=True, slots=True)
class AdapterNumbers:
    """What one adapter costs, independent of its rows."""

    parameters: int  # of A and B
    width: int  # numbers that pass for a token: inputs of every site, and outputs twice
    kinds: frozenset[int]  # of layers that it adds to
    touched: int  # numbers of the base's weights that it would be merged into
    num_bytes: int  # of its pages, over the link


@dataclass(frozen=True, slots=True)
class LoraCounts:
    """What the adapters of one step read and compute."""

    num_launches: int
    parameters: int  # of all different adapters
    multiplied: int  # tokens × parameters
    moved: int  # numbers


def ideal_lora_terms(rates: Rates, counts: LoraCounts, num_bytes: int, ranks: int = 1) -> tuple[float, ...]:
    """What each of the factors multiplies, in their order. `num_bytes` of one number."""
    read = num_bytes / (rates.bandwidth * ranks)
    return (
        counts.num_launches,
        counts.parameters * read,
        2.0 * counts.multiplied / (rates.flops * ranks),
        counts.moved * read,
    )


class SiteNumbers:
    """The sites of one model as costs see them."""

    def __init__(self, sites: Sequence[LoraSite]) -> None:
        self._inputs = np.array([0 if site.is_embedding else site.num_inputs for site in sites], np.int64)
        self._outputs = np.array([site.num_outputs for site in sites], np.int64)
        self._wide = np.array([site.num_inputs for site in sites], np.int64)
        self._kinds = np.array([site.kind for site in sites], np.int64)
        starts = np.flatnonzero(np.diff(self._kinds, prepend=-1))  # parts of one layer follow each other
        self._launches = np.bincount(self._kinds[starts], minlength=1) if len(sites) else np.zeros(1, int)
        self._known: dict[
            int, tuple[Tiles, AdapterNumbers]
        ] = {}  # by identity: adapters of one kind share tiles

    def numbers(self, packed: PackedAdapter) -> AdapterNumbers:
        tiles = packed.tiles
        known = self._known.get(id(tiles))
        if known is None:
            inputs, outputs, wide = (of[tiles.sites] for of in (self._inputs, self._outputs, self._wide))
            numbers = AdapterNumbers(
                parameters=int((tiles.ranks * (wide + outputs)).sum()),
                width=int((inputs + 2 * outputs).sum()),
                kinds=frozenset(self._kinds[tiles.sites].tolist()),
                touched=int((wide * outputs).sum()),
                num_bytes=packed.num_bytes,
            )
            known = self._known[id(tiles)] = (tiles, numbers)
        return known[1]

    def num_launches(self, kinds: Iterable[int]) -> int:
        """A step with an adapter of some kind of layer launches in every layer of that kind."""
        return int(self._launches[list(kinds)].sum())

    def count(self, tokens: Mapping[AdapterNumbers, tuple[int, int]]) -> LoraCounts:
        """`tokens`: for each kind of adapter, how many different ones there are and how many tokens run with them."""
        kinds = frozenset[int]().union(*(one.kinds for one in tokens))
        return LoraCounts(
            self.num_launches(kinds),
            sum(one.parameters * different for one, (different, _) in tokens.items()),
            sum(one.parameters * count for one, (_, count) in tokens.items()),
            sum(one.width * count for one, (_, count) in tokens.items()),
        )


@dataclass(frozen=True, slots=True)
class AdapterSeconds:
    products: float = 0.0  # in the pass
    link: float = 0.0  # beside it
    before: float = 0.0  # nothing else runs meanwhile


class LoraCost:
    """Follows which row runs with which adapter, and charges steps for it."""

    def __init__(
        self,
        rates: Rates,
        factors: LoraFactors,
        weights_factor: float,
        sites: SiteNumbers,
        host_copy: Callable[[str], PackedAdapter | None],
        num_bytes: int,
        ranks: int = 1,
        merge: bool = False,
    ) -> None:
        """`num_bytes` of one number, of adapters and of the weights that they are merged into."""
        self._rates, self._ranks, self._num_bytes = rates, ranks, num_bytes
        self._factors = tuple(factors.as_dict().values())
        self._write = weights_factor / (rates.bandwidth * ranks)
        self._link = rates.host_link * ranks or rates.bandwidth / 2  # no link: a copy within one memory
        self._sites = sites
        self._host_copy = host_copy
        self._merge = merge
        self._merged: AdapterNumbers | None = None
        self._merged_key: str | None = None
        self._keys: dict[int, str | None] = {}  # by row
        self._resident: dict[str, AdapterNumbers] = {}

    def charge(self, step: Step) -> AdapterSeconds:
        for start in step.starts:
            self._keys[start.row] = start.adapter
        if self._merge:
            return AdapterSeconds(before=self._switch(step))
        for key in step.adapter_evictions:
            self._resident.pop(key, None)
        tokens = self._tokens(step)
        link = before = 0.0
        for load in step.adapter_loads:
            packed = self._host_copy(load.key)
            assert packed is not None, "its host copy was held"
            self._resident[load.key] = numbers = self._sites.numbers(packed)
            seconds = numbers.num_bytes / self._link
            if load.key in tokens:
                before += seconds
            else:
                link += seconds
        return AdapterSeconds(self._products(tokens), link, before)

    def _tokens(self, step: Step) -> dict[str, int]:
        """Of each adapter in the step."""
        tokens: dict[str, int] = {}
        keys = self._keys
        for row, count in zip(step.rows, step.num_tokens, strict=True):
            key = keys.get(row)
            if key is not None:
                tokens[key] = tokens.get(key, 0) + count
        return tokens

    def _products(self, tokens: Mapping[str, int]) -> float:
        if not tokens:
            return 0.0
        alike: dict[AdapterNumbers, tuple[int, int]] = {}
        for key, count in tokens.items():
            numbers = self._resident[key]
            different, total = alike.get(numbers, (0, 0))
            alike[numbers] = (different + 1, total + count)
        ideal = ideal_lora_terms(self._rates, self._sites.count(alike), self._num_bytes, self._ranks)
        return sum(factor * term for factor, term in zip(self._factors, ideal, strict=True))

    def _switch(self, step: Step) -> float:
        """The former adapter is taken out of the weights, the next one added: each reads and writes all it touches."""
        if not step.starts or step.starts[0].adapter == self._merged_key:
            return 0.0
        before, key = self._merged, step.starts[0].adapter
        self._merged_key, self._merged = key, None
        seconds = 0.0 if before is None else 2 * before.touched * self._num_bytes * self._write
        if key is not None:
            packed = self._host_copy(key)
            assert packed is not None, "a merged adapter's host copy is there when its first row starts"
            self._merged = numbers = self._sites.numbers(packed)
            seconds += 2 * numbers.touched * self._num_bytes * self._write + numbers.num_bytes / self._link
        return seconds

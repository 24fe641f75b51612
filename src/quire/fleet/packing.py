"""Slices of many models on as few GPUs as possible: greedy, then local search; a new plan moves few slices.

Every slice is placed as the profile that was asked for: a larger one never helps, since the smaller fits in its place.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from quire.fleet.mig import COMPUTE_SLICES, MEMORY_SLICES, Card, Layout, Profile, place

ROUNDS = 200  # of local search
TRIES = 1600  # of one round: GPUs to empty, the least filled ones, times GPUs to fill


@dataclass(frozen=True, slots=True)
class Demand:
    """One slice for one replica of a model."""

    model: str
    profile: Profile


@dataclass(slots=True)
class PackedGpu:
    """One GPU."""

    card: Card
    demands: list[Demand] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        layout = place([demand.profile for demand in self.demands])
        assert layout is not None, "only demands that fit are added"
        return layout

    @property
    def filling(self) -> float:
        """Share of the memory slices that are used."""
        return sum(demand.profile.memory for demand in self.demands) / MEMORY_SLICES

    def takes(self, demand: Demand) -> bool:
        return _placeable(tuple(sorted((d.profile for d in (*self.demands, demand)), key=_size)))


def _size(profile: Profile) -> tuple[int, int, str]:
    return -profile.memory, -profile.compute, profile.name


@cache
def _placeable(profiles: tuple[Profile, ...]) -> bool:
    compute, memory = sum(p.compute for p in profiles), sum(p.memory for p in profiles)
    return compute <= COMPUTE_SLICES and memory <= MEMORY_SLICES and place(list(profiles)) is not None


def pack(demands: Sequence[Demand], card: Card, before: Sequence[PackedGpu] = ()) -> list[PackedGpu]:
    """GPUs with their demands. `before`: an earlier plan, whose slices stay where they are as far as possible, and
    whose GPUs keep their places, also those without slices.
    """
    left = Counter(demands)
    gpus: list[PackedGpu] = []
    for old in before:
        kept = PackedGpu(card)
        for demand in old.demands:
            if left[demand] and kept.takes(demand):
                left[demand] -= 1
                kept.demands.append(demand)
        gpus.append(kept)
    keeps_slices = any(gpu.demands for gpu in gpus)
    if not keeps_slices:
        gpus = []
    for demand in sorted(left.elements(), key=lambda d: (_size(d.profile), d.model)):
        _insert(demand, gpus, card)
    if not keeps_slices:
        for _ in range(ROUNDS):
            if len(gpus) <= lower_bound(demands) or not _empties_one(gpus, card):
                break
    return gpus + [PackedGpu(card) for _ in range(len(before) - len(gpus))]


def _insert(demand: Demand, gpus: list[PackedGpu], card: Card) -> None:
    """Where the least is left over."""
    possible = [gpu for gpu in gpus if gpu.takes(demand)]
    if possible:
        max(possible, key=lambda gpu: gpu.filling).demands.append(demand)
    else:
        gpus.append(PackedGpu(card, [demand]))


def _empties_one(gpus: list[PackedGpu], card: Card) -> bool:
    """Moves the slices of one GPU to others, exchanging two where that makes room. Whether one was emptied."""
    for victim in sorted(gpus, key=lambda gpu: gpu.filling)[: max(3, TRIES // len(gpus))]:
        others = [PackedGpu(card, list(gpu.demands)) for gpu in gpus if gpu is not victim]
        if all(
            _squeeze(demand, others, card)
            for demand in sorted(victim.demands, key=lambda d: _size(d.profile))
        ):
            gpus[:] = others
            return True
    return False


def _squeeze(demand: Demand, gpus: list[PackedGpu], card: Card) -> bool:
    if any(gpu.takes(demand) for gpu in gpus):
        _insert(demand, gpus, card)
        return True
    for gpu in gpus:
        for out in sorted(set(gpu.demands), key=lambda d: (_size(d.profile), d.model), reverse=True):
            rest = PackedGpu(card, list(gpu.demands))
            rest.demands.remove(out)
            if not rest.takes(demand):
                continue
            place_of = next((other for other in gpus if other is not gpu and other.takes(out)), None)
            if place_of is not None:
                gpu.demands.remove(out)
                gpu.demands.append(demand)
                place_of.demands.append(out)
                return True
    return False


def lower_bound(demands: Sequence[Demand]) -> int:
    """GPUs that are needed at least: by compute, by memory, and by slices of which one or two fit."""
    compute = sum(demand.profile.compute for demand in demands) / COMPUTE_SLICES
    memory = sum(demand.profile.memory for demand in demands) / MEMORY_SLICES
    whole = sum(demand.profile.compute == 7 for demand in demands)
    large = sum(demand.profile.compute == 4 for demand in demands)
    half = sum(demand.profile.compute in (3, 4) for demand in demands)
    return max(math.ceil(compute), math.ceil(memory), whole + max(large, math.ceil(half / 2)))


def num_used(gpus: Sequence[PackedGpu]) -> int:
    """GPUs that have slices."""
    return sum(bool(gpu.demands) for gpu in gpus)


def moved(before: Sequence[PackedGpu], after: Sequence[PackedGpu]) -> int:
    """Slices of the new plan that were not on their GPU before. GPUs are compared by their places."""
    old = [Counter(gpu.demands) for gpu in before]
    new = [Counter(gpu.demands) for gpu in after]
    same = sum((a & b).total() for a, b in zip(old, new, strict=False))
    return sum(one.total() for one in new) - same


def changed(before: Sequence[PackedGpu], after: Sequence[PackedGpu]) -> list[int]:
    """Indices of GPUs whose slices are not those of before. mig-parted removes every slice of such a GPU first."""
    old, new = (
        [Counter(demand.profile for demand in gpu.demands) for gpu in gpus] for gpus in (before, after)
    )
    return [
        index for index, slices in enumerate(new) if slices != (old[index] if index < len(old) else Counter())
    ]

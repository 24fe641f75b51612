"""MIG: the slices that a GPU can be cut into, and every layout of slices that fits on one.

A slice has compute slices (of 7) and memory slices (of 8); bandwidth and L2 go with the memory slices. Sizes and starts
are those of NVIDIA's mig-parted and of NVML's placements.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from quire.core.errors import ConfigError

COMPUTE_SLICES, MEMORY_SLICES = 7, 8


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of slice."""

    name: str  # as mig-parted names it: 2g.20gb
    compute: int
    memory: int  # slices
    starts: tuple[int, ...]  # memory slices at which it may begin
    num_sms: int
    megabytes: int  # of 2**20, by NVML


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that MIG can cut, under its name among the simulated devices."""

    name: str
    num_sms: int
    profiles: tuple[Profile, ...]

    def profile(self, name: str) -> Profile:
        found = {profile.name: profile for profile in self.profiles}
        if name in found:
            return found[name]
        raise ConfigError(f"{self.name} has no slice {name!r}: choose one of {', '.join(found)}")

    def sm_share(self, profile: Profile) -> float:
        """Of the whole GPU's processors."""
        return profile.num_sms / self.num_sms


def _profiles(sizes: str, sms: str, megabytes: str) -> tuple[Profile, ...]:
    """GB in their names, SMs, and NVML's megabytes, of 1g, 1g with double memory, 2g, 3g, 4g and 7g."""
    kinds = (
        (1, 1, range(7)),
        (1, 2, (0, 2, 4, 6)),
        (2, 2, (0, 2, 4)),
        (3, 4, (0, 4)),
        (4, 4, (0,)),
        (7, 8, (0,)),
    )
    return tuple(
        Profile(f"{compute}g.{size}gb", compute, memory, tuple(starts), int(count), int(mib))
        for (compute, memory, starts), size, count, mib in zip(
            kinds, sizes.split(), sms.split(), megabytes.split(), strict=True
        )
    )


# SMs are no multiple of those of 1g: on Hopper, 1g with double memory and 3g have more. Sources:
# A100: NVIDIA's MIG User Guide, List GPU Instance Profiles; 98 of 108 SMs in all.
# H100 SXM5: `nvidia-smi mig -lgip` in docs/mig.md of stackhpc/ansible-slurm-appliance.
# H200: NVML, mode `mig` of benchmarks/results/h200_gpu_sharing.json.
# Megabytes differ by a few hundred with the driver. Those of A100 and H100 are GiB that `nvidia-smi mig -lgip` printed.
_A100_SMS, _H100_SMS = "14 14 28 42 56 98", "16 26 32 60 64 132"
_A100_40, _A100_80 = "4864 9984 9984 20096 20096 40320", "9728 19968 19968 40192 40192 80896"
_H100, _H200 = "9984 20096 20096 40448 40448 81152", "16384 33280 33280 71424 71424 143360"
CARDS = {
    card.name: card
    for card in (
        Card("a100-40g", 108, _profiles("5 10 10 20 20 40", _A100_SMS, _A100_40)),
        Card("a100-80g", 108, _profiles("10 20 20 40 40 80", _A100_SMS, _A100_80)),
        Card("h100", 132, _profiles("10 20 20 40 40 80", _H100_SMS, _H100)),
        Card("h200", 132, _profiles("18 35 35 71 71 141", _H100_SMS, _H200)),
    )
}


# letters and digits of names, NVML's too; H100 PCIe and NVL have other SMs or memory
_NAMES = {
    "a100-40g": "a100(sxm4?|pcie)?40gb?(pcie)?",
    "a100-80g": "a100(sxm4?|pcie)?80gb?(pcie)?",
    "h100": "h100(sxm5?)?(80gb?)?(hbm3)?",
    "h200": "h200(sxm5?|nvl)?(141gb?)?(hbm3e)?",
}


def find_card(name: str) -> Card:
    """By a name such as a100 80g or H200, or by NVML's, such as NVIDIA A100-SXM4-80GB."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")
    for known_name, pattern in _NAMES.items():
        if re.fullmatch(pattern, plain):
            return CARDS[known_name]
    known = f"GPUs with MIG that are known: {', '.join(CARDS)}"
    if name in ("", "None"):  # a file without the field
        raise ConfigError(
            f"the field `card` of the file is missing, or --mig has no name: give one of the {known}"
        )
    raise ConfigError(f"{name!r} is not among the {known}")


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    start: int
    profile: Profile

    @property
    def slices(self) -> range:
        return range(self.start, self.start + self.profile.memory)


Layout = tuple[Placement, ...]  # by start


def fits(layout: Layout, more: Placement) -> bool:
    taken = {index for placement in layout for index in placement.slices}
    compute = sum(placement.profile.compute for placement in layout) + more.profile.compute
    inside = more.slices.stop <= MEMORY_SLICES and taken.isdisjoint(more.slices)
    return compute <= COMPUTE_SLICES and inside


def placements(profiles: tuple[Profile, ...]) -> list[Placement]:
    return [Placement(start, profile) for profile in profiles for start in profile.starts]


@cache
def layouts(profiles: tuple[Profile, ...]) -> tuple[Layout, ...]:
    """All maximal layouts: no slice can be added. 19 on every GPU without the double-memory slice, 78 with it."""
    possible = placements(profiles)

    def grow(layout: Layout, first: int) -> Iterator[Layout]:
        yield layout
        for index in range(first, len(possible)):
            if fits(layout, possible[index]):
                yield from grow((*layout, possible[index]), index + 1)

    maximal = {
        tuple(sorted(layout, key=lambda placement: placement.start))
        for layout in grow((), 0)
        if not any(fits(layout, more) for more in possible)
    }
    return tuple(sorted(maximal, key=lambda layout: [(-p.profile.compute, p.start) for p in layout]))


def place(profiles: list[Profile]) -> Layout | None:
    """These slices on one GPU; None where there is no such layout."""

    def search(layout: Layout, rest: list[Profile]) -> Layout | None:
        if not rest:
            return tuple(sorted(layout, key=lambda placement: placement.start))
        for start in rest[0].starts:
            if fits(layout, more := Placement(start, rest[0])):
                if (whole := search((*layout, more), rest[1:])) is not None:
                    return whole
        return None

    return search((), sorted(profiles, key=lambda profile: (-profile.memory, -profile.compute)))


def multiset(layout: Layout) -> Counter[str]:
    return Counter(placement.profile.name for placement in layout)


def without_double(card: Card) -> tuple[Profile, ...]:
    return tuple(p for p in card.profiles if not (p.compute == 1 and p.memory == 2))


def nearest_layout(card: Card, wanted: Counter[str]) -> Counter[str]:
    """The existing layout that has most of what is wanted."""
    return max(
        map(multiset, layouts(card.profiles)), key=lambda found: ((found & wanted).total(), -found.total())
    )


def check_layout(card: Card, wanted: Counter[str]) -> Layout:
    """ConfigError with the nearest layout where these slices do not fit on one GPU."""
    layout = place([card.profile(name) for name, count in wanted.items() for _ in range(count)])
    if layout is None:
        near = " + ".join(f"{count} × {name}" for name, count in nearest_layout(card, wanted).items())
        asked = " + ".join(f"{count} × {name}" for name, count in wanted.items())
        raise ConfigError(f"{asked} cannot be placed on one {card.name}: the nearest layout is {near}")
    return layout

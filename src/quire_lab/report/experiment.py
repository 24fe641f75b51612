"""What an experiment is given, and what it hands back."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeVar

from quire_lab.report.data import DataFolder
from quire_lab.report.figure import Picture

T = TypeVar("T")


class Size(Enum):
    """How much of it: a look, a figure to read, a figure to publish."""

    QUICK = "quick"
    NORMAL = "normal"
    THOROUGH = "thorough"


class Bar(Protocol):
    """One experiment's progress; `note` says what is being measured now."""

    def __call__(self, count: int = 1) -> None: ...

    def note(self, what: str) -> None: ...


class Progress(Protocol):
    """Opens a bar that ends at `total` of `unit`."""

    def __call__(self, total: int, unit: str) -> AbstractContextManager[Bar]: ...


@dataclass(frozen=True, slots=True)
class Setup:
    """All that an experiment may depend on besides the machine."""

    size: Size
    seed: int
    engine: Mapping[str, Any]  # engine settings that the user gave, as `EngineConfig.of` takes them
    data: DataFolder
    progress: Progress
    price_per_hour: float  # of this machine, in `currency`
    currency: str = "$"
    time_limit: float | None = None  # seconds for timed comparisons; None: by the size
    precision: float = 0.05  # relative half width at which a ratio is precise enough
    contexts: int | None = None  # texts that quality is measured on; None: by the size
    formats: tuple[str, ...] = ()  # number formats that are compared; empty: by the size

    @property
    def seconds(self) -> float:
        """For all timed comparisons of one experiment."""
        return self.time_limit if self.time_limit is not None else self.pick(2.0, 60.0, 600.0)

    def pick(self, quick: T, normal: T, thorough: T) -> T:
        """What belongs to the size that was asked for."""
        return {Size.QUICK: quick, Size.NORMAL: normal, Size.THOROUGH: thorough}[self.size]


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    head: Sequence[str]  # with units
    rows: Sequence[Sequence[str]]
    left: int = 1  # leading columns that hold words; the others hold numbers, flush right


@dataclass(frozen=True, slots=True)
class Check:
    """A claim that the experiment puts to the test, and how it came out."""

    claim: str
    measured: str
    held: bool | None  # None: not resolved, the machine's noise is larger

    @property
    def outcome(self) -> str:
        return {True: "yes", False: "no", None: "not resolved"}[self.held]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one experiment found here. Every number in it comes from this run."""

    take_away: str  # one or two sentences with the numbers that matter
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    results: Mapping[str, Any]  # for programs
    settings: Mapping[str, Any]  # what has to be repeated for the same results
    checks: Sequence[Check] = field(default_factory=tuple)
    notes: Sequence[str] = field(default_factory=tuple)  # where numbers come from, what is left out


@dataclass(frozen=True, slots=True)
class Experiment:
    name: str
    title: str
    question: str  # what it answers, for people who have not met it
    run: Callable[[Setup], Finding]

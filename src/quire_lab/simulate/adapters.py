"""Adapters on a simulated device: the real store, admission and pages over adapters with sizes and no weights."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quire.adapters.packing import ALIGNMENT, BlockShape
from quire.adapters.peft import PackedAdapter
from quire.adapters.sites import Sites
from quire.adapters.store import AdapterStore, HostLimits
from quire.core.config import EngineConfig, ModelConfig
from quire.core.errors import ConfigError
from quire.engine.adapters import Adapters
from quire.engine.build.adapters import HOST_LIMIT, adapter_dtype
from quire.engine.build.resolve import Precision
from quire.kernels.registry import REFERENCE, load
from quire.layers.lora import install_sites
from quire.memory.paged import PagedMemory
from quire.models.weight_shape import sized_model
from quire_lab.baselines.merged import merge_sites
from quire_lab.simulate.clock import VirtualClock
from quire_lab.simulate.devices import SimulatedDevice
from quire_lab.simulate.lora_cost import LoraCost, SiteNumbers
from quire_lab.simulate.sized_reader import SizedReader

DISK_BANDWIDTH = 2e9  # bytes per second with all that the host does to a file; assumed
READS_AT_ONCE = 8
R = TypeVar("R")


class DiskRead(Future[R]):
    """Is done when the virtual clock says so."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.ends = clock()

    def done(self) -> bool:
        return self._clock() >= self.ends


class VirtualDisk(Executor):
    """Reads one adapter after the other, each for as long as its bytes take."""

    def __init__(self, clock: VirtualClock, bandwidth: float = DISK_BANDWIDTH) -> None:
        self._clock = clock
        self._bandwidth = bandwidth
        self._free_at = 0.0

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        read: DiskRead[R] = DiskRead(self._clock)
        try:
            content = fn(*args, **kwargs)
        except Exception as error:
            read.set_exception(error)
            return read
        num_bytes = content.num_bytes if isinstance(content, PackedAdapter) else 0
        self._free_at = read.ends = max(self._clock(), self._free_at) + num_bytes / self._bandwidth
        read.set_result(content)
        return read


class SimulatedAdapters(Adapters):
    """One engine's adapters; waiting for a file advances the virtual clock."""

    def __init__(
        self,
        library: AdapterStore,
        memory: PagedMemory,
        clock: VirtualClock,
        max_adapters: int | None,
        merge: bool,
    ) -> None:
        super().__init__(library, memory, max_adapters, merge)
        self._clock = clock

    def wait(self) -> None:
        now = self._clock()
        ends = [read.ends for read in self.library.loading() if isinstance(read, DiskRead)]
        self._clock.advance_to(min((end for end in ends if end > now), default=now))


@dataclass(frozen=True, slots=True)
class SizedAdapters:
    """The store and the costs of adapters on a simulated device."""

    library: AdapterStore
    cost: LoraCost

    def serve(self, config: EngineConfig, memory: PagedMemory, clock: VirtualClock) -> SimulatedAdapters:
        options = config.adapters
        return SimulatedAdapters(
            self.library, memory, clock, options.max_loras, merge=options.lora_mode == "merge"
        )


def size_adapters(
    config: EngineConfig,
    model: ModelConfig,
    precision: Precision,
    device: SimulatedDevice,
    block_bytes: int,
    clock: VirtualClock,
) -> SizedAdapters | None:
    """None where adapters are off. ConfigError as the real start has it."""
    options = config.adapters
    if not options.enabled:
        return None
    if model.encoder is not None:
        raise ConfigError(
            f"a simulated device has no costs for adapters of {model.architecture}: leave out enable_lora, "
            "lora_modules and lora_dir"
        )
    if config.memory.reservation != "paged":
        raise ConfigError(f"adapters need pages, not reservation={config.memory.reservation!r}: choose paged")
    if block_bytes % ALIGNMENT:
        raise ConfigError(
            f"blocks of {block_bytes} bytes cannot hold adapters, which need a multiple of {ALIGNMENT}: "
            "raise block_size"
        )
    built = sized_model(model, precision.format)
    merge = options.lora_mode == "merge"
    allowed = merge_sites(built) if merge else None
    sites = install_sites(built.loaders(), load("lora", REFERENCE))
    if allowed is not None:
        sites = tuple(site for site in sites if site.name in allowed)
    dtype = adapter_dtype(precision)
    reader = SizedReader(
        Sites(sites),
        BlockShape(block_bytes, dtype, config.memory.block_size),
        options.max_lora_rank,
        kernel=load("lora_pack", REFERENCE),
    )
    library = AdapterStore(
        reader,
        HostLimits(options.max_cpu_lora_bytes or HOST_LIMIT, options.max_cpu_loras),
        Path(options.lora_dir) if options.lora_dir is not None else None,
        READS_AT_ONCE,
        VirtualDisk(clock),
    )
    library.register_named(options.modules())
    cost = LoraCost(
        device.rates,
        device.lora,
        device.factors.weights,
        SiteNumbers(sites),
        library.want,
        dtype.itemsize,
        device.ranks,
        merge,
    )
    return SizedAdapters(library, cost)

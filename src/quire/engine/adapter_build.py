"""Builds what serves adapters: sites in the model, the library, and slots in the runner."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.adapters.packing import ALIGNMENT, BlockShape
from quire.adapters.peft import Reader
from quire.adapters.sites import Site, Sites
from quire.adapters.store import AdapterStore, HostLimits
from quire.core.adapters import AdapterConfig
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.adapters import Adapters
from quire.engine.resolve import Precision
from quire.kernels.registry import REFERENCE, alternatives, choose, forces_reference
from quire.layers.factory import LayerFactory
from quire.layers.lora import LoraSite
from quire.layers.lora_sites import install_sites
from quire.layers.pool import Pool
from quire.memory.interface import Memory
from quire.models.model import Model
from quire.models.streamed import is_streamed
from quire.runner.adapters import PIECE_BYTES, AdapterSlots
from quire.runner.merged import MergedAdapter, MergeSite
from quire.runner.runner import RunnerLimits
from quire.runner.sizing import free_host_bytes
from quire.runner.transfer import TransferEngine

HOST_LIMIT = 16 * 2**30  # bytes of host copies, where nobody set a limit
PEEKED = 16  # named adapters whose configs are looked at before graphs are captured
GPU_THREADS, CPU_THREADS = 12, 1  # that read adapters: a GPU's host has cores to spare


@dataclass(frozen=True, slots=True)
class BuiltAdapters:
    library: AdapterStore
    slots: AdapterSlots


def build_adapters(
    config: EngineConfig,
    model: Model,
    factory: LayerFactory,
    pool: Pool,
    numbers: Precision,
    limits: RunnerLimits,
    base: str,  # what the model is called
) -> BuiltAdapters | None:
    """None where adapters are off."""
    if not config.adapters.enabled:
        return None
    if config.memory.reservation != "paged":
        raise ConfigError(f"adapters need pages, not reservation={config.memory.reservation!r}: choose paged")
    hashed = config.memory.enable_prefix_caching
    return _build(config.adapters, model, factory, pool, numbers, limits, hashed, base)


def serve_adapters(
    config: AdapterConfig,
    built: BuiltAdapters | None,
    memory: Memory,
    mover: TransferEngine | None,
) -> Adapters | None:
    """What the engine asks. Loads travel where pages from host memory do, and so in order with them."""
    if built is None:
        return None
    if mover is not None:
        built.slots.side = mover.stream
    return Adapters(built.library, memory, config.max_loras, merge=config.lora_mode == "merge")


def adapter_lines(config: AdapterConfig, built: BuiltAdapters | None, max_num_seqs: int) -> tuple[str, ...]:
    """What the start says of adapters."""
    if built is None:
        return ()
    where = f", those of {config.lora_dir} among them" if config.lora_dir is not None else ""
    at_once = min(config.max_loras or max_num_seqs, max_num_seqs)
    return (
        f"adapters  {len(built.library.names()):,} known{where}; {at_once} at once, copies of up to "
        f"{built.library.limits.num_bytes / 1e6:,.0f} MB in host memory",
    )


def _build(
    config: AdapterConfig,
    model: Model,
    factory: LayerFactory,
    pool: Pool,
    numbers: Precision,
    limits: RunnerLimits,
    hashed: bool,
    base: str,
) -> BuiltAdapters:
    """Named adapters are only looked for, not read: a start is no longer for a thousand of them."""
    if pool.layout.block_bytes % ALIGNMENT:
        raise ConfigError(
            f"blocks of {pool.layout.block_bytes} bytes cannot hold adapters, which need a multiple of {ALIGNMENT}: "
            "raise block_size"
        )
    if config.lora_mode == "merge" and is_streamed(model):
        raise ConfigError(
            "lora_mode='merge' changes weights in place, and these stream: leave out the offloading of weights"
        )
    merging = merge_sites(model) if config.lora_mode == "merge" else None
    kernel = factory.kernel("lora")
    sites = install_sites(model.loaders(), kernel)
    if merging is not None:
        sites = tuple(site for site in sites if site.name in merging)
    dtype = adapter_dtype(numbers)
    on_gpu = numbers.device.type == "cuda"
    reader = Reader(
        Sites([Site(site.name, site.num_inputs, site.num_outputs, site.is_embedding) for site in sites]),
        BlockShape(pool.layout.block_bytes, dtype, pool.layout.block_size),
        config.max_lora_rank,
        hashed,
        choose("lora_pack", numbers.device),
        PIECE_BYTES if on_gpu and merging is None and _has_triton() else 0,
        base,
    )
    library = AdapterStore(
        reader,
        HostLimits(config.max_cpu_lora_bytes or free_host_bytes(HOST_LIMIT), config.max_cpu_loras),
        Path(config.lora_dir) if config.lora_dir is not None else None,
        min(GPU_THREADS, os.cpu_count() or 1) if on_gpu else CPU_THREADS,
    )
    library.register_named(config.modules())
    if merging is not None:
        return BuiltAdapters(
            library, MergedAdapter(tuple(merging[site.name] for site in sites), dtype, library.want)
        )
    slots = AdapterSlots(
        sites,
        pool,
        dtype,
        limits.max_num_seqs,
        max(limits.max_num_batched_tokens, limits.max_num_seqs),
        library.want,
        _kinds(sites, library.targets(PEEKED)),
        recordable=not kernel.__name__.endswith(REFERENCE),
        invariant=limits.deterministic,
    )
    return BuiltAdapters(library, slots)


def _has_triton() -> bool:
    return not forces_reference() and "triton" in alternatives("lora_pack")


def merge_sites(model: Model) -> dict[str, MergeSite]:
    """By name, those whose weights are the layer's own: a tied head's are the embedding's."""
    found: dict[str, MergeSite] = {}
    for tensor, loader in model.loaders().items():
        for part in loader.parts:
            state = part.layer.state()
            is_embedding = "table" in state
            weight = state.get("table" if is_embedding else "weight")
            if weight is None and not state:
                continue
            if weight is None or weight.dtype.itemsize < 2:
                raise ConfigError(
                    "lora_mode='merge' needs weights in full precision: choose quantization='none'"
                )
            rows = weight if is_embedding else weight[part.first_row : part.first_row + part.num_outputs]
            if not is_embedding or len(rows) == part.num_inputs:
                found[part.module or tensor.removesuffix(".weight")] = MergeSite(rows, is_embedding)
    return found


def separate_blocks(config: AdapterConfig, num_blocks: int, block_bytes: int) -> int:
    """Blocks of the pool that belong to adapters alone."""
    if not config.enabled or config.lora_memory != "separate":
        return 0
    asked = config.lora_memory_bytes
    count = num_blocks // 4 if asked is None else asked // block_bytes
    if not 1 <= count < num_blocks:
        raise ConfigError(
            f"lora_memory_bytes={asked} is {count} of the pool's {num_blocks} blocks: give one at least, and not all"
        )
    return count


def adapter_dtype(numbers: Precision) -> torch.dtype:
    """Adapters are kept as the model computes. Beside int8 weights bytes are precise enough: a step waits for memory,
    and dozens of adapters are more of it than the model itself. Kernels of GPUs read 16 bits.
    """
    if numbers.format_name != "int8":
        return numbers.format.activation_dtype
    return torch.int8 if numbers.device.type == "cpu" else torch.bfloat16


def _kinds(sites: tuple[LoraSite, ...], targets: set[str]) -> int:
    """The kinds of layers that modules of these names belong to."""
    kinds = {site.kind for site in sites if site.name in targets or site.name.rpartition(".")[2] in targets}
    return sum(1 << kind for kind in kinds)

"""Builds what serves adapters: sites in the model, the library, and slots in the runner."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.adapters.library import HostLimits, Library
from quire.adapters.packing import ALIGNMENT, BlockShape
from quire.adapters.peft import Reader
from quire.adapters.sites import Site, Sites
from quire.core.adapters import AdapterConfig
from quire.core.errors import ConfigError
from quire.engine.resolve import Numbers
from quire.kernels.registry import REFERENCE
from quire.layers.factory import LayerFactory
from quire.layers.lora import LoraSite
from quire.layers.lora_sites import install_sites
from quire.layers.pool import Pool
from quire.models.model import Model
from quire.runner.adapters import AdapterSlots
from quire.runner.runner import RunnerLimits
from quire.runner.sizing import free_host_bytes

HOST_LIMIT = 16 * 2**30  # bytes of host copies, where nobody set a limit
PEEKED = 16  # named adapters whose configs are looked at before graphs are captured
GPU_THREADS, CPU_THREADS = 8, 1  # that read adapters


@dataclass(frozen=True, slots=True)
class BuiltAdapters:
    library: Library
    slots: AdapterSlots


def build_adapters(
    config: AdapterConfig,
    model: Model,
    factory: LayerFactory,
    pool: Pool,
    numbers: Numbers,
    limits: RunnerLimits,
) -> BuiltAdapters:
    """Named adapters are only looked for, not read: a start is no longer for a thousand of them."""
    if config.lora_mode != "batched" or config.lora_memory != "unified":
        raise ConfigError("only lora_mode='batched' with lora_memory='unified' can be served yet")
    if pool.layout.block_bytes % ALIGNMENT:
        raise ConfigError(
            f"blocks of {pool.layout.block_bytes} bytes cannot hold adapters, which need a multiple of {ALIGNMENT}: "
            "raise block_size"
        )
    kernel = factory.kernel("lora")
    sites = install_sites(model.loaders(), kernel)
    dtype = adapter_dtype(numbers)
    on_gpu = numbers.device.type == "cuda"
    reader = Reader(
        Sites([Site(site.name, site.num_inputs, site.num_outputs, site.is_embedding) for site in sites]),
        BlockShape(pool.layout.block_bytes, dtype, pool.layout.block_size),
        config.max_lora_rank,
        pin=on_gpu,
    )
    library = Library(
        reader,
        HostLimits(config.max_cpu_lora_bytes or free_host_bytes(HOST_LIMIT), config.max_cpu_loras),
        Path(config.lora_dir) if config.lora_dir is not None else None,
        min(GPU_THREADS, os.cpu_count() or 1) if on_gpu else CPU_THREADS,
    )
    for name, folder in config.modules().items():
        library.register(name, Path(folder))
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


def adapter_dtype(numbers: Numbers) -> torch.dtype:
    """Adapters are kept as the model computes; beside int8 weights 16 bits are precise enough."""
    return torch.bfloat16 if numbers.format_name == "int8" else numbers.format.activation_dtype


def _kinds(sites: tuple[LoraSite, ...], targets: set[str]) -> int:
    """The kinds of layers that modules of these names belong to."""
    kinds = {site.kind for site in sites if site.name in targets or site.name.rpartition(".")[2] in targets}
    return sum(1 << kind for kind in kinds)

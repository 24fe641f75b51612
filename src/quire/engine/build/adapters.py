"""What serves adapters: sites in the model, the store, and slots in the runner."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.adapters.packing import ALIGNMENT, BlockShape, Shards
from quire.adapters.peft import PackedAdapter, Reader
from quire.adapters.sites import Sites
from quire.adapters.store import AdapterStore, HostLimits
from quire.core import laboratory
from quire.core.config import AdapterConfig, EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build.resolve import BuildPlan, Precision
from quire.engine.build.weights import LoadedModels
from quire.kernels.registry import REFERENCE, can_run, choose, forces_reference
from quire.layers.attention import Pool
from quire.layers.lora import LoraSite, install_sites
from quire.models.model import DecoderModel
from quire.models.offload import is_streamed
from quire.models.stage import Stage
from quire.runner.adapters import PIECE_BYTES, AdapterSlots
from quire.runner.device_ops import RunnerLimits
from quire.runner.sizing import free_host_bytes
from quire.runner.transfer import TransferEngine

HOST_LIMIT = 16 * 2**30  # bytes of host copies, where no limit is set
PEEKED = 16  # named adapters whose configs are looked at before graphs are captured
GPU_THREADS, CPU_THREADS = 12, 1  # that read adapters: a GPU's host has cores to spare


@dataclass(frozen=True, slots=True)
class BuiltAdapters:
    store: AdapterStore
    slots: AdapterSlots


def build_adapters(
    plan: BuildPlan,
    models: LoadedModels,
    pool: Pool,
    limits: RunnerLimits,
    transfers: TransferEngine | None,
    received: dict[str, PackedAdapter],
) -> BuiltAdapters | None:
    """None where adapters are off. Named adapters are only looked for, not read: a thousand cost no start time.

    `received`: copies that a rank other than 0 gets from there, by key.
    """
    config, model = plan.config, models.model
    if not config.adapters.enabled:
        return None
    _check(config, model, pool)
    merge = config.adapters.lora_mode == "merge"
    merged = laboratory.load("baselines.merged", "--lora-mode merge") if merge else None
    merging = merged.merge_sites(model) if merged is not None else None
    kernel = models.factory.kernel("lora")
    part = plan.part
    loaders = model.whole_loaders() if isinstance(model, Stage) else model.loaders()
    shards = part is not None and part.cut.size > 1 and config.adapters.fully_sharded_loras
    sites = install_sites(
        loaders,
        kernel,
        None if part is None else part.cut,
        part.group if part is not None and shards else None,
    )
    if merging is not None:
        sites = tuple(site for site in sites if site.name in merging)
    # parts of A and of B have no scales in common
    dtype = plan.precision.format.activation_dtype if shards else adapter_dtype(plan.precision)
    block_bytes = plan.agreed(pool.layout.block_bytes)  # an adapter has as many blocks on every rank
    store = _make_store(plan, sites, BlockShape(block_bytes, dtype, pool.layout.block_size))
    if merged is not None and merging is not None:
        merge_sites = tuple(merging[site.name] for site in sites)
        return BuiltAdapters(store, merged.MergedAdapter(merge_sites, dtype, store.want))
    slots = AdapterSlots(
        tuple(site for site in sites for _ in range(2)) if shards else sites,
        pool,
        dtype,
        limits.max_num_seqs,
        max(limits.max_num_batched_tokens, limits.max_num_seqs),
        store.want if part is None or part.world.rank == 0 else received.pop,
        _kinds(sites, store.targets(PEEKED)),
        recordable=not kernel.__name__.endswith(REFERENCE) and part is None,
        invariant=limits.deterministic,
        # loads travel on the stream of pages from host memory, and so in order with them
        side=transfers.stream if transfers is not None else None,
        origin=store.origin if shards else None,
    )
    return BuiltAdapters(store, slots)


def _check(config: EngineConfig, model: DecoderModel, pool: Pool) -> None:
    if config.memory.reservation != "paged":
        raise ConfigError(f"adapters need pages, not reservation={config.memory.reservation!r}: choose paged")
    if pool.layout.block_bytes % ALIGNMENT:
        raise ConfigError(
            f"blocks of {pool.layout.block_bytes} bytes cannot hold adapters, which need a multiple of {ALIGNMENT}: "
            "raise block_size"
        )
    if config.adapters.lora_mode == "merge" and is_streamed(model):
        raise ConfigError(
            "lora_mode='merge' changes weights in place, and these stream: leave out the offloading of weights"
        )


def _make_store(plan: BuildPlan, sites: tuple[LoraSite, ...], block: BlockShape) -> AdapterStore:
    config = plan.config.adapters
    device = plan.precision.device
    on_gpu = device.type == "cuda"
    reader = Reader(
        Sites(sites),
        block,
        config.max_lora_rank,
        plan.config.memory.enable_prefix_caching,
        choose("lora_pack", device),
        PIECE_BYTES if on_gpu and plan.part is None and config.lora_mode != "merge" and _has_triton() else 0,
        plan.source.name,
        Shards(plan.part.cut)
        if plan.part is not None and plan.part.cut.size > 1 and config.fully_sharded_loras
        else None,
    )
    store = AdapterStore(
        reader,
        HostLimits(config.max_cpu_lora_bytes or free_host_bytes(HOST_LIMIT), config.max_cpu_loras),
        Path(config.lora_dir) if config.lora_dir is not None else None,
        min(GPU_THREADS, os.cpu_count() or 1) if on_gpu else CPU_THREADS,
    )
    store.register_named(config.modules())
    return store


def adapter_lines(config: AdapterConfig, built: BuiltAdapters | None, max_num_seqs: int) -> tuple[str, ...]:
    if built is None:
        return ()
    where = f", those of {config.lora_dir} among them" if config.lora_dir is not None else ""
    at_once = min(config.max_loras or max_num_seqs, max_num_seqs)
    return (
        f"adapters  {len(built.store.names()):,} known{where}; {at_once} at once, copies of up to "
        f"{built.store.limits.num_bytes / 1e6:,.0f} MB in host memory",
    )


def _has_triton() -> bool:
    return not forces_reference() and can_run("triton")


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


def adapter_dtype(precision: Precision) -> torch.dtype:
    """Adapters are kept in the model's activation dtype, or in int8 beside weights of 4 to 8 bits on a CPU.

    A step is bound by memory there, and dozens of adapters are more of it than the model itself. GPU kernels read
    16 bits.
    """
    if precision.format_name != "int8" and not precision.format.native:
        return precision.format.activation_dtype
    return torch.int8 if precision.device.type == "cpu" else torch.bfloat16


def _kinds(sites: tuple[LoraSite, ...], targets: set[str]) -> int:
    """The kinds of layers that modules of these names belong to."""
    kinds = {site.kind for site in sites if site.name in targets or site.name.rpartition(".")[2] in targets}
    return sum(1 << kind for kind in kinds)

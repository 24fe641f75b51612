"""Memory and admission policies by their settings. Baselines are part of the laboratory, and are loaded here only."""

from quire.core import laboratory
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.request import Clock
from quire.memory.adapter_pages import AdapterPages
from quire.memory.offload_cache import OffloadCache
from quire.memory.paged import PagedMemory
from quire.memory.swap import PendingTransfers
from quire.scheduler.adapter_admission import AdapterAdmission, HostCopies
from quire.scheduler.running import AdmissionPolicy


def make_memory(
    config: MemoryConfig,
    num_blocks: int,
    max_model_len: int,
    fingerprint: str = "",
    num_swap_blocks: int = 0,
    transfers: PendingTransfers | None = None,
    offload_cache: OffloadCache | None = None,
    num_separate_blocks: int = 0,
    kind: type[PagedMemory] = PagedMemory,
) -> PagedMemory:
    """`config` is resolved: memory that is reserved up front has blocks of one token. `num_separate_blocks` behind the
    pool's `num_blocks` are for adapters alone. `kind`: of memory that is not reserved.
    """
    memory: PagedMemory
    if config.reservation != "paged":
        baseline = laboratory.load("baselines.reserved_memory", f"--reservation {config.reservation}")
        memory = baseline.ReservedMemory(num_blocks, config.reservation, max_model_len)
        return memory
    adapter_pages: AdapterPages | None = None
    if num_separate_blocks:
        baseline = laboratory.load("baselines.separate_pages", "--lora-memory separate")
        adapter_pages = baseline.SeparatePages(num_blocks + 1, num_separate_blocks)
    return kind(
        num_blocks,
        config.block_size,
        fingerprint,
        config.enable_prefix_caching,
        config.share,
        num_swap_blocks,
        transfers,
        offload_cache,
        adapter_pages,
    )


def make_admission_policy(config: SchedulerConfig, clock: Clock) -> AdmissionPolicy:
    if config.batching == "continuous":
        return AdmissionPolicy()
    max_num_seqs, _ = config.limits
    batch_size = min(config.batch_size or max_num_seqs, max_num_seqs)
    baseline = laboratory.load("baselines.static_batching", f"--batching {config.batching}")
    policy: AdmissionPolicy
    if config.batching == "dynamic":
        policy = baseline.DynamicBatching(batch_size, config.batch_window_ms / 1e3, clock)
    else:
        policy = baseline.StaticBatching(batch_size)
    return policy


def make_adapter_admission(
    copies: HostCopies, memory: PagedMemory, max_adapters: int | None, merge: bool
) -> AdapterAdmission:
    """`merge`: one adapter at a time, merged into the weights."""
    if not merge:
        return AdapterAdmission(copies, memory, max_adapters)
    baseline = laboratory.load("baselines.merged_admission", "--lora-mode merge")
    admission: AdapterAdmission = baseline.MergedAdapterAdmission(copies, memory, max_adapters)
    return admission

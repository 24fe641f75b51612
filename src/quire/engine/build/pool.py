"""The pool: how large, measured on the device; kernels compile while weights load."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from quire.core.config import EngineConfig, MemoryConfig
from quire.core.layout import BlockLayout
from quire.core.stats import PoolSize
from quire.engine.build.adapters import adapter_dtype, separate_blocks
from quire.engine.build.rank_memory import pool_memory
from quire.engine.build.resolve import BuildPlan, Precision, block_layout, default_limits
from quire.engine.build.weights import LoadedDraft, LoadedModels
from quire.layers.attention import Pool
from quire.layers.lora import MANY_FROM
from quire.models.encoder_decoder import EncoderDecoder
from quire.models.model import DecoderModel
from quire.models.offload import is_streamed
from quire.runner.adapters import device_bytes
from quire.runner.cross_cuda import cross_activation_bytes
from quire.runner.device_ops import RunnerLimits
from quire.runner.graphs import token_counts
from quire.runner.sizing import DeviceMemory, divide_gpu, free_host_bytes, pool_size
from quire.runner.warmup import (
    KernelWarmup,
    activation_bytes,
    warm_up_attention,
    warm_up_lora,
    warm_up_sampling,
)


@dataclass(frozen=True, slots=True)
class BuiltPool:
    pool: Pool
    size: PoolSize
    num_adapter_blocks: int  # the last ones, where adapters have memory of their own
    device_memory: DeviceMemory | None  # None on a CPU

    @property
    def num_blocks(self) -> int:
        """That requests may use."""
        return self.size.num_blocks - self.num_adapter_blocks


def start_kernel_warmup(plan: BuildPlan) -> KernelWarmup:
    """Compiles what takes longest beside the loading of weights; on a CPU there is nothing to compile."""
    config, device = plan.config, plan.precision.device
    if device.type != "cuda":
        return KernelWarmup(device)
    torch.cuda.init()
    max_rows, max_tokens = default_limits(config.scheduler, device)
    limits = RunnerLimits(
        max_rows,
        max_tokens,
        plan.max_model_len,
        record_decodes=not config.runner.enforce_eager,
        activation_dtype=plan.precision.format.activation_dtype,
        deterministic=config.runner.deterministic,
    )
    layout = block_layout(config.memory.block_size, plan.local, plan.precision, plan.groups)
    return KernelWarmup(
        device,
        partial(warm_up_sampling, plan.model.vocab_size, device),
        partial(warm_up_attention, plan.local, limits, layout, device),
        *_lora_pieces(plan, limits),
    )


def _lora_pieces(plan: BuildPlan, limits: RunnerLimits) -> Iterator[Callable[[], None]]:
    """The kernels of adapters, which compile side by side: those of each projection for decodes and for prompts."""
    model, adapters = plan.local, plan.config.adapters
    if not adapters.enabled or adapters.lora_mode == "merge":
        return
    dtypes = (adapter_dtype(plan.precision), limits.activation_dtype)
    hidden, inner = model.hidden_size, model.intermediate_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    projections = (
        (hidden, (0, query, query + key, query + 2 * key)),
        (query, (0, hidden)),
        (hidden, (0, inner, 2 * inner)),
        (inner, (0, hidden)),
    )
    for num_inputs, bounds in projections:
        for num_tokens in (1,) if limits.deterministic else (1, MANY_FROM, 4 * MANY_FROM):
            yield partial(warm_up_lora, num_inputs, bounds, num_tokens, *dtypes, plan.precision.device)


def make_pool(plan: BuildPlan, models: LoadedModels, warmup: KernelWarmup) -> BuiltPool:
    config, precision = plan.config, plan.precision
    layout = block_layout(config.memory.block_size, models.model.config, precision, plan.groups)
    max_rows, _ = default_limits(config.scheduler, precision.device)
    divided = None
    if precision.device.type == "cuda":
        divided = _divide_gpu(plan, models.model, layout, warmup)
    free = free_host_bytes() // plan.ranks_here() if divided is None else divided.pool
    memory, free = _without_draft(config.memory, layout, models.draft, free)
    size = pool_size(memory, layout, plan.groups, max_rows, plan.max_model_len, free)
    if (agreed := plan.agreed(size.num_blocks)) < size.num_blocks:
        memory = replace(memory, num_blocks=agreed // plan.groups.num_groups)
        size = replace(
            pool_size(memory, layout, plan.groups, max_rows, plan.max_model_len, free),
            limit="the smallest rank",
        )
    num_blocks = size.num_blocks + 1
    return BuiltPool(
        Pool(layout, num_blocks, precision.device, pool_memory(plan, num_blocks * layout.block_bytes)),
        size,
        separate_blocks(config.adapters, size.num_blocks, size.block_bytes),
        divided,
    )


def _divide_gpu(
    plan: BuildPlan, model: DecoderModel, layout: BlockLayout, warmup: KernelWarmup
) -> DeviceMemory:
    config, precision = plan.config, plan.precision
    max_rows, max_tokens = default_limits(config.scheduler, precision.device)
    measure: Callable[[], int] = partial(
        cross_activation_bytes if isinstance(model, EncoderDecoder) else activation_bytes,
        model,  # type: ignore[arg-type]
        layout,
        max_rows,
        max_tokens,
        plan.max_model_len,
        precision.device,
    )
    if warmup.goes_on and plan.part is None:  # ranks make the same passes
        with suppress(Exception):  # this compiles beside it; the measurement counts once it runs alone
            measure()
    warmup.join()
    drafts = plan.speculative is not None
    with _tuning(config, model, precision, token_counts(max_rows, max_tokens, drafts)):
        needed = measure()
    if config.adapters.enabled and config.adapters.lora_mode != "merge":
        needed += device_bytes(max_rows, sum(len(loader.parts) for loader in model.loaders().values()))
    return divide_gpu(precision.device, config.memory.gpu_memory_utilization, needed)


def _tuning(
    config: EngineConfig, model: DecoderModel, precision: Precision, sizes: list[int]
) -> AbstractContextManager[None]:
    """Measures the GEMMs that run inside it, where graphs will hold them; before the pool takes all memory."""
    if config.runner.enforce_eager or is_streamed(model):
        return nullcontext()
    return precision.format.gemm.tuning(sizes)


def _without_draft(
    memory: MemoryConfig, layout: BlockLayout, draft: LoadedDraft | None, free: int
) -> tuple[MemoryConfig, int]:
    """The memory of the target's blocks: each has a block of the draft model beside it, from the same memory."""
    if draft is None:
        return memory, free
    of_draft = block_layout(layout.block_size, draft.model.config, draft.precision).block_bytes
    share = layout.block_bytes / (layout.block_bytes + of_draft)
    if memory.kv_cache_memory_bytes is not None:
        memory = replace(memory, kv_cache_memory_bytes=max(1, int(memory.kv_cache_memory_bytes * share)))
    return memory, int(free * share)

"""The models of an engine: the target, whose weights stay in memory or stream, and what proposes drafts for it."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from quire.core.config import EngineConfig, ModelConfig, ModelOptions, SchedulerConfig, SpeculativeConfig
from quire.core.draft import MAX_NODES
from quire.core.errors import ConfigError
from quire.core.stats import PoolSize
from quire.engine.build.resolve import BuildPlan, Precision, Progress, block_layout, resolve_precision
from quire.engine.build.runner import build_runner, runner_limits
from quire.engine.draft_model import DraftModel
from quire.engine.speculation import Proposer
from quire.layers.attention import Pool
from quire.layers.factory import LayerFactory
from quire.models import registry
from quire.models.expert_placement import ExpertPlacement
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.models.offload import GIB, Loaded, Offload, Streaming, load_offloaded
from quire.models.stage import holds
from quire.runner.drafts import Proposals
from quire.runner.sizing import available_memory
from quire.speculate.ngram import NgramProposer
from quire.text.load import load_tokenizer
from quire.weights.cache import offloaded_folder
from quire.weights.cut import CutSource
from quire.weights.source import Source, open_source

SAMPLE = "Two quires, 48 pages: «naïve»\n\tdef f(x): return x ** 2  # 漢字"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    model: DecoderModel
    precision: Precision


@dataclass(frozen=True, slots=True)
class LoadedModels:
    model: DecoderModel
    streaming: Streaming | ExpertPlacement | None  # None: all weights stay
    factory: LayerFactory
    draft: LoadedDraft | None  # None: no draft model


def load_models(plan: BuildPlan, progress: Progress | None) -> LoadedModels:
    """The target, all in memory unless the settings say otherwise, and the draft model."""
    config, precision = plan.config, plan.precision
    factory = LayerFactory(precision.format, precision.device, plan.max_model_len, plan.part, plan.groups)
    source: Source = plan.source
    if (part := plan.part) is not None:
        stage = "" if part.layers is None else f" layers {part.layers}"
        source = CutSource(source, part.cut, stage, partial(holds, part))
    advance = partial(progress, "weights") if progress is not None else None
    offload = resolve_offload(config, precision)
    if offload is None:
        model = load(source, factory, advance, seed=config.model.seed, config=plan.local)
        loaded = Loaded(model, None)
    else:
        loaded = load_offloaded(plan.source, factory, offload, advance, seed=config.model.seed)
    if plan.speculative is not None:
        check_trees(plan.speculative, plan.model, precision, config.runner.deterministic)
    return LoadedModels(loaded.model, loaded.streaming, factory, load_draft(plan))


def resolve_offload(config: EngineConfig, precision: Precision) -> Offload | None:
    """None: all weights stay where they are used."""
    memory = config.memory
    on_cpu = precision.device.type == "cpu"
    if memory.weights_memory_gb is None:
        if memory.weights_offload_dir is not None:
            raise ConfigError(
                "weights_offload_dir holds layers beyond weights_memory_gb: set that too, or leave out both"
            )
        if on_cpu or not memory.cpu_offload_gb:
            return None
    elif not on_cpu and not memory.cpu_offload_gb:
        raise ConfigError(
            "weights_memory_gb bounds what cpu_offload_gb takes off the GPU into host memory: set that too"
        )
    folder = memory.weights_offload_dir
    return Offload(
        device_bytes=0 if on_cpu else int(memory.cpu_offload_gb * GIB),
        memory_bytes=None if memory.weights_memory_gb is None else int(memory.weights_memory_gb * GIB),
        folder=Path(folder).expanduser() if folder else offloaded_folder(),
        host_bytes=available_memory(),
    )


def offload_lines(
    config: EngineConfig, precision: Precision, streaming: Streaming | ExpertPlacement | None
) -> tuple[str, ...]:
    """What was decided; empty without such settings."""
    memory = config.memory
    if isinstance(streaming, ExpertPlacement):
        return _expert_lines(streaming)
    if streaming is not None:
        return _streaming_lines(streaming)
    if memory.weights_memory_gb is not None:
        return (f"offload   none: all weights fit weights_memory_gb={memory.weights_memory_gb:g}",)
    if memory.cpu_offload_gb and precision.device.type == "cpu":
        return (
            "offload   none: on a CPU weights are in host memory already, and cpu_offload_gb changes nothing "
            "(weights_memory_gb streams layers from disk)",
        )
    return ()


def _streaming_lines(streaming: Streaming) -> tuple[str, ...]:
    tiers = [
        f"{len(layers)} of {streaming.num_layers} layers ({_size(len(layers) * streaming.layer_bytes)}) {where}"
        for layers, where in (
            (streaming.pinned, "in pinned host memory"),
            (streaming.on_disk, f"in {streaming.folder}"),
        )
        if layers
    ]
    return (
        f"offload   {', '.join(tiers)}; {_size(streaming.kept_bytes)} stay, "
        f"{_size(streaming.buffer_bytes)} are buffers",
        f"          every step moves {_size(streaming.step_bytes)}: at least {streaming.step_seconds * 1e3:,.1f} ms at "
        f"the {streaming.bytes_per_second / 1e9:.1f} GB/s measured now",
    )


def _expert_lines(placed: ExpertPlacement) -> tuple[str, ...]:
    at_once = f", one layer's at a time ({_size(placed.pass_bytes)} at most)" if placed.pass_bytes else ""
    return (
        f"offload   experts by use: {placed.num_resident} of {placed.num_experts} in each of {placed.num_layers} "
        f"layers stay, the most used; {_size(placed.away_bytes)} of others {placed.where}",
        f"          {_size(placed.kept_bytes)} stay; a chosen expert that does not is read there, "
        f"{_size(placed.expert_bytes)} each{at_once}",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


# ---------------------------------------------------------------------- speculation


def load_draft(plan: BuildPlan) -> LoadedDraft | None:
    """The draft model where the method has one. Raises ConfigError if it does not match the target."""
    config, speculative = plan.config, plan.speculative
    if speculative is None or speculative.method != "draft_model":
        return None
    if plan.part is not None and plan.part.world.rank > 0:  # rank 0 drafts
        return None
    options = ModelOptions(
        model=speculative.model,
        quantization=speculative.quantization,
        load_format=config.model.load_format,
        dtype=config.model.dtype,
    )
    draft_source = open_source(options.model, load_format=options.load_format)
    described = registry.describe(draft_source.config)
    _check_fits(described, plan.model, plan.max_model_len)
    _check_tokenizer(draft_source, plan.source)
    precision = resolve_precision(replace(config, model=options), described)
    factory = LayerFactory(precision.format, precision.device, max_position=plan.max_model_len)
    return LoadedDraft(load(draft_source, factory, seed=config.model.seed), precision)


def check_trees(
    speculative: SpeculativeConfig, target: ModelConfig, precision: Precision, deterministic: bool
) -> None:
    """Raises ConfigError where this device cannot verify trees.

    A GPU's faster kernel takes nodes by their index, so no attention window may end among them. The deterministic one
    takes them by their positions, as a CPU's does.
    """
    if speculative.tree_width == 1 or precision.device.type == "cpu" or deterministic:
        return
    alibi = target.architecture == "BloomForCausalLM" or target.hf.get("alibi")
    if alibi or target.architecture.startswith(("T5", "MT5")):
        raise ConfigError(
            "speculative_config: tree_width above 1 has no kernel for scores by distance "
            f"({'ALiBi' if alibi else 'T5'}), which this model has: leave out tree_width, or add deterministic"
        )
    window = target.hf.get("sliding_window") or 0
    if 0 < window < MAX_NODES:
        raise ConfigError(
            f"speculative_config: tree_width above 1 needs attention over {MAX_NODES} tokens or more, and this model's "
            f"window is {window}: leave out tree_width, or add deterministic"
        )


def make_proposer(
    plan: BuildPlan,
    scheduler: SchedulerConfig,
    draft: LoadedDraft | None,
    size: PoolSize,
    proposals: Proposals | None,
) -> Proposer:
    """`size` of the target's pool: a draft model's blocks have the target's ids."""
    if draft is None:
        speculative = plan.speculative
        assert speculative is not None
        return NgramProposer(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    model, precision = draft.model, draft.precision
    layout = block_layout(size.block_size, model.config, precision)
    pool = Pool(layout, size.num_blocks + 1, precision.device)
    limits = runner_limits(plan, scheduler, model, precision)
    built = build_runner(model, pool, limits, precision.device, proposals)
    draws = proposals is not None
    return DraftModel(built.runner, limits.max_num_batched_tokens, draws, size.block_size)


def _check_fits(draft: ModelConfig, target: ModelConfig, max_model_len: int) -> None:
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens and the target one of "
            f"{target.vocab_size}: choose a draft model with the target's tokenizer"
        )
    ours, theirs = draft.encoder, target.encoder
    if (ours is None) != (theirs is None):
        raise ConfigError(
            f"the draft model is {draft.architecture} and the target {target.architecture}: both must have an encoder, "
            "or neither"
        )
    if ours is not None and theirs is not None:
        halves = (ours.max_tokens, theirs.max_tokens), (ours.max_outputs, theirs.max_outputs)
        for half, (own, of_target) in zip(("encoder", "decoder"), halves, strict=True):
            if own < min(of_target, max_model_len):
                raise ConfigError(
                    f"the draft model's {half} has {own} positions and the target's {of_target}: lower max_model_len "
                    f"to {own} or choose another draft model"
                )
    if draft.max_position < max_model_len:
        raise ConfigError(
            f"the draft model has {draft.max_position} positions, fewer than max_model_len={max_model_len}: lower "
            f"max_model_len to {draft.max_position} or choose another draft model"
        )


def _check_tokenizer(draft: Source, target: Source) -> None:
    """Vocabularies of one size may differ: a sample must give the same tokens."""
    ours, theirs = load_tokenizer(target), load_tokenizer(draft)
    if ours is None or theirs is None:
        return
    if list(ours.encode(SAMPLE)) != list(theirs.encode(SAMPLE)):
        raise ConfigError(
            "the draft model's tokenizer gives other tokens than the target's: choose a draft model with the same one"
        )

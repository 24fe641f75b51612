"""Loading the models: which weights stay in memory and which stream, and the draft model beside the target."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build.drafts import LoadedDraft, check_trees, load_draft
from quire.engine.build.resolve import BuildPlan, Precision, Progress
from quire.layers.factory import LayerFactory
from quire.models.loading import load
from quire.models.model import DecoderModel
from quire.models.offload import GIB, Loaded, Offload, Streaming, load_offloaded
from quire.runner.sizing import available_memory
from quire.weights.cache import offloaded_folder


@dataclass(frozen=True, slots=True)
class LoadedModels:
    model: DecoderModel
    streaming: Streaming | None  # None: all weights stay
    factory: LayerFactory
    draft: LoadedDraft | None  # None: no draft model


def load_models(plan: BuildPlan, progress: Progress | None) -> LoadedModels:
    """The target, all in memory unless the settings say otherwise, and the draft model."""
    config, precision = plan.config, plan.precision
    factory = LayerFactory(precision.format, precision.device, max_position=plan.max_model_len)
    advance = partial(progress, "weights") if progress is not None else None
    offload = resolve_offload(config, precision)
    if offload is None:
        loaded = Loaded(load(plan.source, factory, advance, seed=config.model.seed), None)
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


def offload_lines(config: EngineConfig, precision: Precision, streaming: Streaming | None) -> tuple[str, ...]:
    """What was decided; empty without such settings."""
    memory = config.memory
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


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"

"""Which weights stay and which stream: from the user's settings to a loaded model, and what is said about it."""

from pathlib import Path

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.resolve import Precision
from quire.layers.factory import LayerFactory
from quire.models.loading import Progress, load
from quire.models.offload import GIB, Loaded, Offload, Streaming, load_offloaded
from quire.runner.sizing import available_memory
from quire.weights.cache import offloaded_folder
from quire.weights.source import Source


def load_model(
    config: EngineConfig, numbers: Precision, source: Source, factory: LayerFactory, progress: Progress | None
) -> Loaded:
    """With everything in memory unless the settings say otherwise."""
    offload = resolve_offload(config, numbers)
    if offload is None:
        return Loaded(load(source, factory, progress, seed=config.model.seed), None)
    return load_offloaded(source, factory, offload, progress, seed=config.model.seed)


def resolve_offload(config: EngineConfig, numbers: Precision) -> Offload | None:
    """None: all weights stay where they are used."""
    memory = config.memory
    on_cpu = numbers.device.type == "cpu"
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


def offload_lines(config: EngineConfig, numbers: Precision, streaming: Streaming | None) -> tuple[str, ...]:
    """What was decided, for people; nothing where nothing was asked for."""
    memory = config.memory
    if streaming is not None:
        return _streaming_lines(streaming)
    if memory.weights_memory_gb is not None:
        return (f"offload   none: all weights fit weights_memory_gb={memory.weights_memory_gb:g}",)
    if memory.cpu_offload_gb and numbers.device.type == "cpu":
        return (
            "offload   none: on a CPU weights are in host memory already, and cpu_offload_gb changes nothing "
            "(weights_memory_gb streams layers from disk)",
        )
    return ()


def _streaming_lines(streaming: Streaming) -> tuple[str, ...]:
    places = [
        f"{len(layers)} of {streaming.num_layers} layers ({_size(len(layers) * streaming.layer_bytes)}) {where}"
        for layers, where in (
            (streaming.pinned, "in pinned host memory"),
            (streaming.on_disk, f"in {streaming.folder}"),
        )
        if layers
    ]
    return (
        f"offload   {', '.join(places)}; {_size(streaming.kept_bytes)} stay, "
        f"{_size(streaming.buffer_bytes)} are buffers",
        f"          every step moves {_size(streaming.step_bytes)}: at least {streaming.step_seconds * 1e3:,.1f} ms at "
        f"the {streaming.bytes_per_second / 1e9:.1f} GB/s measured now",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"

"""load: a source of tensors to a model that can run, through the cache of converted weights where that is faster."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quire.core.config import ModelConfig, Task
from quire.core.errors import ModelError, WeightsError
from quire.kernels import huge_pages
from quire.layers.factory import LayerFactory
from quire.layers.parameters import Loader
from quire.models.model import Loadable
from quire.models.registry import build, describe
from quire.models.stage import Stage
from quire.observe.heap import release_freed
from quire.observe.logs import get_logger
from quire.quant.encoded import Weight
from quire.weights.converted import converted_path, read_converted, write_converted
from quire.weights.cut import CutSource
from quire.weights.source import Source, spellings

logger = get_logger(__name__)

Progress = Callable[[int, int], None]  # (tensors done, tensors in all)

_LAYER = re.compile(r"\.\d+\.")
NAMED = 4  # tensors that an error names


def load(
    source: Source,
    factory: LayerFactory,
    progress: Progress | None = None,
    seed: int = 0,
    task: Task = "generate",
    config: ModelConfig | None = None,
) -> Any:
    """A loaded DecoderModel, or, to embed, Encoder. Needs the model's own memory plus one tensor; WeightsError names
    what is missing or wrong.

    A source with `random` set has no tensors: parameters are random, by `seed`. `config` takes the place of what the
    source's config.json describes.
    """
    model = _built(config or describe(source.config, task), factory)
    _fill(model, source, factory, progress, seed)
    if factory.device.type == "cpu":
        huge_pages.keep_freed()  # of steps: what loading freed has been returned
    return model


def _built(config: ModelConfig, factory: LayerFactory) -> Loadable:
    """ModelError, with the sizes that config.json gives, where memory cannot hold such a model."""
    try:
        model: Loadable = build(config, factory)
        if (part := factory.part) is not None and part.layers is not None:
            return Stage(model, part, factory.dtype, factory.device)
        return model
    except (RuntimeError, MemoryError) as error:  # torch raises either
        raise ModelError(
            f"there is no memory for a model of {config.num_layers} layers, hidden size {config.hidden_size}, "
            f"intermediate size {config.intermediate_size}, {config.vocab_size} tokens and {config.max_position} "
            f"positions, as config.json describes it ({str(error).splitlines()[0]}): check these sizes, or give "
            "--max-model-len"
        ) from error


def _fill(
    model: Loadable, source: Source, factory: LayerFactory, progress: Progress | None, seed: int
) -> None:
    if source.random or not factory.number_format.worth_keeping:
        feed(source, model.loaders(), factory.device, progress, seed)
        release_freed()  # numbers before they were rounded
        return
    kept_as, architecture = source.fingerprint, model.config.architecture
    if architecture not in (source.config.get("architectures") or ()):
        kept_as += architecture  # a decoder that embeds, without its head
    path = converted_path(kept_as, factory.number_format.name)
    kept = read_converted(path)
    if kept is not None and _adopt(model, kept):
        logger.debug("mapped converted weights %s", path)
        return
    started = time.monotonic()
    kind = factory.number_format.name.partition("-")[0]
    logger.info(
        "converting %.1f GB of weights to %s, once: later starts map them", source.num_bytes / 1e9, kind
    )
    feed(source, model.loaders(), factory.device, progress, seed)
    logger.info("converted in %.1f s", time.monotonic() - started)
    if write_converted(path, model.parameters()) and factory.device.type == "cpu":
        kept = read_converted(path)
        if kept is not None:
            _adopt(model, kept)  # mapped pages can be dropped and shared, anonymous ones cannot
    release_freed()


def feed(
    source: Source, loaders: Mapping[str, Loader], device: torch.device, progress: Progress | None, seed: int
) -> None:
    """Gives every loader its tensor from the source, or a random one; WeightsError names the missing ones."""
    if source.random:
        _stream(_random_tensors(loaders, seed, device, source), loaders, progress)
    else:
        _stream(source.tensors(), loaders, progress, source.num_tensors)


def _adopt(model: Loadable, kept: Mapping[str, Tensor]) -> bool:
    try:
        model.adopt(kept)
    except (KeyError, ValueError, WeightsError) as error:
        logger.warning("converted weights do not fit and are made again: %s", error)
        return False
    return True


def _stream(
    tensors: Iterator[tuple[str, Weight]],
    loaders: Mapping[str, Loader],
    progress: Progress | None,
    total: int | None = None,
) -> None:
    """Hands every tensor to its loader, then checks that none is missing."""
    missing = dict.fromkeys(loaders)
    total = len(loaders) if total is None else total
    for done, (name, tensor) in enumerate(tensors, start=1):
        spelling = _find(name, loaders)
        if spelling is None:
            _check_unused(name, loaders)
            logger.debug("tensor %s is not used", name)
        else:
            _take(name, tensor, loaders[spelling])
            missing.pop(spelling, None)
        if progress is not None:
            progress(done, total)
    if missing:
        names = ", ".join(list(missing)[:NAMED]) + (", …" if len(missing) > NAMED else "")
        raise WeightsError(
            f"{len(missing)} of {len(loaders)} tensors are missing from the weights: {names}. "
            "Fetch the model again, or check that config.json belongs to it"
        )


def _take(name: str, tensor: Weight, loader: Loader) -> None:
    try:
        loader(tensor)
    except WeightsError as error:
        raise WeightsError(f"tensor {name} cannot be loaded: {error}") from error


def _check_unused(name: str, loaders: Mapping[str, Loader]) -> None:
    """Buffers and other parts of a checkpoint may stay unused; what belongs to a layer that is loaded may not."""
    stem, _, suffix = name.rpartition(".")
    if suffix == "bias" and _find(f"{stem}.weight", loaders) is not None:
        raise WeightsError(
            f"tensor {name} has no place: by config.json this layer has no bias. Check that it belongs to the weights"
        )
    if suffix in ("weight", "bias") and _find(_LAYER.sub(".0.", name, count=1), loaders) is not None:
        raise WeightsError(
            f"tensor {name} has no place: by config.json the model has fewer layers. Check that it belongs to the "
            "weights"
        )


def _find(name: str, loaders: Mapping[str, Loader]) -> str | None:
    """The loader's own spelling of a tensor's name, with any of the known outer prefixes; TensorFlow's checkpoints
    call a norm's weight and bias gamma and beta."""
    if name in loaders:
        return name
    if name.endswith(("LayerNorm.gamma", "LayerNorm.beta")):
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    return next((spelling for spelling in spellings(name) if spelling in loaders), None)


def _random_tensors(
    loaders: Mapping[str, Loader], seed: int, device: torch.device, source: Source
) -> Iterator[tuple[str, Weight]]:
    """Small normal matrices, made on the model's device; vectors are ones where they scale, zeros where they shift.

    A rank draws whole tensors and keeps its part, so that all ranks have the same model.
    """
    generator = torch.Generator(device).manual_seed(seed)
    cut = source if isinstance(source, CutSource) else None
    for name, loader in loaders.items():
        if len(loader.shape) == 1:
            yield name, torch.full(loader.shape, 0.0 if name.endswith("bias") else 1.0)
        else:
            shape = loader.shape if cut is None else cut.whole_shape(name, loader.shape)
            drawn = torch.randn(shape, generator=generator, device=device).mul_(0.02)
            yield name, drawn if cut is None else cut.part(name, drawn)

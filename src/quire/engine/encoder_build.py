"""Builds an EncoderEngine from its config: source, encoder, pooling, runner. Says what was decided."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from quire.core.config import EngineConfig, ModelConfig
from quire.core.errors import ConfigError
from quire.core.request import QueueBounds
from quire.engine.build import Progress, set_threads
from quire.engine.build.resolve import CPU_BATCHED_TOKENS, Precision, resolve_precision
from quire.engine.encoder_engine import EncoderEngine
from quire.engine.validation import Limits
from quire.layers.encoder import Pooling
from quire.layers.factory import LayerFactory
from quire.models import registry
from quire.models.loading import load_encoder
from quire.runner.encoder_runner import EncoderRunner
from quire.weights.builtin import BUILTIN_ENCODER_NAME
from quire.weights.open import open_source
from quire.weights.sentence import SentenceFiles, read_sentence_files
from quire.weights.source import Source

MAX_TEXTS = 256  # of one step
GPU_BATCHED_TOKENS = 32768  # whole texts fill a GPU better than a queue of small steps


@dataclass(frozen=True, slots=True)
class EncoderReport:
    """Limits, sizes and formats that the start decided."""

    model: str
    numbers: Precision
    weights_bytes: int
    width: int
    pooling: str
    normalize: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    seconds: float

    def lines(self) -> list[str]:
        device = self.numbers.device.type
        where = f"on {device}, {self.num_threads} threads" if device == "cpu" else f"on {device}"
        length = ", of length one" if self.normalize else ""
        return [
            f"encoder   {self.model}, {self.numbers.format_name} {where}",
            f"weights   {self.weights_bytes / 1e6:,.0f} MB",
            f"vectors   {self.width} numbers, {self.pooling} of the tokens{length}",
            f"limits    {self.max_model_len:,} tokens per text, {self.max_num_seqs} texts and "
            f"{self.max_num_batched_tokens:,} tokens per step",
            f"started   in {self.seconds:.2f} s",
        ]


@dataclass(frozen=True, slots=True)
class BuiltEncoder:
    engine: EncoderEngine
    source: Source
    report: EncoderReport


def build_encoder(config: EngineConfig, progress: Progress | None = None) -> BuiltEncoder:
    """Without a model's name, the built-in encoder."""
    started = time.perf_counter()
    options = config.model
    source = open_source(
        options.model or BUILTIN_ENCODER_NAME,
        revision=options.revision,
        load_format=options.load_format,
        progress=progress,
    )
    described = registry.describe_encoder(source.config)
    folder = getattr(source, "folder", None)
    files = read_sentence_files(folder) if isinstance(folder, Path) else SentenceFiles()
    numbers = resolve_precision(config, described)
    num_threads = set_threads(config.runner.num_threads, numbers)
    factory = LayerFactory(numbers.format, numbers.device)
    encoder = load_encoder(source, factory, partial(progress, "weights") if progress else None, options.seed)
    max_len, max_tokens = _lengths(config, described, files, numbers.device)
    limits = Limits(described.vocab_size, max_len, config.scheduler.max_num_seqs or MAX_TEXTS)
    report = EncoderReport(
        model=options.served_model_name or source.name,
        numbers=numbers,
        weights_bytes=sum(t.numel() * t.element_size() for t in encoder.parameters().values()),
        width=described.hidden_size,
        pooling=files.pooling,
        normalize=files.normalize,
        max_model_len=max_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=max_tokens,
        num_threads=num_threads,
        seconds=time.perf_counter() - started,
    )
    runner = EncoderRunner(encoder, Pooling(files.pooling, files.normalize), numbers.device)
    bounds = QueueBounds(config.scheduler.max_queue_requests, config.scheduler.max_queue_tokens)
    return BuiltEncoder(EncoderEngine(limits, max_tokens, runner, bounds), source, report)


def _lengths(
    config: EngineConfig, described: ModelConfig, files: SentenceFiles, device: torch.device
) -> tuple[int, int]:
    """The longest text, and the tokens of one step."""
    scheduler, asked = config.scheduler, config.model.max_model_len
    if asked is not None and asked > described.max_position:
        raise ConfigError(
            f"max_model_len={asked} is more than the model's {described.max_position} positions: lower it"
        )
    max_len = asked or min(files.max_length or described.max_position, described.max_position)
    usual = CPU_BATCHED_TOKENS if device.type == "cpu" else GPU_BATCHED_TOKENS
    max_tokens = scheduler.max_num_batched_tokens or max(usual, max_len)
    if max_tokens < max_len:
        raise ConfigError(
            f"max_num_batched_tokens={max_tokens} is less than one text of {max_len} tokens, which an encoder takes in "
            "one step: raise it, or lower max_model_len"
        )
    return max_len, max_tokens

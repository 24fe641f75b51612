"""build_engine: an engine of the kind that the model needs. build_encoder: the engine of a model that embeds."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quire.core.config import EngineConfig, ModelConfig
from quire.core.errors import ConfigError
from quire.core.request import QueueBounds
from quire.core.sampling import SamplingParams
from quire.core.stats import StartStats, VectorFormat
from quire.engine.build.assemble import Built, build
from quire.engine.build.report import Report, running_on
from quire.engine.build.resolve import CPU_BATCHED_TOKENS, BuildPlan, Progress, make_plan
from quire.engine.encoder import EncoderEngine, EncoderRunner
from quire.engine.validation import Limits
from quire.kernels.sm_share import num_sms
from quire.layers.encoder import Pooling
from quire.layers.factory import LayerFactory
from quire.models.encoder_heads import ClassificationHead, MaskHead
from quire.models.loading import load
from quire.models.model import Encoder
from quire.models.weight_shape import weight_groups
from quire.weights.architectures import ENCODERS, task_of
from quire.weights.builtin import BUILTIN_ENCODER_NAME, is_builtin
from quire.weights.hyperparameters import read_labels, score_activation
from quire.weights.sentence import SentenceFiles, has_sentence_files, read_sentence_files

MAX_TEXTS = 256  # of one step
GPU_BATCHED_TOKENS = 32768  # whole texts fill a GPU better than a queue of small steps


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Built[Any]:
    """The model's architecture decides which engine serves it."""
    if task_of(config.model.model, config.model.revision) == "embed":
        return build_encoder(config, progress)
    return build(config, progress)


def build_encoder(config: EngineConfig, progress: Progress | None = None) -> Built[EncoderEngine]:
    """Without a model's name, the built-in encoder."""
    started = time.perf_counter()
    named = config.model.model
    options = replace(
        config.model, model=BUILTIN_ENCODER_NAME if named is None or is_builtin(named) else named
    )
    plan = make_plan(replace(config, model=options), progress, "embed")
    precision, scheduler = plan.precision, config.scheduler
    model, files = _described(plan)
    pooling = Pooling(files.pooling, files.normalize)
    factory = LayerFactory(precision.format, precision.device)
    advance = partial(progress, "weights") if progress is not None else None
    encoder: Encoder = load(plan.source, factory, advance, options.seed, "embed", model)
    max_len, max_tokens = _lengths(plan, files)
    max_num_seqs = scheduler.max_num_seqs or MAX_TEXTS
    limits = Limits(plan.model.vocab_size, max_len, max_num_seqs, max_num_batched_tokens=max_tokens)
    bounds = QueueBounds(scheduler.max_queue_requests, scheduler.max_queue_tokens)
    classifies = isinstance(encoder.head, ClassificationHead)
    labels = read_labels(model.hf) if classifies else ()
    activation = score_activation(model.hf) if classifies else "none"
    engine = EncoderEngine(limits, EncoderRunner(encoder, pooling, precision.device, activation), bounds)
    weights_bytes = sum(t.numel() * t.element_size() for t in encoder.parameters().values())
    seconds = time.perf_counter() - started
    report = Report(
        model=options.served_model_name or plan.source.name,
        where=running_on(precision, plan.num_threads),
        precision=precision,
        start=StartStats(plan.num_threads, weights_bytes, seconds, num_sms(precision.device)),
        groups=weight_groups(encoder),
        limits=limits,
        vectors=VectorFormat(
            len(labels) or model.hidden_size,
            files.normalize and not labels,
            files.pooling,
            labels,
            isinstance(encoder.head, MaskHead),
            files.prompts,
            files.default_prompt,
        ),
        started=f"in {seconds:.2f} s",
    )
    return Built(engine, plan.source, model, SamplingParams(), report)


def _described(plan: BuildPlan) -> tuple[ModelConfig, SentenceFiles]:
    """The model, and how it pools. A folder of sentence-transformers is served without a masked-token head; a decoder
    of any other folder gives its last token."""
    model, folder = plan.model, getattr(plan.source, "folder", None)
    if model.architecture.endswith("ForSequenceClassification") or not isinstance(folder, Path):
        return model, SentenceFiles(pooling=getattr(plan.source, "pooling", "mean"))
    files = read_sentence_files(folder)
    if has_sentence_files(folder):
        bare = model.architecture.replace("ForMaskedLM", "Model")
        return replace(model, architecture=bare), files
    return model, files if model.architecture in ENCODERS else replace(files, pooling="last")


def _lengths(plan: BuildPlan, files: SentenceFiles) -> tuple[int, int]:
    """The longest text, and the tokens of one step."""
    max_len = plan.max_model_len
    if plan.config.model.max_model_len is None and files.max_length is not None:
        max_len = min(files.max_length, max_len)
    usual = CPU_BATCHED_TOKENS if plan.precision.device.type == "cpu" else GPU_BATCHED_TOKENS
    max_tokens = plan.config.scheduler.max_num_batched_tokens or max(usual, max_len)
    if max_tokens < max_len:
        raise ConfigError(
            f"max_num_batched_tokens={max_tokens} is less than one text of {max_len} tokens, which an encoder takes in "
            "one step: raise it, or lower max_model_len"
        )
    return max_len, max_tokens

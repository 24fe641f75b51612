"""finetune: from a data file and a model's name to an adapter's folder."""

import math
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from quire.adapters.peft import WEIGHTS
from quire.core.config import ModelConfig
from quire.core.errors import ConfigError, QuireError, TrainingError
from quire.engine.build.resolve import resolve_device
from quire.kernels import huge_pages
from quire.models.registry import describe
from quire.text.load import load_tokenizer
from quire.text.template import load_template
from quire.text.tokenizer import Tokenizer
from quire.train.examples import ExampleReader, Item
from quire.train.frozen import FrozenFormat, Store, keep, store_int8, store_nf4
from quire.train.lora import LoraParameters
from quire.train.model import TrainedModel, check_trainable
from quire.train.run_files import RunFiles
from quire.train.settings import TrainSettings
from quire.train.trainer import OnStep, Trainer
from quire.train.zero import ShardedWeight, end_ranks, lost_peer, start_ranks
from quire.weights.builtin import is_builtin
from quire.weights.source import Source, open_source
from quire.weights.wheel import Progress

QLORA_BITS = 8  # a base with fewer is trained by QLoRA only
MAX_CONTEXT = 4096  # tokens of an example, unless the settings say more
OnLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FinetuneJob:
    """What to train, on what, and where the result goes."""

    data: Path
    output: Path
    model: str | None = None
    validation: Path | None = None
    settings: TrainSettings = field(default_factory=TrainSettings)
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    overwrite: bool = False
    zero_stage: int = 0
    rank: int = 0
    world: int = 1
    address: str = ""  # host:port where ranks meet


def finetune(
    job: FinetuneJob,
    on_step: OnStep = lambda _: None,
    on_line: OnLine = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> str:
    """FINISHED or STOPPED, as Trainer.run. All data is checked before the weights are loaded."""
    device = _device(job)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # where Triton and NVRTC launch
    if job.num_threads:
        torch.set_num_threads(job.num_threads)
    if device.type == "cpu":
        huge_pages.keep_freed()
    if job.world > 1:
        start_ranks(job.rank, job.world, job.address, device)
    try:
        trainer = prepare(job, device, on_line, progress)
        return trainer.run(on_step, stop)
    finally:
        if job.world > 1:
            end_ranks()


def finetune_ranks(
    job: FinetuneJob,
    on_step: OnStep,
    on_line: OnLine,
    stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> str:
    """As `finetune`, in `job.world` processes, of which this one is rank 0."""
    if job.world == 1:
        return finetune(job, on_step, on_line, stop, progress)
    _check_output(job)  # before other ranks look at it
    _device(job)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = replace(job, overwrite=False, address=f"127.0.0.1:{free.getsockname()[1]}")
    context = multiprocessing.get_context("spawn")
    errors = context.SimpleQueue()
    peers = [(replace(job, rank=rank), errors) for rank in range(1, job.world)]
    others = [context.Process(target=_peer, args=given, daemon=True) for given in peers]
    for other in others:
        other.start()
    try:
        return finetune(job, on_step, on_line, stop, progress)
    except RuntimeError as error:
        if lost_peer(error):
            ended = _ended(others)  # after which its error is there
            if not errors.empty():
                raise TrainingError(errors.get()) from error
            raise TrainingError(
                f"{ended}: run again, and training goes on from the last checkpoint"
            ) from error
        raise
    finally:
        for other in others:
            other.join(timeout=10)
            other.kill()


def _ended(others: Sequence[BaseProcess]) -> str:
    for other in others:
        other.join(timeout=10)
    for rank, other in enumerate(others, 1):
        if other.exitcode:
            return f"rank {rank} of {len(others) + 1} ended with exit code {other.exitcode}"
    return "the connection to another rank broke"


def _peer(job: FinetuneJob, errors: "multiprocessing.SimpleQueue[str]") -> None:
    """A rank beside rank 0, which alone is stopped by signals, and which tells the errors of all ranks."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        finetune(job)
    except (QuireError, OSError) as error:
        errors.put(f"rank {job.rank} of {job.world}: {error}")
        sys.exit(1)


def prepare(
    job: FinetuneJob, device: torch.device, on_line: OnLine = lambda _: None, progress: Progress | None = None
) -> Trainer:
    """Everything before the first step."""
    _check_output(job)
    source = open_source(job.model, progress=progress)
    config = describe(source.config)
    check_trainable(config)
    settings = replace(
        job.settings, max_length=_max_length(job.settings, config), qlora=_qlora(job.settings, source)
    )
    items, held_out = _read(job, settings, source, config)
    on_line(
        f"data      {len(items):,} examples to train, {len(held_out):,} held out, {_tokens(items):,} tokens"
    )
    model = _load(job, settings, source, config, device, on_line)
    if settings.qlora and job.settings.qlora is None:
        why = f"QLoRA is on: {source.name} has {source.min_bits:g} bits a weight, and trains as it is"
        on_line(f"qlora     {why}")
        log = RunFiles(job.output).log
        if job.rank == 0 and not log.read():  # a run that goes on has said it
            log.say(why)
    num_parameters = sum(math.prod(loader.shape) for loader in model.model.loaders().values())
    settings = settings.resolved(len(items), num_parameters, device.type != "cpu")
    parameters = LoraParameters(settings.rank, settings.alpha or 1.0, settings.dropout)
    model.adapt(parameters, settings.targets, settings.seed, settings.recompute)
    trained = len(parameters.flat)
    on_line(
        f"adapter   rank {settings.rank}, alpha {settings.alpha:g}, {len(parameters.pairs)} matrices, {trained:,} "
        f"parameters ({100 * trained / num_parameters:.2f} % of {num_parameters:,})"
    )
    adapter = adapter_config(
        source.name if job.model is None or is_builtin(job.model) else job.model, settings, parameters, config
    )
    trainer = Trainer(
        model, settings, items, held_out, job.output, adapter, job.zero_stage, job.rank, job.world
    )
    library = trainer.optimizer.library
    if trainer.optimizer.why_own:
        on_line(f"optimizer {trainer.optimizer.why_own}")
    on_line(
        f"steps     {trainer.num_steps}: {settings.epochs} epochs, {settings.batch_size} examples a step, learning "
        f"rate {settings.learning_rate:g} ({settings.schedule}), {settings.optimizer}{library and f' of {library}'}"
    )
    return trainer


def _check_output(job: FinetuneJob) -> None:
    """With `overwrite` the files of an earlier run are removed, and no others."""
    nearest = next(path for path in (job.output, *job.output.absolute().parents) if path.exists())
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise ConfigError(
            f"--output {job.output}: {nearest} is no folder that can be written: choose another"
        )
    if job.overwrite and job.rank == 0:
        shutil.rmtree(RunFiles(job.output).folder, ignore_errors=True)
        (job.output / WEIGHTS).unlink(missing_ok=True)
    elif (job.output / WEIGHTS).exists():
        raise ConfigError(f"{job.output} holds a finished adapter: give another --output, or --overwrite")


def _device(job: FinetuneJob) -> torch.device:
    device = resolve_device(job.device)
    if device.type != "cuda" or job.world == 1:
        return device
    if job.world > torch.cuda.device_count():
        raise ConfigError(
            f"--ranks {job.world} need a GPU each, and PyTorch sees {torch.cuda.device_count()}: lower it"
        )
    return torch.device("cuda", job.rank)


def _max_length(settings: TrainSettings, config: ModelConfig) -> int:
    if settings.max_length is not None and settings.max_length > config.max_position:
        raise ConfigError(
            f"--max-length {settings.max_length} is more than the model's context of {config.max_position}: lower it"
        )
    return settings.max_length or min(config.max_position, MAX_CONTEXT)


def _qlora(settings: TrainSettings, source: Source) -> bool:
    """ConfigError where the checkpoint has too few bits for the plain LoRA that was asked for."""
    has_few = source.min_bits < QLORA_BITS
    if has_few and settings.qlora is False:
        raise ConfigError(
            f"{source.name} has {source.min_bits:g} bits a weight, and plain LoRA needs {QLORA_BITS} or more: use "
            "--qlora (qlora: true), or give a full-precision checkpoint as --model"
        )
    return has_few if settings.qlora is None else settings.qlora


def _read(
    job: FinetuneJob, settings: TrainSettings, source: Source, config: ModelConfig
) -> tuple[list[Item], list[Item]]:
    """Training and held-out items; the split is every n-th line, the same in every run."""
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise TrainingError(f"{source.name} has no tokenizer: give a model with tokenizer.json")
    template = cache(lambda: load_template(source))
    assert settings.max_length is not None
    ends = _end_tokens(tokenizer, config)
    reader = ExampleReader(tokenizer, template, settings.max_length, ends, settings.method)
    items = reader.read(job.data)
    if job.validation is not None:
        return items, reader.read(job.validation)
    count = round(settings.validation_split * len(items))
    if not count:
        return items, []
    every = len(items) // count
    held_out = items[every - 1 :: every]
    return [item for at, item in enumerate(items) if (at + 1) % every], held_out


def _end_tokens(tokenizer: Tokenizer, config: ModelConfig) -> tuple[int, ...]:
    """The tokenizer's own first: chat templates end answers with it."""
    own = tokenizer.eos_token_id
    return tuple(dict.fromkeys([*([] if own is None else [own]), *config.eos_token_ids]))


def _tokens(items: list[Item]) -> int:
    return sum(len(example.token_ids) for item in items for example in item)


def _load(
    job: FinetuneJob, settings: TrainSettings, source: Source, config: ModelConfig,
    device: torch.device, on_line: OnLine,
) -> TrainedModel:  # fmt: skip
    usual = "float32" if device.type == "cpu" else "bfloat16"
    dtype = getattr(torch, usual if job.dtype == "auto" else job.dtype, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"--dtype {job.dtype} cannot be trained: choose float32, bfloat16 or float16")
    store: Store = store_nf4 if settings.qlora else keep
    store_table: Store = store_int8 if settings.qlora and device.type == "cuda" else keep
    if job.zero_stage == 3 and job.world > 1:
        if settings.qlora:
            raise ConfigError(
                "ZeRO stage 3 divides a base in full precision, and this one is in 4 bits (--qlora): choose "
                "--zero-stage 2, or a full-precision checkpoint without --qlora"
            )
        store = store_table = partial(ShardedWeight, rank=job.rank, world=job.world)
    number_format = FrozenFormat(dtype, device, store, store_table, keeps_encoded=bool(settings.qlora))
    assert settings.max_length is not None
    model = TrainedModel(config, number_format, device, settings.max_length)
    model.load(source)
    schemes = ", ".join(sorted({matrix.scheme for matrix in number_format.matrices if matrix.scheme}))
    if settings.qlora:
        how = f"the checkpoint's {schemes}" if schemes else "NF4, double quantization"
    else:
        how = str(dtype).removeprefix("torch.") + (f", decoded from {schemes}" if schemes else "")
    on_line(
        f"base      {source.name}: {model.base_bytes / 1e6:,.0f} MB of frozen weights in {how}, on {device}"
    )
    return model


def adapter_config(
    base: str, settings: TrainSettings, parameters: LoraParameters, config: ModelConfig
) -> dict[str, Any]:
    """PEFT's adapter_config.json."""
    modules = [pair.site.name for pair in parameters.pairs.values()]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": config.architecture == "GPT2LMHeadModel",
        "inference_mode": True,
    }

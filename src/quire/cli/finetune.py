"""`quire finetune DATA.jsonl`: trains a LoRA adapter of a model, with progress, and goes on where a run was stopped."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from quire.bench.table import in_seconds
from quire.cli.parser import Collect, Parser
from quire.cli.terminal import dim, interruptible
from quire.core.errors import QuireError
from quire.llm.progress import load_progress
from quire.train.finetune import FinetuneJob, finetune_ranks
from quire.train.run_files import RunFiles
from quire.train.settings import AUTO, BITS, FAILED, FINISHED, METHODS, SCHEDULES, TrainSettings
from quire.train.trainer import TrainedStep
from quire.train.zero import STAGES

INTERRUPTED = 130
_DEFAULTS = TrainSettings()


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "data", metavar="DATA.jsonl", help="examples: messages, or prompt and completion, in each line"
    )
    parser.add_config_flag()
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id (default: the built-in model)")
    parser.add_argument("--name", default="mine", help="the adapter's name (default: mine)")
    parser.add_argument("--output", "-o", metavar="FOLDER", help="the adapter's folder (default: NAME)")
    parser.add_argument("--overwrite", action="store_true", help="begin again where the folder holds a run")
    parser.add_argument(
        "--validation", metavar="FILE", help="held-out examples (default: a part of the data)"
    )
    group = parser.group("training", "auto: by the model and the data")
    for name, kind, text in (
        ("method", METHODS, "supervised, or dpo: preferred and other answers"),
        ("epochs", int, "passes over the data (default: auto)"),
        ("batch_size", int, "examples of a step (default: auto)"),
        (
            "batch_tokens",
            int,
            "tokens computed at a time; a step sums gradients over several (default: auto)",
        ),
        ("learning_rate", float, "highest rate (default: auto)"),
        ("learning_rate_multiplier", float, "of the automatic rate (default: 1)"),
        ("schedule", SCHEDULES, "of the rate after the warm-up (default: cosine)"),
        ("warmup", float, f"share of the steps in which the rate rises (default: {_DEFAULTS.warmup})"),
        ("clip", float, f"largest norm of a gradient (default: {_DEFAULTS.clip}; 0: none)"),
        ("weight_decay", float, "of AdamW (default: 0)"),
        ("optimizer", tuple(BITS), "AdamW with states in 32 or 8 bits (default: adamw)"),
        ("max_length", int, "tokens of an example at most (default: the context, at most 4096)"),
        (
            "validation_split",
            float,
            f"share of the data that is held out (default: {_DEFAULTS.validation_split})",
        ),
        ("beta", float, f"of dpo (default: {_DEFAULTS.beta})"),
        ("seed", int, "the same seed gives the same adapter (default: 0)"),
        ("checkpoint_steps", int, "steps between checkpoints (default: ten in all)"),
        ("keep_checkpoints", int, f"newest ones that stay (default: {_DEFAULTS.keep_checkpoints})"),
    ):
        if isinstance(kind, tuple):
            group.add_argument(f"--{name.replace('_', '-')}", choices=kind, help=text)
        else:
            group.add_argument(f"--{name.replace('_', '-')}", type=_or_auto(kind), metavar="N", help=text)
    group = parser.group("adapter")
    group.add_argument("--rank", "-r", type=int, help=f"of every matrix (default: {_DEFAULTS.rank})")
    group.add_argument(
        "--alpha", type=_or_auto(float), metavar="X", help="scale times rank (default: twice the rank)"
    )
    group.add_argument("--dropout", type=float, help="of the adapter's inputs (default: 0)")
    modules = "linear layers to adapt, such as q_proj v_proj (default: all-linear)"
    group.add_argument(
        "--target-modules", dest="targets", action=Collect, nargs="+", metavar="NAME", help=modules
    )
    group = parser.group("memory")
    text = "the base in 4 bits: NF4, or its own blocks (default: where the checkpoint has fewer than 8 bits)"
    group.add_argument("--qlora", action=argparse.BooleanOptionalAction, help=text)
    text = "keep only the inputs of layers for the backward pass"
    group.add_argument(
        "--gradient-checkpointing", dest="recompute", action="store_true", default=None, help=text
    )
    text = "optimizer states in host memory (by itself where a GPU is full)"
    group.add_argument("--offload-optimizer", dest="paged", action="store_true", default=None, help=text)
    group = parser.group("device")
    group.add_argument("--device", default=AUTO, help="cpu or cuda (default: auto)")
    group.add_argument("--dtype", default=AUTO, help="of the base (default: float32 on a CPU, else bfloat16)")
    group.add_argument("--num-threads", type=int, help="compute threads (default: all cores)")
    group.add_argument("--nice", type=int, default=0, help="lower the priority by 1 to 19 (default: 0)")
    group.add_argument(
        "--ranks", type=int, default=1, help="processes that divide each step's batches (default: 1)"
    )
    text = (
        "with --ranks, what is divided: 1 optimizer states, 2 also gradients, 3 also parameters (default: 1)"
    )
    group.add_argument("--zero-stage", type=int, choices=STAGES, default=1, help=text)


def run(arguments: argparse.Namespace) -> int:
    job = FinetuneJob(
        data=Path(arguments.data).expanduser(),
        output=Path(arguments.output or arguments.name).expanduser(),
        model=arguments.model,
        validation=None if arguments.validation is None else Path(arguments.validation).expanduser(),
        settings=_settings(arguments),
        device=arguments.device,
        dtype=arguments.dtype,
        num_threads=arguments.num_threads,
        overwrite=arguments.overwrite,
        zero_stage=arguments.zero_stage,
        world=arguments.ranks,
    )
    shown = ProgressLines()
    files = RunFiles(job.output)
    if arguments.nice:
        _lower_priority(arguments.nice)
    live = sys.stderr.isatty()
    with interruptible() as interrupted, _terminable() as ended, load_progress(live) as progress:
        try:
            result = finetune_ranks(job, shown, shown.line, lambda: interrupted() or ended(), progress)
        except (QuireError, OSError) as error:
            with suppress(OSError):
                files.ended(FAILED, str(error))
            raise
    files.ended(result)
    if result != FINISHED:
        shown.line(f"stopped: the same command goes on from the last step (see {job.output / 'training'})")
        return INTERRUPTED
    shown.line(f"adapter   {job.output}")
    model = f" {arguments.model}" if arguments.model else ""
    shown.line(f"serve     quire serve{model} --lora-modules {arguments.name}={job.output}")
    return 0


class ProgressLines:
    """Lines on stderr, and one that is written over on a terminal."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._seconds: list[float] = []

    def line(self, text: str) -> None:
        print(dim(text, sys.stderr), file=sys.stderr, flush=True)

    def __call__(self, report: TrainedStep) -> None:
        self._seconds = [*self._seconds[-19:], report.seconds]
        left = (report.num_steps - report.step) * sum(self._seconds) / len(self._seconds)
        text = f"step {report.step}/{report.num_steps}  loss {report.loss:.4f}"
        if report.validation_loss is not None:
            text += f"  validation {report.validation_loss:.4f}"
        if report.accuracy is not None:
            text += f"  ranked right {report.accuracy:.2f}"
        text += f"  {report.num_tokens / report.seconds:,.0f} tokens/s  {_minutes(left)} left"
        ends = not self._is_live or report.validation_loss is not None or report.step == report.num_steps
        print(
            f"\r\x1b[K{text}" if self._is_live else text,
            end="\n" if ends else "",
            file=sys.stderr,
            flush=True,
        )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 90 else in_seconds(seconds)


def _or_auto(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return AUTO if text == AUTO else kind(text)

    convert.__name__ = kind.__name__
    return convert


def _lower_priority(steps: int) -> None:
    """Also of the session, if it is this process's own: Linux divides cores among sessions before it looks at the nice
    values of processes."""
    os.nice(steps)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without such groups
            Path("/proc/self/autogroup").write_text(str(steps))


def _settings(arguments: argparse.Namespace) -> TrainSettings:
    given = {field.name: getattr(arguments, field.name, None) for field in fields(TrainSettings)}
    if given["targets"] is not None:
        given["targets"] = tuple(given["targets"])
    return TrainSettings.of(**given)


@contextmanager
def _terminable() -> Iterator[Callable[[], bool]]:
    """Within, SIGTERM only sets a flag, which the yielded function reads: a run ends after its step."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGTERM, before)

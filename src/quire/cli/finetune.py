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
from quire.cli.flags import add_setting, kind_of
from quire.cli.parser import Parser
from quire.cli.terminal import INTERRUPTED, dim, interruptible
from quire.core.config import at_least
from quire.core.errors import ConfigError, QuireError
from quire.llm.progress import load_progress
from quire.observe.host import memory_left, numbers_in
from quire.train.finetune import FinetuneJob, finetune_ranks
from quire.train.run_files import RunFiles
from quire.train.settings import AUTO, FAILED, FINISHED, METHODS, TrainSettings
from quire.train.trainer import TrainedStep
from quire.train.zero import STAGES
from quire.weights.builtin import is_builtin

SETTINGS = {field.name: field for field in fields(TrainSettings)}
OOM_SCORE = Path("/proc/self/oom_score_adj")
LOWEST_PRIORITY = 19
SPARE_SHARE = 0.05  # of memory: others may take so much during one step
MAX_SPARE = 4 << 30  # bytes: 5 % of a large machine is more than others take


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "data", metavar="DATA.jsonl", help="examples: messages, or prompt and completion, in each line"
    )
    parser.add_config_flag()
    parser.add_argument("--model", help="a folder, a .gguf file or a hub id (default: the built-in model)")
    parser.add_argument("--name", default="mine", help="the adapter's name (default: mine)")
    parser.add_argument("--output", "-o", metavar="FOLDER", help="the adapter's folder (default: NAME)")
    parser.add_argument("--overwrite", action="store_true", help="start over if the folder holds a run")
    parser.add_argument(
        "--validation", metavar="FILE", help="held-out examples (default: a part of the data)"
    )
    group = parser.group("training", "auto: chosen for the model and the data")
    meaning = "supervised, or dpo on pairs of answers (default: supervised)"
    group.add_argument("--method", choices=METHODS, help=meaning)
    names = list(SETTINGS)
    for name in names[names.index("epochs") : names.index("rank")]:
        field = SETTINGS[name]
        has_choices = "choices" in field.metadata["flag"]
        add_setting(
            group, field, **({} if has_choices else {"type": _or_auto(kind_of(field)), "metavar": "N"})
        )
    group = parser.group("adapter")
    add_setting(group, SETTINGS["rank"])
    add_setting(group, SETTINGS["alpha"], type=_or_auto(float))
    add_setting(group, SETTINGS["dropout"])
    add_setting(group, SETTINGS["targets"])
    group = parser.group("memory")
    for name in ("qlora", "recompute", "paged"):
        add_setting(group, SETTINGS[name])
    group = parser.group("device")
    group.add_argument("--device", default=AUTO, help="cpu or cuda (default: auto)")
    group.add_argument("--dtype", default=AUTO, help="base's type (default: float32 on a CPU, else bfloat16)")
    group.add_argument("--num-threads", type=int, help="compute threads (default: all cores)")
    text = "lower the priority by 1 to 19, and end with a checkpoint when memory is short (default: 0)"
    group.add_argument("--nice", type=int, default=0, help=text)
    group.add_argument(
        "--ranks", type=int, default=1, help="processes that divide each step's batches (default: 1)"
    )
    text = (
        "with --ranks, what is divided: 1 optimizer states, 2 also gradients, 3 also parameters (default: 1)"
    )
    group.add_argument("--zero-stage", type=int, choices=STAGES, default=1, help=text)


def run(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.nice <= LOWEST_PRIORITY:
        raise ConfigError(f"--nice {arguments.nice} cannot work: give 0 to {LOWEST_PRIORITY}")
    at_least("--num-threads", arguments.num_threads, 1)
    at_least("--ranks", arguments.ranks, 1)
    job = FinetuneJob(
        data=Path(arguments.data).expanduser(),
        output=Path(arguments.output or arguments.name).expanduser(),
        model=None if is_builtin(arguments.model) else arguments.model,
        validation=None if arguments.validation is None else Path(arguments.validation).expanduser(),
        settings=_settings(arguments),
        device=arguments.device,
        dtype=arguments.dtype,
        num_threads=arguments.num_threads,
        overwrite=arguments.overwrite,
        zero_stage=arguments.zero_stage,
        world=arguments.ranks,
    )
    shown, memory = ProgressLines(), MemoryWatch(arguments.nice > 0)
    files = RunFiles(job.output)
    if arguments.nice:
        _lower_priority(arguments.nice)
    live = sys.stderr.isatty()
    with interruptible() as interrupted, _terminable() as ended, load_progress(live) as progress:
        try:
            stops = (interrupted, ended, memory.is_short)
            result = finetune_ranks(job, shown, shown.line, lambda: any(stop() for stop in stops), progress)
        except (QuireError, OSError) as error:
            with suppress(OSError):
                files.ended(FAILED, str(error))
            raise
    files.ended(result, memory.reason, memory.needed)
    if result != FINISHED:
        why = memory.reason or "stopped"
        shown.line(f"{why}: the same command goes on from the last step (see {job.output / 'training'})")
        return INTERRUPTED
    shown.line(f"adapter   {job.output}")
    model = f" {arguments.model}" if arguments.model else ""
    shown.line(f"serve     quire serve{model} --lora-modules {arguments.name}={job.output}")
    return 0


class MemoryWatch:
    """Tells a run that yields when to end, with a checkpoint, and what must be free before it goes on."""

    def __init__(self, yields: bool) -> None:
        self._yields = yields
        self.reason: str | None = None
        self.needed = 0  # bytes: what this process gives back, and room to last for a while

    def is_short(self) -> bool:
        left, total = memory_left() if self._yields else (0, 0)
        spare = min(int(SPARE_SHARE * total), MAX_SPARE)
        if left >= spare:
            return False
        own = numbers_in(Path("/proc/self/status"))
        self.needed = 2 * spare + (own.get("RssAnon", 0) + own.get("VmSwap", 0) << 10)
        self.reason = f"memory is short ({left / 1e9:.1f} of {total / 1e9:.1f} GB left)"
        return True


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
        text = f"\r\x1b[K{text}" if self._is_live else text
        print(text, end="\n" if ends else "", file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 90 else in_seconds(seconds)


def _or_auto(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return AUTO if text == AUTO else kind(text)

    convert.__name__ = kind.__name__
    return convert


def _lower_priority(steps: int) -> None:
    """Also of the session, if it is this process's own: Linux divides cores among sessions before it looks at the nice
    values of processes. Where memory runs out, the kernel ends this process first."""
    os.nice(steps)
    with suppress(OSError):  # not Linux
        OOM_SCORE.write_text("1000")
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without such groups
            Path("/proc/self/autogroup").write_text(str(steps))


def _settings(arguments: argparse.Namespace) -> TrainSettings:
    given = {name: getattr(arguments, name, None) for name in SETTINGS}
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

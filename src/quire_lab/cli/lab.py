"""`quire bench lab NAME|all|list`: runs an experiment and writes its table, its pictures and its record."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from quire.bench.table import aligned, in_seconds
from quire.cli.flags import engine_settings
from quire.cli.parser import Parser
from quire.cli.start import announce_compiling
from quire.core.errors import ConfigError
from quire_lab.experiments.registry import EXPERIMENTS, find
from quire_lab.report.data import USUAL_FOLDERS, DataFolder
from quire_lab.report.experiment import Bar, Setup, Size
from quire_lab.report.figure import check_matplotlib
from quire_lab.report.files import (
    Done,
    Failed,
    as_text,
    load_average,
    make_folder,
    write_finding,
    write_text,
)
from quire_lab.report.page import as_page

OUTPUT_DIR = "quire-lab"
PAGE = "report.html"
FAULT = 1


def add_lab(parser: Parser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="an experiment; `all` for one HTML report; `list` shows them"
    )
    parser.add_argument(
        "--output-dir", default=OUTPUT_DIR, metavar="DIR", help=f"where files go (default: {OUTPUT_DIR})"
    )
    parser.add_argument(
        "--size",
        choices=[size.value for size in Size],
        default=Size.NORMAL.value,
        help="how much is measured: seconds, a minute or many minutes for each experiment (default: normal)",
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="lengths and traces of real requests "
        f"(default: the first of {', '.join(USUAL_FOLDERS)} that has them; else synthetic ones are drawn)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="for repeated timed comparisons, all experiments together (default: by --size, 2, 60 or 600 for each)",
    )
    parser.add_argument(
        "--precision",
        type=float,
        default=0.05,
        metavar="X",
        help="relative half width of a ratio's 95 %% interval at which repeating ends early (default: 0.05)",
    )
    parser.add_argument(
        "--price-per-hour", type=float, default=0.1, metavar="X", help="of this machine, in $ (default: 0.10)"
    )
    parser.add_argument(
        "--contexts",
        type=int,
        metavar="N",
        help="texts that `precision` measures quality on (default: by --size, 1, 8 or 50)",
    )
    parser.add_argument(
        "--formats", metavar="A,B", help="number formats that `precision` compares (default: all of them)"
    )


def lab(arguments: argparse.Namespace) -> int:
    if arguments.name == "list":
        print(aligned([[name, listed.about] for name, listed in EXPERIMENTS.items()]))
        return 0
    if arguments.price_per_hour <= 0:
        raise ConfigError(f"--price-per-hour is {arguments.price_per_hour:g}: give more than 0")
    if arguments.time_limit is not None and not arguments.time_limit > 0:
        raise ConfigError(f"--time-limit is {arguments.time_limit:g}: give more than 0 seconds")
    if not 0 < arguments.precision < 1:
        raise ConfigError(
            f"--precision is {arguments.precision:g}: give a number between 0 and 1, such as 0.05"
        )
    if arguments.contexts is not None and arguments.contexts < 1:
        raise ConfigError(f"--contexts is {arguments.contexts}: give 1 or more")
    if arguments.name != "all":
        find(arguments.name)  # a name that is not known is said before anything is made
    check_matplotlib()
    setup = _setup(arguments)
    folder = make_folder(arguments.output_dir)
    announce_compiling()
    if arguments.name == "all":
        return _all(setup, folder, _command(arguments))
    done = _one(arguments.name, setup, folder)
    _write_page([done], [], [], folder / f"{arguments.name}.html", _command(arguments))
    print(as_text(done))
    _say(f"files are in {arguments.output_dir}: {', '.join(_files(done))}, {arguments.name}.html")
    return 0


def _setup(arguments: argparse.Namespace) -> Setup:
    settings = engine_settings(arguments)
    return Setup(
        size=Size(arguments.size),
        seed=settings.pop("seed", None) or 0,
        engine=settings,
        data=DataFolder.at(arguments.data_dir),
        progress=_progress,
        price_per_hour=arguments.price_per_hour,
        time_limit=arguments.time_limit,
        precision=arguments.precision,
        contexts=arguments.contexts,
        formats=tuple(arguments.formats.split(",")) if arguments.formats else (),
    )


def _all(setup: Setup, folder: Path, command: str) -> int:
    """One that fails is named and costs the others nothing; the page is there after the first."""
    done: list[Done] = []
    failed: list[Failed] = []
    names = list(EXPERIMENTS)
    started = time.monotonic()
    for index, name in enumerate(names):
        _say(f"{name} ({index + 1} of {len(names)}): {EXPERIMENTS[name].about}")
        try:
            left = _time_left(setup, time.monotonic() - started, len(names) - index)
            done.append(_one(name, left, folder))
            _say(f"  {in_seconds(done[-1].seconds)}: {done[-1].finding.take_away}")
        except Exception as error:  # any failure: the other experiments still run
            if os.environ.get("QUIRE_LOG_LEVEL", "").lower() == "debug":
                traceback.print_exc()
            failed.append(Failed(name, " ".join(f"{type(error).__name__}: {error}".split())))
            _say(f"  did not run: {failed[-1].reason}")
        _write_page(done, failed, names[index + 1 :], folder / PAGE, command)
    print(f"{folder / PAGE}: {len(done)} experiments" + (f", {len(failed)} did not run" if failed else ""))
    return FAULT if failed else 0


def _time_left(setup: Setup, seconds: float, num_left: int) -> Setup:
    """With this experiment's share of what remains of the time limit."""
    if setup.time_limit is None:
        return setup
    return replace(setup, time_limit=max(0.0, setup.time_limit - seconds) / num_left)


def _one(name: str, setup: Setup, folder: Path) -> Done:
    experiment = find(name)
    load, started = load_average(), time.perf_counter()
    finding = experiment.run(setup)
    return write_finding(experiment, finding, time.perf_counter() - started, folder, load)


def _write_page(done: list[Done], failed: list[Failed], to_come: list[str], path: Path, command: str) -> None:
    write_text(path, as_page(done, failed, to_come, command))


def _command(arguments: argparse.Namespace) -> str:
    """As it can be given again, without where things lie here."""
    limit = "" if arguments.time_limit is None else f" --time-limit {arguments.time_limit:g}"
    return (
        f"quire bench lab {arguments.name} --size {arguments.size}{limit} --precision {arguments.precision:g} "
        f"--price-per-hour {arguments.price_per_hour:g}"
    )


def _files(done: Done) -> list[str]:
    return [
        *(path.name for path in done.pictures),
        f"{done.experiment.name}.json",
        f"{done.experiment.name}.txt",
    ]


class _TqdmBar:
    def __init__(self, bar: tqdm) -> None:
        self._bar = bar

    def __call__(self, count: int = 1) -> None:
        self._bar.update(count)

    def note(self, what: str) -> None:
        self._bar.set_postfix_str(what)


@contextmanager
def _progress(total: int, unit: str) -> Iterator[Bar]:
    with tqdm(total=total, disable=not sys.stderr.isatty(), unit=unit, leave=False) as bar:
        yield _TqdmBar(bar)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

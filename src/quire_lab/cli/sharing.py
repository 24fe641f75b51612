"""`quire bench sharing`: blocks saved by sharing, and what beams cost with and without it."""

import argparse
import sys
from dataclasses import asdict

from tqdm import tqdm

from quire.bench.report import BenchReport
from quire.bench.serve_report import check_plotting
from quire.bench.workload import from_csv, named
from quire.cli.flags import engine_settings
from quire.cli.parser import Parser
from quire.cli.start import announce_compiling
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build import build
from quire.text.load import load_tokenizer
from quire_lab.measure.sharing import (
    METHODS,
    TEXTS,
    WIDTHS,
    BeamRate,
    Saving,
    SharingWorkload,
    measure_rates,
    measure_saving,
)
from quire_lab.report.sharing import plot_sharing, sharing_report

NAMES = ("alpaca", "sharegpt")
# the model's pool: so small that memory limits beams, the more so the less they share
POOL_TOKENS = 1536


def add_sharing(parser: Parser) -> None:
    for name in NAMES:
        parser.add_argument(
            f"--{name}-csv",
            metavar="FILE",
            help=f"lengths of {name} requests (default: drawn, with the means that the paper gives)",
        )
    parser.add_argument(
        "--num-prompts", type=int, default=400, metavar="N", help="requests of each kind (default: 400)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the savings beside the paper's ranges (PNG)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        metavar="N",
        help="of beam search on the model, with and without sharing in turn; 0: no model (default: 6, "
        "the fewest that give an interval)",
    )


def sharing(arguments: argparse.Namespace) -> BenchReport:
    if arguments.num_prompts < 1 or arguments.rounds < 0:
        raise ConfigError("--num-prompts must be at least 1 and --rounds at least 0")
    if arguments.plot is not None:
        check_plotting(arguments.plot)
    seed = arguments.seed or 0
    workloads = [_workload(name, arguments, seed) for name in NAMES]
    savings = _savings(workloads, seed)
    rates = _rates(arguments) if arguments.rounds else []
    if arguments.plot is not None:
        plot_sharing(savings, arguments.plot)
    settings = {"seed": seed, "num_prompts": arguments.num_prompts, "rounds": arguments.rounds}
    if rates:
        settings["asked"] = asdict(_config(arguments, share=True))
    return sharing_report(workloads, savings, rates, settings)


def _workload(name: str, arguments: argparse.Namespace, seed: int) -> SharingWorkload:
    path = getattr(arguments, f"{name}_csv")
    if path is None:
        return SharingWorkload(name, "drawn", named(name, arguments.num_prompts, seed))
    return SharingWorkload(name, path.rsplit("/", 1)[-1], from_csv(path, arguments.num_prompts, seed))


def _savings(workloads: list[SharingWorkload], seed: int) -> list[Saving]:
    total = sum(len(one.lengths) for one in workloads) * len(METHODS) * len(WIDTHS)
    with tqdm(total=total, disable=not sys.stderr.isatty(), unit="req", leave=False) as bar:
        return [
            measure_saving(workload, method, width, seed, lambda: bar.update(1) and None)
            for workload in workloads
            for method in METHODS
            for width in WIDTHS
        ]


def _config(arguments: argparse.Namespace, share: bool) -> EngineConfig:
    settings = {**engine_settings(arguments), "share": share, "enable_prefix_caching": False}
    if not {"num_blocks", "kv_cache_memory_bytes"} & set(settings):
        settings["num_blocks"] = POOL_TOKENS // settings.get("block_size", EngineConfig().memory.block_size)
    return EngineConfig.of(**settings)


def _rates(arguments: argparse.Namespace) -> list[BeamRate]:
    configs = [_config(arguments, share) for share in (True, False)]
    announce_compiling()
    shared, unshared = (build(config) for config in configs)
    try:
        tokenizer = load_tokenizer(shared.source)
        prompts = (
            [tokenizer.encode(text) for text in TEXTS]
            if tokenizer is not None
            else [list(range(10, 30))] * len(TEXTS)
        )
        return measure_rates(
            shared, unshared, prompts * 2, arguments.rounds, lambda line: print(line, file=sys.stderr)
        )
    finally:
        shared.engine.close()
        unshared.engine.close()

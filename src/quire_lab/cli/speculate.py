"""`quire bench speculate`: plain and speculative decoding of the same requests, in turn."""

import argparse
from contextlib import ExitStack
from dataclasses import replace

from quire.bench.report import BenchReport
from quire.cli.bench import built_engine
from quire.cli.parser import Parser
from quire.engine.build import build
from quire.text.template import load_template
from quire_lab.measure.speculate import WORKLOADS, SpeculatePlan, run_speculate


def add_speculate(parser: Parser) -> None:
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        help="measured rounds of each workload (default: 6)",
    )
    parser.add_argument("--num-tokens", type=int, default=128, help="longest answer (default: 128)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="default: all")


def speculate(arguments: argparse.Namespace) -> BenchReport:
    plan = SpeculatePlan(
        arguments.num_tokens, arguments.rounds, tuple(arguments.workloads), arguments.seed or 0
    )
    arguments.speculative_config = arguments.speculative_config or '{"method": "ngram"}'
    with built_engine(arguments) as (config, speculating), ExitStack() as stack:
        plain = build(replace(config, speculative_config=None))
        stack.callback(plain.engine.close)
        drafts, chains = config.speculative_config, None
        if drafts is not None and drafts.tree_width > 1:
            chains = build(replace(config, speculative_config=replace(drafts, tree_width=1)))
            stack.callback(chains.engine.close)
        return run_speculate(config, plain, speculating, load_template(plain.source), plan, chains)

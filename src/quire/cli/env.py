"""`quire env`: versions, hardware and settings for a bug report."""

import argparse
import json
from dataclasses import asdict
from typing import Any

from quire.bench import machine
from quire.bench.table import aligned
from quire.cli.parser import Parser
from quire.core.stats import rows


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    versions, hardware = machine.describe_versions(), machine.this_machine()
    kernels = machine.describe_kernels(compiled_only=True)
    places, environment = machine.describe_places(), machine.describe_environment()
    if arguments.json:
        report = {
            "versions": versions,
            "machine": asdict(hardware),
            "kernels": kernels,
            "places": places,
            "environment": environment,
        }
        print(json.dumps(report, indent=2))
        return 0
    lines = [*versions.items(), *rows(hardware)]
    lines += [("compiler", kernels.get("compiler", "none")), ("kernels", _kernels(kernels))]
    lines += [(f"{name} at", path) for name, path in places.items()]
    print(aligned([*lines, *environment.items()]))
    return 0


def _kernels(kernels: dict[str, Any]) -> str:
    if kernels["forced_reference"]:
        return "reference, forced by QUIRE_KERNELS"
    if not kernels["native"]:
        return f"reference: {kernels['reason']}"
    return f"native, {kernels['isa']} (usable: {', '.join(kernels['usable_isas'])}), {kernels['path']}"

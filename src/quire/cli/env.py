"""`quire env`: versions, hardware and settings for a bug report."""

import argparse
import json
from typing import Any

from quire.bench import machine
from quire.bench.table import aligned, in_bytes
from quire.cli.parser import Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    report = describe()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print(aligned([[name, value] for name, value in _lines(report)]))
    return 0


def describe() -> dict[str, Any]:
    return {
        "versions": machine.describe_versions(),
        "machine": machine.describe_machine(),
        "kernels": machine.describe_kernels(compiled_only=True),
        "places": machine.describe_places(),
        "environment": machine.describe_environment(),
    }


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    versions, hardware, kernels = report["versions"], report["machine"], report["kernels"]
    lines = [(name, version) for name, version in versions.items()]
    lines += [
        ("system", hardware["system"]),
        ("cpu", hardware["cpu"]),
        ("cpu flags", " ".join(hardware["cpu_flags"]) or "none of note"),
        ("cores", f"{hardware['usable_cores']} physical usable, {hardware['logical_cpus']} logical"),
        ("memory", in_bytes(hardware["memory_bytes"])),
    ]
    for gpu in hardware["gpus"] or [None]:
        lines.append(("gpu", "none" if gpu is None else f"{gpu['name']}, {in_bytes(gpu['memory_bytes'])}"))
    lines.append(("compiler", kernels.get("compiler", "none")))
    lines.append(("kernels", _kernels(kernels)))
    lines += [(f"{name} at", path) for name, path in report["places"].items()]
    lines += [(name, value) for name, value in report["environment"].items()]
    return lines


def _kernels(kernels: dict[str, Any]) -> str:
    if kernels["forced_reference"]:
        return "reference, forced by QUIRE_KERNELS"
    if not kernels["native"]:
        return f"reference: {kernels['reason']}"
    return f"native, {kernels['isa']} (usable: {', '.join(kernels['usable_isas'])}), {kernels['path']}"

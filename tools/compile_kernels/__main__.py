"""Whether every Triton kernel that the engine launches compiles for a GPU that is not there, and what it needs of it.

    PYTHONPATH=src python -m tools.compile_kernels [--only WORD] [--each] [--arch 90] [--jobs 2]

Launches are those of real models in real sizes (`models`, `operations`), noted down by Triton itself and compiled with
its own assembler: no GPU is needed. The table has a line per kernel: how many variants, the most registers of a thread,
the most bytes that spill and how many variants do, the most shared memory of a program, and seconds. The exit status is
the number of kernels that do not compile, want more shared memory than the chip has, or that no case launches.
"""

import argparse
import importlib.util
import os
import sys
import time

# A program's shared memory at most, in KiB, by compute capability.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
NOTHING_DONE = 125  # what was asked for is not there


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compile_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="WORD", help="kernels with this in their name")
    parser.add_argument("--each", action="store_true", help="a line for every variant as well")
    parser.add_argument("--arch", type=int, default=90, choices=sorted(SHARED_KIB), help="compute capability")
    parser.add_argument("--jobs", type=int, default=2, help="compilers side by side")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs must be 1 or more")
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed: pip install triton", file=sys.stderr)
        return NOTHING_DONE
    for name in ("TRITON_INTERPRET", "QUIRE_KERNELS"):  # with these there would be nothing to compile
        os.environ.pop(name, None)
    return _compile(options.only, options.each, options.arch, options.jobs)


def _compile(only: str, each: bool, arch: int, jobs: int) -> int:
    # Triton decides as it is imported whether kernels are compiled.
    from tools.compile_kernels.compiling import Compiled, compile_all
    from tools.compile_kernels.models import launch_models
    from tools.compile_kernels.operations import launch_operations
    from tools.compile_kernels.record import launched_kernels, record_all
    from tools.compile_kernels.table import report, summaries, variant_line

    begin = time.perf_counter()
    known = launched_kernels()
    kernels = [name for name in known if only in name]
    if not kernels:
        print(f"no kernel has {only!r} in its name: there are {', '.join(known)}", file=sys.stderr)
        return NOTHING_DONE
    variants = [
        variant
        for variant in record_all(arch, [launch_models, launch_operations])
        if variant.kernel in kernels
    ]
    print(f"{len(variants)} variants of {len(kernels)} kernels for sm_{arch}", flush=True)
    left = {name: sum(variant.kernel == name for variant in variants) for name in kernels}
    limit = SHARED_KIB[arch] * 1024
    done: list[Compiled] = []
    for compiled in compile_all(variants, arch, jobs):
        done.append(compiled)
        if each:
            print(variant_line(compiled), flush=True)
        left[compiled.variant.kernel] -= 1
        if not left[compiled.variant.kernel]:
            print(summaries([compiled.variant.kernel], done, limit)[0].line(), flush=True)
    results = summaries(kernels, done, limit)
    print(f"\n{report(results)}\n")
    failed = sum(bool(summary.faults) for summary in results)
    print(f"{failed} of {len(results)} kernels failed, {time.perf_counter() - begin:.0f} s")
    return min(failed, NOTHING_DONE - 1)


if __name__ == "__main__":
    sys.exit(main())

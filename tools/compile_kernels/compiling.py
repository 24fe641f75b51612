"""Variants, compiled in processes of their own: what each needs of the chip, or what the compiler said against it."""

import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from triton import knobs
from triton.runtime import driver

from tools.compile_kernels.record import AbsentDevice, Variant, resolve

WORDS_KEPT = 2000  # characters of a compiler's complaint
_DIED = "the compiler took its process down without a word: make the case smaller until it speaks"
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a variant."""

    variant: Variant
    error: str = ""  # the compiler's words; empty where it had none
    registers: int = 0  # of a thread
    spill_stores: int = (
        0  # bytes of code that moves what does not fit the registers, as the assembler counts it
    )
    spill_loads: int = 0
    shared: int = 0  # bytes of a program
    seconds: float = 0.0  # of a processor, the assembler's included: others may be at work here


def compile_all(variants: Sequence[Variant], arch: int, jobs: int) -> Iterator[Compiled]:
    """Each as it is done. Nothing that was compiled before is used, so that seconds are true."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        done: set[Variant] = set()
        for compiled in _compile_side_by_side(variants, arch, jobs, folder):
            done.add(compiled.variant)
            yield compiled
        for variant in variants:  # a process that died took others with it: each of those alone
            if variant not in done:
                alone = list(_compile_side_by_side([variant], arch, 1, folder))
                yield alone[0] if alone else Compiled(variant, _DIED)


def _compile_side_by_side(
    variants: Sequence[Variant], arch: int, jobs: int, folder: str
) -> Iterator[Compiled]:
    """Ends early if a compiler takes its process down."""
    context = multiprocessing.get_context("fork")  # kernels are imported already
    with ProcessPoolExecutor(jobs, context, _prepare, (arch, folder)) as pool:
        waiting: set[Future[Compiled]] = {pool.submit(_compile, variant) for variant in variants}
        try:
            while waiting:
                ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ready:
                    yield future.result()
        except BrokenProcessPool:
            return


def _prepare(arch: int, folder: str) -> None:
    knobs.cache.dir = folder
    knobs.nvidia.dump_ptxas_log = True
    driver.set_active(AbsentDevice(arch))


def _compile(variant: Variant) -> Compiled:
    begin = _processor_seconds()
    with _said() as said:
        try:
            kernel = resolve(variant).preload(variant.data)
        except Exception as error:  # compilers have many
            return Compiled(variant, _complaint(error, said()), seconds=_processor_seconds() - begin)
        seconds = _processor_seconds() - begin
        text = said()
    spilled, registers = _SPILLED.search(text), _REGISTERS.search(text)
    if spilled is None or registers is None:
        return Compiled(variant, f"the assembler's report has another form: {text[:WORDS_KEPT]}")
    counts = (int(registers[1]), int(spilled[1]), int(spilled[2]), int(kernel.metadata.shared))
    return Compiled(variant, "", *counts, seconds)


def _processor_seconds() -> float:
    """What this process and those it ended have taken."""
    return sum(os.times()[:4])


def _complaint(error: Exception, said: str) -> str:
    """The error, and before it what was written meanwhile: Triton's passes explain themselves there only."""
    lines = [line for line in said.splitlines() if "error:" in line]
    cause = f"\n{error.__cause__}" if error.__cause__ is not None else ""
    return "\n".join([*lines, f"{type(error).__name__}: {error}{cause}"])[:WORDS_KEPT]


@contextmanager
def _said() -> Iterator:
    """Inside, what this process writes goes to a file; yields what reads it."""
    sys.stdout.flush()
    kept = [os.dup(1), os.dup(2)]
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file, redirect_stdout(file):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

        def read() -> str:
            file.flush()
            return Path(file.name).read_text(encoding="utf-8", errors="replace")

        try:
            yield read
        finally:
            for target, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, target)
                os.close(descriptor)

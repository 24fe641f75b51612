"""What was compiled, as a table with a line per kernel, and the variants that need a look below it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.compile_kernels.compiling import Compiled

KIB = 1024
HEAVY_SPILLS = 64  # bytes from which on a variant is named
MOST_NAMED = 3  # variants of one kernel, the worst


@dataclass(frozen=True, slots=True)
class Summary:
    """All variants of one kernel."""

    kernel: str
    compiled: tuple[Compiled, ...]
    shared_limit: int  # bytes that the chip has for a program

    @property
    def faults(self) -> list[str]:
        """What keeps variants from running, one paragraph each. A kernel without a case is a fault too."""
        if not self.compiled:
            return ["no case launches it: add one to tools/compile_kernels, or remove the kernel"]
        return [f"{_named(variant)}\n{fault}" for variant in self.compiled if (fault := self._fault(variant))]

    @property
    def notes(self) -> list[str]:
        """Variants that run but spill."""
        heavy = [variant for variant in self.compiled if variant.spill_stores >= HEAVY_SPILLS]
        heavy.sort(key=lambda variant: -variant.spill_stores)
        return [
            f"{variant.spill_stores} bytes of spill stores, {variant.spill_loads} of loads: {_named(variant)}"
            for variant in heavy[:MOST_NAMED]
        ]

    def line(self) -> str:
        """As under `HEADING`; the largest of each number, and all seconds."""
        good = [variant for variant in self.compiled if not variant.error]
        worst = [
            max((getattr(variant, name) for variant in good), default=0)
            for name in ("registers", "spill_stores", "shared")
        ]
        spilling = sum(variant.spill_stores > 0 for variant in good)
        seconds = sum(variant.seconds for variant in self.compiled)
        verdict = f"FAILED {len(self.faults)}" if self.faults else "ok"
        return (
            f"{self.kernel:36s} {len(self.compiled):8d} {worst[0]:9d} {worst[1]:7d} {spilling:8d} "
            f"{worst[2] / KIB:10.1f} {seconds:8.1f}  {verdict}"
        )

    def _fault(self, variant: Compiled) -> str:
        if variant.error:
            return variant.error
        if variant.shared > self.shared_limit:
            return (
                f"wants {variant.shared / KIB:.0f} KiB of shared memory, and a program has "
                f"{self.shared_limit // KIB}: fewer stages or smaller tiles"
            )
        return ""


HEADING = (
    f"{'kernel':36s} {'variants':>8s} {'registers':>9s} {'spilled':>7s} {'spilling':>8s} "
    f"{'shared KiB':>10s} {'seconds':>8s}"
)


def summaries(kernels: Iterable[str], compiled: Sequence[Compiled], shared_limit: int) -> list[Summary]:
    """One for each kernel, whether anything of it was compiled or not."""
    return [
        Summary(kernel, tuple(result for result in compiled if result.variant.kernel == kernel), shared_limit)
        for kernel in kernels
    ]


def report(results: Sequence[Summary]) -> str:
    """The table, then what spills, then what fails."""
    lines = [HEADING, *(summary.line() for summary in results)]
    notes = [(summary.kernel, note) for summary in results for note in summary.notes]
    if notes:
        lines += ["", f"Spills of {HEAVY_SPILLS} bytes and more:"]
        lines += [f"  {kernel}: {note}" for kernel, note in notes]
    for summary in results:
        for fault in summary.faults[:MOST_NAMED]:
            lines += ["", f"FAILED {summary.kernel}: {fault}"]
        if len(summary.faults) > MOST_NAMED:
            lines.append(f"… and {len(summary.faults) - MOST_NAMED} more of {summary.kernel}")
    return "\n".join(lines)


def variant_line(compiled: Compiled) -> str:
    """One variant in the columns of the table."""
    spills, shared = f"{compiled.spill_stores:7d} {'':8s}", f"{compiled.shared / KIB:10.1f}"
    numbers = f"{compiled.registers:9d} {spills} {shared} {compiled.seconds:8.1f}"
    return f"{compiled.variant.kernel:36s} {'':8s} {numbers}  {'FAILED ' if compiled.error else ''}{_named(compiled)}"


def _named(compiled: Compiled) -> str:
    return f"{compiled.variant.case} ({compiled.variant.words})"

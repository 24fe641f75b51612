"""`python -m quire.kernels.build` compiles the native kernels ahead of use and says what it does."""

import sys
import time

from quire.kernels.compile import BuildError, compiler, ensure_built, library_path


def main() -> int:
    """Compiles ahead of use and says what was done."""
    try:
        path = library_path()
        if path.exists():
            print(f"native kernels are up to date: {path}")
            return 0
        print(f"compiling native kernels with {compiler()} ...", flush=True)
        start = time.perf_counter()
        ensure_built()
        print(f"compiled in {time.perf_counter() - start:.1f} s: {path}")
    except BuildError as failure:
        print(f"native kernels not built, the torch reference will serve: {failure}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

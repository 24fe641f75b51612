"""Progress bars for loading; lower rooms only call back with numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

Progress = Callable[[str, int, int], None]  # (what, done, total)


@contextmanager
def load_progress(enabled: bool) -> Iterator[Progress | None]:
    """A callback that draws one bar per stage. Nothing is drawn for a stage that is over at once."""
    if not enabled:
        yield None
        return
    bars: dict[str, tqdm] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in bars:
            bars[what] = tqdm(total=total, desc=what, leave=False, delay=0.3)
        bars[what].update(done - bars[what].n)

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()

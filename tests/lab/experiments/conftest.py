"""The laboratory at its quickest size, on a model so small that it starts at once."""

from contextlib import contextmanager

import pytest

from quire_lab.report.data import DataFolder
from quire_lab.report.experiment import Setup, Size
from tests.cli.conftest import write_model


class Counted:
    """A bar that only counts."""

    def __init__(self):
        self.total, self.done, self.notes = 0, 0, []

    def __call__(self, count=1):
        self.done += count

    def note(self, what):
        self.notes.append(what)

    @contextmanager
    def opened(self, total, unit):
        self.total += total
        yield self


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> Setup:
    """Without a data folder: stand-ins. Too little time for most comparisons, so that claims are not resolved."""
    model = write_model(tmp_path_factory.mktemp("lab") / "tiny", max_position_embeddings=256)
    engine = {"model": str(model), "load_format": "dummy", "device": "cpu"}
    return Setup(Size.QUICK, 0, engine, DataFolder(None), Counted().opened, 1.0, time_limit=0.5)

"""What all tests share: markers and their order, thread limits, the shared folder, an empty cache."""

import logging
import os
import random
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before anything loads torch: many threads on tiny tensors only get in each other's way. And no network.
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Without a GPU, kernels in Triton run in its interpreter. It reads this as it is imported, and others import it too.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Timing on a shared machine says nothing about a test, and a run must give the same answer twice: new examples are
# looked for with --run-slow.
UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("quick", derandomize=True, **UNTIMED)
hypothesis.settings.register_profile("slow", max_examples=1000, **UNTIMED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("slow" if config.getoption("--run-slow") else "quick")
    # The package keeps its lines to its own handler; caplog listens at the root.
    from quire.observe import logs

    logging.getLogger(logs.get_logger("tests").name.partition(".")[0]).propagate = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything under tests/e2e is marked e2e and runs last; slow tests wait for --run-slow."""
    skip = pytest.mark.skip(reason="slow: run with --run-slow")
    for item in items:
        if (ROOT / "tests" / "e2e") in item.path.parents:
            item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("slow") and not config.getoption("--run-slow"):
            item.add_marker(skip)
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)


def shared_path() -> Path | None:
    """The folder of shared test data: $QUIRE_SHARED, or `shared` beside the checkout; None without it."""
    named = os.environ.get("QUIRE_SHARED")
    path = Path(named) if named else ROOT.parent / "shared"
    return path if path.is_dir() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared test data; the test is skipped where there is none."""
    path = shared_path()
    if path is None:
        pytest.skip("no shared data: set QUIRE_SHARED, or put the folder `shared` beside the checkout")
    return path


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test draws the same numbers whichever ran before it."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


@pytest.fixture(scope="session")
def run_slow(pytestconfig: pytest.Config) -> bool:
    """Whether every case must run, also where a few show the same."""
    return bool(pytestconfig.getoption("--run-slow"))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty QUIRE_CACHE for this test alone; other tests use the real one, and the model in it."""
    path = tmp_path / "cache"
    path.mkdir()
    monkeypatch.setenv("QUIRE_CACHE", str(path))
    return path


@pytest.fixture
def ordered_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter sums a dot's terms in one order, as a GPU does.

    It calls numpy, whose BLAS orders them by a row's place in the matrix on some CPUs (OpenBLAS's kernels for Zen).
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    numpy = pytest.importorskip("numpy")

    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        total = numpy.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for k in range(a.shape[-1]):
            total += a[..., :, k, None].astype(dtype) * b[..., k, None, :].astype(dtype)
        return total

    monkeypatch.setattr(interpreter, "np", _Changed(numpy, matmul=matmul))


class _Changed:
    """A module with some of its names changed."""

    def __init__(self, module: Any, **changed: Any) -> None:
        self.__dict__.update(changed)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

"""The offload settings: what they mean on a CPU and on a GPU, and what is said at start."""

from pathlib import Path

import pytest
import torch

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine.build.resolve import Precision
from quire.engine.build.weights import offload_lines, resolve_offload
from quire.layers.streaming import Ring
from quire.models.offload import Streaming
from quire.quant.full import FullPrecision


def numbers(device: str) -> Precision:
    chosen = torch.device(device)
    return Precision(chosen, FullPrecision(torch.float32, torch.device("cpu")), "float32")


def test_nothing_is_offloaded_unless_asked_for() -> None:
    for device in ("cpu", "cuda"):
        assert resolve_offload(EngineConfig(), numbers(device)) is None
        assert offload_lines(EngineConfig(), numbers(device), None) == ()


def test_on_a_cpu_cpu_offload_gb_changes_nothing_and_says_so() -> None:
    config = EngineConfig.of(cpu_offload_gb=4)
    assert resolve_offload(config, numbers("cpu")) is None
    (line,) = offload_lines(config, numbers("cpu"), None)
    assert "cpu_offload_gb changes nothing" in line
    assert "weights_memory_gb" in line


def test_bytes_and_folder_are_as_asked_for(empty_cache: Path, tmp_path: Path) -> None:
    found = resolve_offload(EngineConfig.of(cpu_offload_gb=1.5), numbers("cuda"))
    assert found is not None
    assert (found.device_bytes, found.memory_bytes) == (3 << 29, None)
    found = resolve_offload(EngineConfig.of(cpu_offload_gb=1, weights_memory_gb=0.5), numbers("cpu"))
    assert found is not None
    assert (found.device_bytes, found.memory_bytes) == (0, 1 << 29)
    assert found.folder == empty_cache / "offloaded"
    config = EngineConfig.of(weights_memory_gb=0.5, weights_offload_dir=str(tmp_path))
    found = resolve_offload(config, numbers("cpu"))
    assert found is not None
    assert found.folder == tmp_path


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        ("cpu", {"weights_offload_dir": "x"}, "weights_memory_gb: set that too"),
        ("cuda", {"cpu_offload_gb": 1, "weights_offload_dir": "x"}, "weights_memory_gb: set that too"),
        ("cuda", {"weights_memory_gb": 1}, "cpu_offload_gb takes off the GPU"),
        ("cpu", {"cpu_offload_gb": -1}, "cpu_offload_gb=-1 must be a number of at least 0"),
        ("cpu", {"cpu_offload_gb": float("nan")}, "at least 0"),
        ("cpu", {"weights_memory_gb": 0}, "weights_memory_gb=0 must be more than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    device: str, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_offload(EngineConfig.of(**settings), numbers(device))


def test_the_report_says_where_layers_are_and_what_a_step_costs() -> None:
    buffers = list(torch.zeros(3, 1, dtype=torch.uint8))
    layers = tuple(range(1, 32, 2))
    ring = Ring(None, buffers, layers)  # type: ignore[arg-type]  # nothing is brought
    streaming = Streaming(32, 436_000_000, layers[:12], layers[12:], "/layers", ring, 55.4e9, 8_000_000_000)
    where, cost = offload_lines(EngineConfig(), numbers("cuda"), streaming)
    assert "12 of 32 layers (5.23 GB) in pinned host memory, 4 of 32 layers (1.74 GB) in /layers" in where
    assert "every step moves 6.98 GB: at least 125.9 ms at the 55.4 GB/s" in cost

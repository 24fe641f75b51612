"""ZeRO stage 3 trains a model whose weights are more than the memory that each rank may have."""

import multiprocessing
import os
import resource
import socket
from pathlib import Path

import pytest

from quire_lab.experiments import zero

LAYERS = 36
SHAPE = {**zero.SHAPE, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": LAYERS}
BASE_BYTES = 4 * LAYERS * (3 * 512 * 512 + 3 * 512 * 2048)  # K and V have half of Q's heads
ROOM = 500_000_000  # what a process may allocate beside what it has when its imports are done


def _limited(cell: zero.Cell) -> None:
    import torch

    zero.SHAPE.update(SHAPE)
    torch.ones(300, 300) @ torch.ones(300, 300)  # the libraries of products are loaded
    status = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
    limit = kilobytes * 1024 + ROOM
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        measured = zero.train(cell)
    except RuntimeError as error:
        os._exit(3 if "allocate memory" in str(error) else 4)  # threads could not be started any more
    assert measured["bytes"]["base"] * cell.ranks >= BASE_BYTES


@pytest.fixture
def small_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is freed goes back to the system at once, so that the limit counts what is in use."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(("stage", "ranks", "codes"), [(0, 1, {3}), (3, 2, {0})])
def test_stage_3_needs_less_than_the_weights(small_heap, tmp_path: Path, stage: int, ranks: int, codes: set):
    assert BASE_BYTES > ROOM
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    cells = [zero.Cell(stage, ranks, 0, rank, address, str(tmp_path), steps=1) for rank in range(ranks)]
    processes = [
        multiprocessing.get_context("spawn").Process(target=_limited, args=(cell,)) for cell in cells
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert {process.exitcode for process in processes} == codes

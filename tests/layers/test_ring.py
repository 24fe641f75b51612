"""The ring: whatever runs late or early, a layer that is used is the layer that was asked for."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import WeightsError
from quire.layers.streaming import FileTransfer, PinnedMemory, PinnedTransfer, Ring, StagedTransfer
from quire.weights.layer_files import LayerFiles
from tests.layers.late_copies import LateCopies, PromptCopies

NUM_BYTES = 8
CPU = torch.device("cpu")


def pinned_pieces(layers: list[int]) -> tuple[PinnedMemory, dict[int, torch.Tensor]]:
    memory = PinnedMemory(max(1, len(layers)) * NUM_BYTES, CPU)
    pieces = dict(zip(layers, memory.pieces(NUM_BYTES), strict=False))
    for layer, piece in pieces.items():
        piece.fill_(layer)
    return memory, pieces


def make_buffers(count: int) -> list[torch.Tensor]:
    return list(torch.zeros(count, NUM_BYTES, dtype=torch.uint8).unbind(0))


def written(folder: Path, layers: list[int]) -> LayerFiles:
    files = LayerFiles(folder, "k")
    files.make_folder()
    for layer in layers:
        files.write(layer, torch.full((NUM_BYTES,), layer, dtype=torch.uint8), [])
    return files


@given(
    num_layers=st.integers(1, 9),
    num_buffers=st.integers(1, 4),
    passes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    seed=st.integers(0, 1 << 30),
)
def test_a_late_copy_or_a_late_computation_never_meets_another_layer(
    num_layers: int, num_buffers: int, passes: list[int], seed: int
) -> None:
    """Passes may be broken off after any layer; the computation reads the buffer when it gets to run, not before."""
    layers = [3 * i + 1 for i in range(num_layers)]
    memory, pieces = pinned_pieces(layers)
    copies = LateCopies(random.Random(seed))
    ring = Ring(PinnedTransfer(copies, pieces, memory), make_buffers(num_buffers), layers)
    seen: list[tuple[int, int]] = []
    for broken_at in passes:
        for place, layer in enumerate(layers):
            ring.begin(layer)
            buffer = ring.buffer(layer)
            copies.compute(lambda b=buffer, n=layer: seen.append((n, int(b[0]))))
            copies.compute(lambda b=buffer, n=layer: seen.append((n, int(b[-1]))))
            if place == broken_at:
                break
            ring.end(layer)
    copies.drain()
    assert len(seen) >= 2 * len(passes)
    assert all(asked == found for asked, found in seen)


def test_each_step_brings_each_layer_once_and_one_with_a_buffer_to_itself_stays() -> None:
    for num_layers, num_buffers, expected in ((16, 3, 16), (5, 2, 5), (4, 3, 2), (1, 1, 0), (2, 2, 0)):
        layers = list(range(num_layers))
        memory, pieces = pinned_pieces(layers)
        ring = Ring(PinnedTransfer(PromptCopies(CPU), pieces, memory), make_buffers(num_buffers), layers)
        ring.fill()
        before = ring.num_transfers
        for _ in range(3):
            for layer in layers:
                ring.begin(layer)
                ring.end(layer)
        assert ring.num_transfers - before == 3 * expected == 3 * ring.num_streamed


def test_layers_in_files_and_in_pinned_memory_come_through_one_lane(tmp_path: Path) -> None:
    layers = list(range(7))
    memory, pieces = pinned_pieces([1, 3, 4])
    staging = make_buffers(2)
    lane = StagedTransfer(PromptCopies(CPU), pieces, staging, memory, written(tmp_path, [0, 2, 5, 6]))
    ring = Ring(lane, make_buffers(3), layers)
    assert ring.fill() > 0
    for _ in range(2):
        for layer in layers:
            ring.begin(layer)
            assert set(ring.buffer(layer).tolist()) == {layer}
            ring.end(layer)


def test_a_file_that_vanishes_is_named_and_asked_for_again(tmp_path: Path) -> None:
    files = written(tmp_path, [0, 1, 2])
    ring = Ring(FileTransfer(files), make_buffers(1), [0, 1, 2])
    hidden = tmp_path / "hidden"
    files.path(1).rename(hidden)
    ring.begin(0)
    ring.end(0)
    with pytest.raises(WeightsError, match=r"layer 1 cannot be read .*start again"):
        ring.begin(1)
    hidden.rename(files.path(1))
    ring.begin(1)
    assert set(ring.buffer(1).tolist()) == {1}

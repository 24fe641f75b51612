"""VerifyInputs: steps that verify drafts and nothing else, in memory that a captured graph finds again."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Step
from quire.layers.batch import Batch, TreeMasks
from quire.runner.device_inputs import DeviceInputs, Staged
from quire.runner.packing import pinned, round_up
from quire.runner.rows import RowSettings
from quire.runner.scored import scored_rows
from quire.runner.trees import NO_TREE, spread_trees

# Tokens of a step that verifies drafts. Larger ones keep the device busier than the host is with launching.
VERIFY_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


@dataclass(frozen=True, slots=True)
class _Lines:
    """Where each array of a step of one size lies, as (first, length) in int32."""

    num_rows: int
    end: int
    rows: tuple[int, int]
    num_computed: tuple[int, int]
    query_starts: tuple[int, int]
    sample_rows: tuple[int, int]
    sample_positions: tuple[int, int]
    positions: tuple[int, int]
    tree_starts: tuple[int, int]
    ancestors: tuple[int, int]  # int64


def _lines(num_rows: int, num_tokens: int) -> _Lines:
    lengths = (num_rows, num_rows, num_rows + 1, *(num_tokens,) * 4, 2 * num_tokens)
    places, first = [], 0
    for length in lengths:
        places.append((first, length))
        first += round_up(length)
    return _Lines(num_rows, first, *places)


class VerifyInputs:
    """Every token of such a step is sampled, in order. It is padded to one of a few sizes by a row that is nobody's."""

    def __init__(self, inputs: DeviceInputs, settings: RowSettings, max_rows: int, max_tokens: int) -> None:
        self._inputs = inputs
        self._settings = settings
        self._max_rows = max_rows
        self.sizes = [size for size in VERIFY_SIZES if size <= max_tokens]
        largest = self._lines_of(self.sizes[-1]).end if self.sizes else 0
        self._sent = torch.zeros(largest, dtype=torch.int32, device=inputs.device)

    def size_for(self, step: Step) -> int | None:
        """The least size that serves the step; None if it is more than drafts, or too large."""
        num_rows, num_tokens = len(step.rows), step.total_tokens
        if len(step.sample_rows) != num_tokens or not _in_order(step):
            return None
        rows = np.asarray(step.rows, np.int64)
        counts, computed = np.asarray(step.num_tokens, np.int64), np.asarray(step.num_computed, np.int64)
        if scored_rows(self._settings, rows, computed, counts):
            return None
        for size in self.sizes:
            if size == num_tokens or (size > num_tokens and num_rows < self._lines_of(size).num_rows):
                return size
        return None

    def stage(self, step: Step, size: int) -> tuple[Staged, bool]:
        """Sends the step; whether it has trees."""
        lines, trees = self._lines_of(size), spread_trees(step)
        num_rows, num_tokens = len(step.rows), step.total_tokens
        counts = np.asarray(step.num_tokens, np.int32)
        computed = np.asarray(step.num_computed, np.int32)
        ends = np.cumsum(counts)
        packed = np.zeros(lines.end, np.int32)

        def line(place: tuple[int, int]) -> np.ndarray:
            return packed[place[0] : place[0] + place[1]]

        line(lines.rows)[:], line(lines.rows)[:num_rows] = -1, step.rows
        line(lines.num_computed)[:num_rows] = computed
        starts = line(lines.query_starts)
        starts[1 : num_rows + 1], starts[num_rows + 1 :] = ends, size
        if trees is None:
            positions = np.arange(num_tokens) + np.repeat(computed + counts - ends, counts)
        else:
            positions = trees.positions
            line(lines.tree_starts)[:] = NO_TREE
            line(lines.tree_starts)[:num_tokens] = trees.starts
            line(lines.ancestors).view(np.int64)[:num_tokens] = trees.ancestors
        line(lines.positions)[:num_tokens] = positions
        line(lines.sample_rows)[:num_tokens] = step.sample_rows
        line(lines.sample_positions)[:num_tokens] = positions + 1
        self._sent[: lines.end].copy_(pinned(packed, self._inputs.device), non_blocking=True)
        sample_rows = np.asarray(step.sample_rows, np.int64)
        return Staged(False, size, sample_rows, (positions + 1).astype(np.int64)), trees is not None

    def batch(self, size: int, has_trees: bool) -> Batch:
        """The batch of a step of this size, spread from what `stage` sent; may be captured."""
        lines = self._lines_of(size)
        batch = self._inputs.spread(
            self._line(lines.rows),
            self._line(lines.num_computed),
            self._line(lines.query_starts),
            None,
            size,
            max_query_len=size,
            wanted=None,
        )
        if not has_trees:
            return batch
        masks = TreeMasks(self._line(lines.tree_starts), self._line(lines.ancestors).view(torch.int64))
        return replace(batch, positions=self._line(lines.positions), trees=masks)

    def samples(self, size: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows and positions [S] of the tokens to be sampled."""
        lines = self._lines_of(size)
        return self._line(lines.sample_rows)[:count], self._line(lines.sample_positions)[:count]

    def _line(self, place: tuple[int, int]) -> Tensor:
        return self._sent[place[0] : place[0] + place[1]]

    def _lines_of(self, size: int) -> _Lines:
        return _lines(min(self._max_rows, size), size)


def _in_order(step: Step) -> bool:
    """Whether samples follow the rows' tokens one by one; there are as many of both."""
    counts, offsets = np.asarray(step.num_tokens, np.int64), np.asarray(step.sample_offsets, np.int64)
    sources = np.asarray(step.sample_sources, np.int64)
    if len(offsets) != len(sources):
        return False
    wanted = np.cumsum(counts)[sources] - 1 - offsets
    return bool((wanted == np.arange(len(wanted))).all())

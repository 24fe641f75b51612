"""Assembler: gathers a Step's inputs from the rows into one ragged Batch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Step
from quire.layers.batch import Batch, TreeMasks
from quire.runner.adapters import AdapterSlots
from quire.runner.rows import Rows
from quire.runner.scored import ScoredRow, scored_rows, wanted_tokens
from quire.runner.trees import spread_trees


@dataclass(frozen=True, slots=True)
class Assembled:
    """A Batch and what the host knows about it."""

    batch: Batch
    sample_rows: np.ndarray  # [S] int64
    sample_positions: np.ndarray  # [S] int64, where the sampled token will stand
    scored: tuple[ScoredRow, ...]  # rows that want logprobs of prompt tokens from this step
    line_rows: np.ndarray  # [L] int64, the row of each token whose logits are wanted
    is_decode: bool  # every token is sampled, in order: one of a row, or a draft and the token before it


class _Buffer:
    """One persistent line of memory, as a tensor for kernels and an array for the host."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._tensor = torch.zeros(shape, dtype=dtype)
        self._device = None if device.type == "cpu" else device
        self.array = self._tensor.numpy()

    def put(self, values: np.ndarray) -> Tensor:
        self.array[: len(values)] = values
        return self.first(len(values))

    def first(self, count: int) -> Tensor:
        """What is there, on the device: on the CPU the same memory, elsewhere a copy."""
        found = self._tensor[:count]
        return found if self._device is None else found.to(self._device)


class Assembler:
    """Buffers live as long as the runner, so that a recorded pass finds its inputs where they were."""

    def __init__(
        self,
        rows: Rows,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._rows = rows
        self._adapters = adapters
        self._block_size = block_size
        self._token_ids = _Buffer((max_tokens,), torch.int32, device)
        self._positions = _Buffer((max_tokens,), torch.int32, device)
        self._slots = _Buffer((max_tokens,), torch.int64, device)
        self._query_starts = _Buffer((max_rows + 1,), torch.int32, device)
        self._context_lens = _Buffer((max_rows,), torch.int32, device)
        self._tables = _Buffer((max_rows, rows.max_blocks), torch.int32, device)
        self._tree_starts = _Buffer((max_tokens,), torch.int32, device)
        self._ancestors = _Buffer((max_tokens,), torch.int64, device)
        self._order = np.arange(max_tokens)
        self._logits_indices = _Buffer((max_tokens + max_rows,), torch.int64, device)

    def assemble(self, step: Step) -> Assembled:
        rows = np.asarray(step.rows, np.int64)
        computed = np.asarray(step.num_computed, np.int64)
        counts = np.asarray(step.num_tokens, np.int64)
        contexts = computed + counts
        ends = np.cumsum(counts)
        sources = np.asarray(step.sample_sources, np.int64)
        offsets = np.asarray(step.sample_offsets, np.int64)
        num_tokens = int(ends[-1])
        if num_tokens == len(rows):  # one token each: nothing to spread
            token_rows, positions = rows, computed
        else:
            token_rows = np.repeat(rows, counts)
            positions = np.arange(num_tokens) + np.repeat(contexts - ends, counts)
        sample_positions = contexts[sources] - offsets if len(offsets) else contexts[sources]
        trees = spread_trees(step) if step.drafts else None
        scored = scored_rows(self._rows.settings, rows, computed, counts)
        wanted = wanted_tokens(ends, sources, offsets, scored, rows, counts)
        is_decode = len(wanted) == num_tokens and not scored
        is_decode = is_decode and bool((wanted == self._order[:num_tokens]).all())
        lora = wanted_lora = None
        if self._adapters is not None and self._adapters.runs_in(rows):
            lora = self._adapters.of_tokens(token_rows)
            wanted_lora = lora if is_decode else self._adapters.of_wanted(token_rows[wanted])
        batch = Batch(
            token_ids=self._token_ids.put(self._rows.tokens[token_rows, positions]),
            positions=self._positions.put(positions if trees is None else trees.positions),
            slots=self._slots.put(self._slots_of(token_rows, positions)),
            query_starts=self._query_starts.put(np.concatenate(([0], ends))),
            context_lens=self._context_lens.put(contexts),
            block_tables=self._gather_tables(rows, int(contexts.max())),
            logits_indices=self._logits_indices.put(wanted),
            trees=None
            if trees is None
            else TreeMasks(self._tree_starts.put(trees.starts), self._ancestors.put(trees.ancestors)),
            lora=lora,
            wanted_lora=wanted_lora,
        )
        return Assembled(
            batch=batch,
            sample_rows=np.asarray(step.sample_rows, np.int64),
            sample_positions=sample_positions
            if trees is None
            else trees.positions[wanted[: len(sources)]] + 1,
            scored=scored,
            line_rows=token_rows[wanted],
            is_decode=is_decode,
        )

    def _slots_of(self, token_rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        blocks = self._rows.tables[token_rows, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def _gather_tables(self, rows: np.ndarray, longest: int) -> Tensor:
        width = -(-longest // self._block_size)
        self._tables.array[: len(rows), :width] = self._rows.tables[rows, :width]
        return self._tables.first(len(rows))

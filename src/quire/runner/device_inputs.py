"""DeviceInputs: rows live on the device; a step sends changes and the rows that advance; the rest is gathered there."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.step import RowStart, Step
from quire.kernels import choose
from quire.kernels.attention.cudnn import stop_for
from quire.layers.batch import AttentionPlans, Batch, GroupTables, Span, TreeMasks
from quire.layers.lora import LoraBatch
from quire.runner.adapters import AdapterSlots
from quire.runner.drafts import NO_TREE
from quire.runner.staging import Sections, pinned, round_up, send
from quire.runner.step_inputs import StepInputs, TokenInputs
from quire.sampling.records import on_device

# Tokens of a step with prompts, and of one that verifies drafts, that graphs are captured for. Larger ones keep the
# device busier than the host is with launching.
PROMPT_SIZES = (16, 32, *range(64, 1024, 64), *range(1024, 2049, 128))
VERIFY_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """A batch with prompts in it, and where its samples go."""

    batch: Batch
    sample_rows: Tensor  # [S] int32
    sample_positions: Tensor  # [S] int32


class DeviceInputs:
    """Persistent memory, so that a captured graph finds its inputs where they were."""

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        planner: Any = None,  # attention's, if its kernel has one
        stops: tuple[int, ...] = (),  # prompts of about this length are read from the batch itself
        num_groups: int = 1,  # of layers, each with a table of its own
    ) -> None:
        self._num_groups = num_groups
        self._planner = planner
        self._stops = stops
        self.device = device
        self._block_size = block_size
        self._kernel = choose("inputs", device)
        max_blocks = -(-max_model_len // block_size)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.row_tokens = torch.zeros(max_rows, max_model_len, **integers)  # [max_rows, max_len]
        self.row_tables = torch.zeros(num_groups, max_rows, max_blocks, **integers)
        # rows | num_computed of a decode
        self._decode = torch.full((2 * round_up(max_rows),), -1, **integers)
        self._prompts = torch.full((6 * round_up(max_rows + 2),), -1, **integers)  # see `stage_prompts`
        self._single_starts = torch.arange(max_rows + 1, **integers)  # query_starts where rows have one token
        self._token_ids = torch.zeros(max_tokens, **integers)
        self._positions = torch.zeros(max_tokens, **integers)
        self._slots = torch.zeros(num_groups, max_tokens, dtype=torch.int64, device=device)
        # a step with prompts may have a row of padding beside all others
        self._context_lens = torch.zeros(max_rows + 1, **integers)
        self._block_tables = torch.zeros(num_groups, max_rows + 1, max_blocks, **integers)

    # ------------------------------------------------------------------ rows change

    def apply(self, step: Step) -> None:
        """Starts rows, writes forced tokens, drafts and table entries. Nothing waits."""
        if not step.starts and not step.forced_rows and not step.table_rows and not step.drafts:
            return
        deltas = (step.table_rows, step.table_indices, step.table_blocks)
        entries = [
            np.append(started, np.asarray(delta, np.int32))
            for started, delta in zip(_started(step.starts, "block_ids"), deltas, strict=True)
        ]
        if self._num_groups > 1:  # tables of all groups are one for `scatter`
            entries[1], groups = np.divmod(entries[1], self._num_groups)
            entries[0] = entries[0] + groups * self.row_tables.shape[1]
        forced = (step.forced_rows, step.forced_positions, step.forced_tokens)
        tokens = zip(_started(step.starts, "token_ids"), forced, _drafted(step), strict=True)
        sections = Sections([*(np.concatenate(parts).astype(np.int32) for parts in tokens), *entries])
        parts = sections.split(send(sections.packed, self.device))
        for target, entry in ((self.row_tokens, parts[:3]), (self.row_tables.flatten(0, 1), parts[3:])):
            if len(entry[0]):
                self._kernel.scatter(target, *entry)

    # ------------------------------------------------------------------ decodes

    def stage_decode(self, inputs: StepInputs, padded: int) -> int:
        """Sends the rows of a decode, padded to `padded`; how many that are."""
        rows, computed = inputs.rows, inputs.computed
        size = max(padded, len(rows))
        packed = np.full((2, round_up(size)), -1, np.int32)
        packed[0, : len(rows)] = rows
        packed[1, : len(rows)] = computed
        flat = packed.reshape(-1)
        self._decode[: len(flat)].copy_(pinned(flat, self.device), non_blocking=True)
        return size

    def decode(self, num_rows: int, lora: LoraBatch | None = None) -> Batch:
        """The batch of a decode of `num_rows`, spread from what `stage_decode` sent; may be captured."""
        second = round_up(num_rows)
        return self.spread(
            self._decode[:num_rows],
            self._decode[second : second + num_rows],
            self._single_starts[: num_rows + 1],
            self._context_lens[:num_rows],
            num_rows,
            max_query_len=1,
            wanted=None,
            lora=lora,
            wanted_lora=lora,
        )

    def decode_samples(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows and positions [S] of the tokens to be sampled: a row's next token stands where its context ends."""
        return self._decode[:count], self._context_lens[:count]

    # ------------------------------------------------------------------ prompts, in a graph

    def stage_prompts(self, tokens: TokenInputs, num_tokens: int, num_rows: int) -> None:
        """Sends a step of less than `num_rows` rows; a row of padding takes the tokens up to `num_tokens`."""
        inputs = tokens.inputs
        count, num_samples = len(inputs.rows), len(inputs.sample_rows)
        packed = np.full((6, round_up(num_rows + 1)), -1, np.int32)
        rows, computed, starts, wanted, sample_rows, sample_positions = packed
        rows[:count] = inputs.rows
        computed[:count] = inputs.computed
        starts[0], starts[1 : count + 1], starts[count + 1 :] = 0, tokens.ends, num_tokens
        wanted[:] = 0
        wanted[:num_samples] = tokens.wanted
        sample_rows[:num_samples] = inputs.sample_rows
        sample_positions[:num_samples] = tokens.sample_positions
        flat = packed.reshape(-1)
        self._prompts[: len(flat)].copy_(pinned(flat, self.device), non_blocking=True)

    def prompts(
        self,
        num_tokens: int,
        num_rows: int,
        lora: LoraBatch | None = None,
        wanted_lora: LoraBatch | None = None,
    ) -> Batch:
        """The batch of a step that `stage_prompts` padded to these sizes; may be captured."""
        rows, computed, starts, wanted, _, _ = self._sent_prompts(num_rows)
        return self.spread(
            rows[:num_rows],
            computed[:num_rows],
            starts[: num_rows + 1],
            self._context_lens[:num_rows],
            num_tokens,
            max_query_len=num_tokens,
            wanted=wanted[:num_rows],
            lora=lora,
            wanted_lora=wanted_lora,
        )

    def prompt_samples(self, num_rows: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows and positions [S] of the tokens to be sampled."""
        *_, rows, positions = self._sent_prompts(num_rows)
        return rows[:count], positions[:count]

    def _sent_prompts(self, num_rows: int) -> tuple[Tensor, ...]:
        width = round_up(num_rows + 1)
        return self._prompts[: 6 * width].view(6, width).unbind(0)

    # ------------------------------------------------------------------ anything else

    def stage_mixed(self, tokens: TokenInputs, adapters: AdapterSlots | None = None) -> MixedBatch:
        """Sends any step. With `adapters` some row has one."""
        inputs, ends, trees = tokens.inputs, tokens.ends, tokens.trees
        counts = inputs.counts
        of_trees = [] if trees is None else [trees.positions, trees.starts]
        padded = self._padded(inputs.computed, counts)
        is_fresh = padded > 0
        sections = Sections([
            inputs.rows, inputs.computed, np.append(0, ends), np.where(is_fresh, 0, tokens.contexts), tokens.wanted,
            inputs.sample_rows, tokens.sample_positions, *of_trees,
        ])  # fmt: skip
        sent = sections.split(send(sections.packed, self.device))
        lora = wanted_lora = None
        if adapters is not None:
            token_rows = tokens.token_rows()
            lora, wanted_lora = adapters.of_tokens(token_rows), adapters.of_wanted(token_rows[tokens.wanted])
        batch = self.spread(
            sent[0],
            sent[1],
            sent[2],
            sent[3],
            tokens.num_tokens,
            max_query_len=int(counts.max()),
            wanted=sent[4],
            fresh=tuple(
                Span(int(ends[i] - counts[i]), int(ends[i]), int(padded[i])) for i in np.flatnonzero(is_fresh)
            ),
            lora=lora,
            wanted_lora=wanted_lora,
        )
        if trees is not None:
            batch = self.with_trees(batch, sent[7], sent[8], on_device(trees.ancestors, self.device))
        return MixedBatch(batch, sent[5], sent[6])

    def _padded(self, computed: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """[R] int32: how long a prompt is made that is read from the batch itself; 0 for rows that are not."""
        padded = np.zeros(len(counts), np.int32)
        if self._stops and counts.max() > self._stops[0] // 2:
            for row in np.flatnonzero((computed == 0) & (counts > 1)).tolist():
                padded[row] = stop_for(int(counts[row]), self._stops)
        return padded

    def spread(
        self,
        rows: Tensor,
        num_computed: Tensor,
        query_starts: Tensor,
        paged_lens: Tensor | None,  # None: as context_lens
        num_tokens: int,
        *,
        max_query_len: int,
        wanted: Tensor | None,
        fresh: tuple[Span, ...] = (),
        lora: LoraBatch | None = None,
        wanted_lora: LoraBatch | None = None,
    ) -> Batch:
        """A batch of these rows, gathered from what the device knows of them; may be captured."""
        num_rows = rows.shape[0]
        context_lens = self._context_lens[:num_rows]
        plans = None
        if self._planner is not None:
            plans = AttentionPlans(
                self._planner,
                query_starts,
                context_lens,
                context_lens if paged_lens is None else paged_lens,
                num_tokens,
                self._block_tables[0, :num_rows],
            )
        first, *more = (
            GroupTables(slots[:num_tokens], tables[:num_rows])
            for slots, tables in zip(self._slots, self._block_tables, strict=True)
        )
        batch = Batch(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slots=first.slots,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=first.block_tables,
            logits_indices=wanted,
            max_query_len=max_query_len,
            fresh=fresh,
            plans=plans,
            lora=lora,
            wanted_lora=wanted_lora,
            more_groups=tuple(more),
        )
        for row_tables, group in zip(self.row_tables, (first, *more), strict=True):
            self._kernel.spread(
                rows, num_computed, query_starts, self.row_tokens, row_tables, self._block_size, max_query_len,
                batch.token_ids, batch.positions, group.slots, batch.context_lens, group.block_tables,
            )  # fmt: skip
        return batch

    def with_trees(self, batch: Batch, positions: Tensor, starts: Tensor, ancestors: Tensor) -> Batch:
        """The batch with what its tokens [T] see of their rows' trees, and positions by depth; may be captured."""
        return replace(batch, positions=positions, trees=TreeMasks(starts, ancestors))


class VerifyInputs:
    """Steps that verify drafts and nothing else: every token is sampled, in order.

    Each is padded to one of a few sizes by a row of padding, in memory that a captured graph finds again.
    """

    def __init__(self, inputs: DeviceInputs, max_rows: int, max_tokens: int) -> None:
        self._inputs = inputs
        self._max_rows = max_rows
        self.sizes = [size for size in VERIFY_SIZES if size <= max_tokens]
        largest = self._spans(self.sizes[-1])[-1].stop if self.sizes else 0
        self._sent = torch.zeros(largest, dtype=torch.int32, device=inputs.device)

    def size_for(self, tokens: TokenInputs) -> int | None:
        """The least size that serves the step; None if it is more than drafts, or too large."""
        num_rows, num_tokens = len(tokens.inputs.rows), tokens.num_tokens
        if not tokens.are_all_sampled:
            return None
        for size in self.sizes:
            if size == num_tokens or (size > num_tokens and num_rows < min(self._max_rows, size)):
                return size
        return None

    def stage(self, tokens: TokenInputs, size: int) -> None:
        inputs, trees = tokens.inputs, tokens.trees
        num_rows, num_tokens, spans = len(inputs.rows), tokens.num_tokens, self._spans(size)
        packed = np.zeros(spans[-1].stop, np.int32)
        sections = (packed[span] for span in spans)
        rows, computed, starts, sample_rows, sample_positions, positions, tree_starts, ancestors = sections
        rows[:], rows[:num_rows] = -1, inputs.rows
        computed[:num_rows] = inputs.computed
        starts[1 : num_rows + 1], starts[num_rows + 1 :] = tokens.ends, size
        if trees is not None:
            tree_starts[:], tree_starts[:num_tokens] = NO_TREE, trees.starts
            ancestors.view(np.int64)[:num_tokens] = trees.ancestors
        positions[:num_tokens] = tokens.sample_positions - 1
        sample_rows[:num_tokens] = inputs.sample_rows
        sample_positions[:num_tokens] = tokens.sample_positions
        self._sent[: len(packed)].copy_(pinned(packed, self._inputs.device), non_blocking=True)

    def batch(self, size: int, has_trees: bool) -> Batch:
        """The batch of a step of this size, spread from what `stage` sent; may be captured."""
        rows, computed, starts, _, _, positions, tree_starts, ancestors = self._sections(size)
        batch = self._inputs.spread(rows, computed, starts, None, size, max_query_len=size, wanted=None)
        if not has_trees:
            return batch
        return self._inputs.with_trees(batch, positions, tree_starts, ancestors.view(torch.int64))

    def samples(self, size: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows and positions [S] of the tokens to be sampled."""
        _, _, _, rows, positions, *_ = self._sections(size)
        return rows[:count], positions[:count]

    def _sections(self, size: int) -> list[Tensor]:
        return [self._sent[span] for span in self._spans(size)]

    def _spans(self, size: int) -> list[slice]:
        """Where the arrays of a step of this size lie, in int32: rows, num_computed, query_starts, then of each token
        sample_rows, sample_positions, positions, tree_starts, and ancestors in int64."""
        num_rows, spans, first = min(self._max_rows, size), list[slice](), 0
        for length in (num_rows, num_rows, num_rows + 1, *(size,) * 4, 2 * size):
            spans.append(slice(first, first + length))
            first += round_up(length)
        return spans


def _started(starts: tuple[RowStart, ...], field: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, index, value) of all that started rows have in `field`; each [N] int32."""
    if not starts:
        nothing = np.zeros(0, np.int32)
        return nothing, nothing, nothing
    values = [np.asarray(getattr(start, field), np.int32) for start in starts]
    lengths = [len(value) for value in values]
    rows = np.repeat(np.array([start.row for start in starts], np.int32), lengths)
    indices = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return rows, indices, np.concatenate(values)


def _drafted(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, position, token id) of every drafted token; each [N] int32."""
    tokens = [
        (draft.row, draft.position + i, token_id)
        for draft in step.drafts
        for i, token_id in enumerate(draft.token_ids)
    ]
    rows, positions, token_ids = np.array(tokens, np.int32).reshape(-1, 3).T
    return rows, positions, token_ids

"""DeviceInputs: rows live on the device; a step sends what changed and who advances, and gathers the rest there."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.step import RowStart, Step
from quire.kernels import choose
from quire.kernels.attention.cudnn import stop_for
from quire.layers.batch import AttentionPlans, Batch, Span, TreeMasks
from quire.layers.lora import LoraBatch
from quire.runner.adapters import AdapterSlots
from quire.runner.packing import Sections, pinned, round_up, send
from quire.runner.rows import RowSettings
from quire.runner.scored import ScoredRow, scored_rows, wanted_tokens
from quire.runner.trees import spread_trees
from quire.sampling.records import on_device

SMALL_ROWS = 16  # of a step with prompts that fits a graph, one row of padding included


@dataclass(frozen=True, slots=True)
class Staged:
    """One step as the host knows it."""

    is_decode: bool  # every row advances by one token and is sampled, in order
    size: int  # rows of a decode, tokens of a small step, both with their padding; rows otherwise
    sample_rows: np.ndarray  # [S] int64
    sample_positions: np.ndarray  # [S] int64, where the sampled token will stand
    scored: tuple[ScoredRow, ...] = ()


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
        settings: RowSettings,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        planner: Any = None,  # attention's, if its kernel has one
        stops: tuple[int, ...] = (),  # prompts of about this length are read from the batch itself
    ) -> None:
        self._settings = settings
        self._planner = planner
        self._stops = stops
        self.device = device
        self._block_size = block_size
        self._kernel = choose("inputs", device)
        max_blocks = -(-max_model_len // block_size)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.row_tokens = torch.zeros(max_rows, max_model_len, **integers)  # [max_rows, max_len]
        self.row_tables = torch.zeros(max_rows, max_blocks, **integers)  # [max_rows, max_blocks]
        self._decode = torch.full(
            (2 * round_up(max_rows),), -1, **integers
        )  # rows | num_computed of a decode
        self._small = torch.full((6 * round_up(SMALL_ROWS + 1),), -1, **integers)  # see `stage_small`
        self._single_starts = torch.arange(max_rows + 1, **integers)  # query_starts where rows have one token
        self._token_ids = torch.zeros(max_tokens, **integers)
        self._positions = torch.zeros(max_tokens, **integers)
        self._slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(max_rows, **integers)
        self._block_tables = torch.zeros(max_rows, max_blocks, **integers)

    # ------------------------------------------------------------------ rows change

    def apply(self, step: Step) -> None:
        """Starts rows, writes told tokens, drafts and table entries. Nothing waits."""
        if not step.starts and not step.forced_rows and not step.table_rows and not step.drafts:
            return
        deltas = (step.table_rows, step.table_indices, step.table_blocks)
        entries = [
            np.append(started, np.asarray(delta, np.int32))
            for started, delta in zip(_started(step.starts, "block_ids"), deltas, strict=True)
        ]
        told = (step.forced_rows, step.forced_positions, step.forced_tokens)
        tokens = zip(_started(step.starts, "token_ids"), told, _drafted(step), strict=True)
        sections = Sections([*(np.concatenate(parts).astype(np.int32) for parts in tokens), *entries])
        parts = sections.split(send(sections.packed, self.device))
        for target, places in ((self.row_tokens, parts[:3]), (self.row_tables, parts[3:])):
            if len(places[0]):
                self._kernel.scatter(target, *places)

    # ------------------------------------------------------------------ decodes

    def stage_decode(self, step: Step, padded: int) -> Staged | None:
        """Sends who advances, padded to so many rows; None if the step is more than a decode."""
        rows = np.asarray(step.rows, np.int32)
        computed = np.asarray(step.num_computed, np.int32)
        counts = np.asarray(step.num_tokens, np.int32)
        sources = np.asarray(step.sample_sources, np.int64)
        if int(counts.max()) > 1 or not np.array_equal(sources, np.arange(len(rows))):
            return None
        if scored_rows(self._settings, rows, computed, counts):
            return None
        size = max(padded, len(rows))
        packed = np.full((2, round_up(size)), -1, np.int32)
        packed[0, : len(rows)] = rows
        packed[1, : len(rows)] = computed
        flat = packed.reshape(-1)
        self._decode[: len(flat)].copy_(pinned(flat, self.device), non_blocking=True)
        return Staged(True, size, np.asarray(step.sample_rows, np.int64), computed.astype(np.int64) + 1)

    def decode(self, num_rows: int, lora: LoraBatch | None = None) -> Batch:
        """The batch of a decode of so many rows, spread from what `stage_decode` sent; may be captured."""
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

    # ------------------------------------------------------------------ few rows with prompts

    def stage_small(self, step: Step, padded: int) -> Staged:
        """Sends a step of less than SMALL_ROWS rows; a row that is nobody's takes the tokens up to `padded`."""
        num_rows, num_samples = len(step.rows), len(step.sample_rows)
        counts = np.asarray(step.num_tokens, np.int32)
        ends = np.cumsum(counts)
        sources, offsets = _sampled(step)
        contexts = np.asarray(step.num_computed, np.int32) + counts
        sampled = (contexts[sources] - offsets).astype(np.int64)
        lines = np.full((6, round_up(SMALL_ROWS + 1)), -1, np.int32)
        rows, computed, starts, wanted, sample_rows, sample_positions = lines
        rows[:num_rows] = step.rows
        computed[:num_rows] = step.num_computed
        starts[0], starts[1 : num_rows + 1], starts[num_rows + 1 :] = 0, ends, padded
        wanted[:] = 0
        wanted[:num_samples] = ends[sources] - 1 - offsets
        sample_rows[:num_samples] = step.sample_rows
        sample_positions[:num_samples] = sampled
        self._small.copy_(pinned(lines.reshape(-1), self.device), non_blocking=True)
        return Staged(False, padded, sample_rows[:num_samples].astype(np.int64), sampled)

    def small(
        self, num_tokens: int, lora: LoraBatch | None = None, wanted_lora: LoraBatch | None = None
    ) -> Batch:
        """The batch of a small step, padded to so many tokens; may be captured."""
        rows, computed, starts, wanted, _, _ = self._small.view(6, -1).unbind(0)
        return self.spread(
            rows[:SMALL_ROWS],
            computed[:SMALL_ROWS],
            starts[: SMALL_ROWS + 1],
            self._context_lens[:SMALL_ROWS],
            num_tokens,
            max_query_len=num_tokens,
            wanted=wanted[:SMALL_ROWS],
            lora=lora,
            wanted_lora=wanted_lora,
        )

    def small_samples(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows and positions [S] of the tokens to be sampled."""
        lines = self._small.view(6, -1)
        return lines[4, :count], lines[5, :count]

    # ------------------------------------------------------------------ anything else

    def stage_mixed(self, step: Step, adapters: AdapterSlots | None = None) -> tuple[Staged, MixedBatch]:
        """With `adapters` some row has one."""
        rows = np.asarray(step.rows, np.int32)
        computed = np.asarray(step.num_computed, np.int32)
        counts = np.asarray(step.num_tokens, np.int32)
        sources, offsets = _sampled(step)
        sample_rows = np.asarray(step.sample_rows, np.int64)
        contexts = computed + counts
        ends = np.cumsum(counts, dtype=np.int64)
        scored = scored_rows(self._settings, rows, computed, counts)
        sample_positions = contexts[sources].astype(np.int64) - offsets
        wanted = wanted_tokens(ends, sources, offsets, scored, rows, counts)
        trees = spread_trees(step) if step.drafts else None
        of_trees = [] if trees is None else [trees.positions, trees.starts]
        if trees is not None:
            sample_positions = trees.positions[wanted[: len(sources)]] + 1
        padded = self._padded(computed, counts)
        is_fresh = padded > 0
        sections = Sections([
            rows, computed, np.append(0, ends), np.where(is_fresh, 0, contexts), wanted,
            sample_rows, sample_positions, *of_trees,
        ])  # fmt: skip
        sent = sections.split(send(sections.packed, self.device))
        lora = wanted_lora = None
        if adapters is not None:
            token_rows = np.repeat(rows, counts)
            lora, wanted_lora = adapters.of_tokens(token_rows), adapters.of_wanted(token_rows[wanted])
        batch = self.spread(
            sent[0],
            sent[1],
            sent[2],
            sent[3],
            int(ends[-1]),
            max_query_len=int(counts.max()),
            wanted=sent[4],
            fresh=tuple(
                Span(int(ends[i] - counts[i]), int(ends[i]), int(padded[i])) for i in np.flatnonzero(is_fresh)
            ),
            lora=lora,
            wanted_lora=wanted_lora,
        )
        if trees is not None:
            masks = TreeMasks(sent[8], on_device(trees.ancestors, self.device))
            batch = replace(batch, positions=sent[7], trees=masks)
        staged = Staged(False, len(rows), sample_rows, sample_positions, scored)
        return staged, MixedBatch(batch, sent[5], sent[6])

    def _padded(self, computed: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """[R] int32: how long a prompt is made that is read from the batch itself; 0 for rows that are not."""
        found = np.zeros(len(counts), np.int32)
        if self._stops and counts.max() > self._stops[0] // 2:
            for row in np.flatnonzero((computed == 0) & (counts > 1)).tolist():
                found[row] = stop_for(int(counts[row]), self._stops)
        return found

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
                self._block_tables[:num_rows],
            )
        batch = Batch(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slots=self._slots[:num_tokens],
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=self._block_tables[:num_rows],
            logits_indices=wanted,
            max_query_len=max_query_len,
            fresh=fresh,
            plans=plans,
            lora=lora,
            wanted_lora=wanted_lora,
        )
        self._kernel.spread(
            rows, num_computed, query_starts, self.row_tokens, self.row_tables, self._block_size, max_query_len,
            batch.token_ids, batch.positions, batch.slots, batch.context_lens, batch.block_tables,
        )  # fmt: skip
        return batch


def _started(starts: tuple[RowStart, ...], field: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, place, value) of everything that started rows bring along in `field`; each [N] int32."""
    if not starts:
        nothing = np.zeros(0, np.int32)
        return nothing, nothing, nothing
    values = [np.asarray(getattr(start, field), np.int32) for start in starts]
    lengths = [len(value) for value in values]
    rows = np.repeat(np.array([start.row for start in starts], np.int32), lengths)
    places = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return rows, places, np.concatenate(values)


def _sampled(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """(whose, how far before its last) tokens are sampled; each [S] int64."""
    sources = np.asarray(step.sample_sources, np.int64)
    offsets = np.asarray(step.sample_offsets, np.int64)
    return sources, offsets if len(offsets) else np.zeros_like(sources)


def _drafted(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, place, value) of every drafted token; each [N] int32."""
    found = [
        (draft.row, draft.position + i, token_id)
        for draft in step.drafts
        for i, token_id in enumerate(draft.token_ids)
    ]
    rows, places, values = np.array(found, np.int32).reshape(-1, 3).T
    return rows, places, values

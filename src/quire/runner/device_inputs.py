"""DeviceInputs: rows live on the device; a step sends what changed and who advances, and gathers the rest there."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.step import RowStart, Step
from quire.kernels import choose
from quire.layers.batch import Batch, Span
from quire.layers.plans import AttentionPlans
from quire.runner.rows import RowSettings
from quire.runner.scored import ScoredRow, scored_rows, wanted_tokens


@dataclass(frozen=True, slots=True)
class Staged:
    """One step's inputs. Of its tensors only the packed integers were sent; the device spreads them."""

    packed: np.ndarray  # int32, all of the step's integers, in the order that `DeviceInputs` reads them
    num_rows: int  # R, padding included
    num_tokens: int  # T, padding included
    num_wanted: int  # L, hidden states that are needed
    max_query_len: int
    is_decode: bool  # every row advances by one token and is sampled, in order
    sample_rows: np.ndarray  # [S] int64
    sample_positions: np.ndarray  # [S] int64, where the sampled token will stand
    scored: tuple[ScoredRow, ...]
    fresh: tuple[Span, ...]


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
        fresh_tokens: int | None = None,  # prompts this long are read from the batch itself; None: never
    ) -> None:
        self._settings = settings
        self._planner = planner
        self._fresh_tokens = fresh_tokens or max_tokens + 1
        self._device = device
        self._block_size = block_size
        self._kernel = choose("inputs", device)
        max_blocks = -(-max_model_len // block_size)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.row_tokens = torch.zeros(max_rows, max_model_len, **integers)  # [max_rows, max_len]
        self.row_tables = torch.zeros(max_rows, max_blocks, **integers)  # [max_rows, max_blocks]
        self._packed = torch.zeros(7 * max_rows + 1 + max_tokens, **integers)
        self._single_starts = torch.arange(max_rows + 1, **integers)  # query_starts where rows have one token
        self._token_ids = torch.zeros(max_tokens, **integers)
        self._positions = torch.zeros(max_tokens, **integers)
        self._slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(max_rows, **integers)
        self._block_tables = torch.zeros(max_rows, max_blocks, **integers)

    # ------------------------------------------------------------------ what the host sends

    def apply(self, step: Step) -> None:
        """Starts rows and writes table entries. Nothing waits."""
        if not step.starts and not step.table_rows:
            return
        token_rows, token_places, tokens = _started(step.starts, "token_ids")
        table_rows, table_places, blocks = _started(step.starts, "block_ids")
        num_tokens = len(tokens)
        pieces = (
            (token_rows, np.append(table_rows, np.asarray(step.table_rows, np.int32))),
            (token_places, np.append(table_places, np.asarray(step.table_indices, np.int32))),
            (tokens, np.append(blocks, np.asarray(step.table_blocks, np.int32))),
        )
        sent = self.send(np.stack([np.concatenate(pair) for pair in pieces]))
        if num_tokens:
            self._kernel.scatter(self.row_tokens, *sent[:, :num_tokens].unbind(0))
        if sent.shape[1] > num_tokens:
            self._kernel.scatter(self.row_tables, *sent[:, num_tokens:].unbind(0))

    def stage(self, step: Step, padded: int = 0) -> Staged:
        """Packs the step's integers on the host. A pure decode is padded to `padded` rows if that is more."""
        rows, computed, counts = (
            np.asarray(x, np.int32) for x in (step.rows, step.num_computed, step.num_tokens)
        )
        sources = np.asarray(step.sample_sources, np.int64)
        contexts = computed + counts
        ends = np.cumsum(counts, dtype=np.int64)
        num_tokens = int(ends[-1])
        scored = scored_rows(self._settings, rows, computed, counts)
        sample_rows = np.asarray(step.sample_rows, np.int64)
        sample_positions = contexts[sources].astype(np.int64)
        if num_tokens == len(rows) == len(sources) and not scored:
            size = max(padded, len(rows))
            packed = np.full((2, size), -1, np.int32)
            packed[0, : len(rows)] = rows
            packed[1, : len(rows)] = computed
            return Staged(
                packed.reshape(-1), size, size, len(rows), 1, True, sample_rows, sample_positions, (), ()
            )
        wanted = wanted_tokens(ends, sources, scored, rows, counts)
        is_fresh = (computed == 0) & (counts >= self._fresh_tokens)
        paged_lens = np.where(is_fresh, 0, contexts)
        packed = np.concatenate(
            (rows, computed, [0], ends, paged_lens, wanted, sample_rows, sample_positions),
            dtype=np.int32,
            casting="unsafe",
        )
        starts = ends - counts
        fresh = tuple(Span(int(starts[i]), int(ends[i])) for i in np.flatnonzero(is_fresh))
        longest = int(counts.max())
        return Staged(
            packed,
            len(rows),
            num_tokens,
            len(wanted),
            longest,
            False,
            sample_rows,
            sample_positions,
            scored,
            fresh,
        )

    def put(self, staged: Staged) -> None:
        """Sends a step's integers to where `batch` and graphs read them."""
        self._packed[: len(staged.packed)].copy_(_pinned(staged.packed, self._device), non_blocking=True)

    def send(self, array: np.ndarray) -> Tensor:
        """A host array on the device, without waiting for it."""
        return _pinned(array, self._device).to(self._device, non_blocking=True)

    # ------------------------------------------------------------------ what the device makes of it

    def decode(self, num_rows: int) -> Batch:
        """The batch of a decode of so many rows, spread from the packed integers; may be captured."""
        lens = self._context_lens[:num_rows]
        return self._spread(num_rows, num_rows, self._single_starts[: num_rows + 1], 1, None, (), lens)

    def mixed(self, staged: Staged) -> Batch:
        num_rows = staged.num_rows
        starts = self._packed[2 * num_rows : 3 * num_rows + 1]
        paged_lens = self._packed[3 * num_rows + 1 : 4 * num_rows + 1]
        wanted = self._packed[4 * num_rows + 1 :][: staged.num_wanted]
        return self._spread(
            num_rows, staged.num_tokens, starts, staged.max_query_len, wanted, staged.fresh, paged_lens
        )

    def samples(self, staged: Staged) -> tuple[Tensor, Tensor]:
        """Rows and positions [S] of the tokens to be sampled, on the device; once the batch was made."""
        count = len(staged.sample_rows)
        if staged.is_decode:  # a row's next token stands where its context ends
            return self._packed[:count], self._context_lens[:count]
        first = 4 * staged.num_rows + 1 + staged.num_wanted
        return self._packed[first : first + count], self._packed[first + count : first + 2 * count]

    def _spread(
        self,
        num_rows: int,
        num_tokens: int,
        query_starts: Tensor,
        max_query_len: int,
        wanted: Tensor | None,
        fresh: tuple[Span, ...],
        paged_lens: Tensor,
    ) -> Batch:
        plans = None
        if self._planner is not None:
            lens = self._context_lens[:num_rows]
            plans = AttentionPlans(self._planner, query_starts, lens, paged_lens, num_tokens)
        batch = Batch(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slots=self._slots[:num_tokens],
            query_starts=query_starts,
            context_lens=self._context_lens[:num_rows],
            block_tables=self._block_tables[:num_rows],
            logits_indices=wanted,
            max_query_len=max_query_len,
            fresh=fresh,
            plans=plans,
        )
        self._kernel.spread(
            self._packed[:num_rows],
            self._packed[num_rows : 2 * num_rows],
            query_starts,
            self.row_tokens,
            self.row_tables,
            self._block_size,
            max_query_len,
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.context_lens,
            batch.block_tables,
        )
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


def _pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """A host tensor that the device can read while the host goes on; torch keeps it until it was read."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    pinned = torch.empty(array.shape, dtype=torch.int32, pin_memory=True)
    pinned.numpy()[...] = array
    return pinned

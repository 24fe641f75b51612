"""CrossCpuOps: steps of an encoder-decoder model. Prompts go through the encoder, other tokens through the decoder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from quire.core.request import ints
from quire.core.step import RowStart, Step
from quire.layers.attention import Pool
from quire.layers.batch import TreeMasks
from quire.layers.cross import CrossBatch
from quire.layers.encoder import assemble_encoder_batch
from quire.models.encoder_decoder import EncoderDecoder
from quire.runner.adapters import AdapterSlots
from quire.runner.cpu import Assembler, Buffer, CpuOps, Rows
from quire.runner.device_ops import ForwardPass
from quire.runner.drafts import NO_TREE
from quire.runner.step_inputs import StepInputs, TokenInputs, step_inputs


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step's two passes: `encoded` rows give the encoder their whole prompts; then the decoder's tokens."""

    encoded: np.ndarray  # [E] int32, rows
    decoder: StepInputs | None  # None: no row has decoder tokens in this step


def split_step(inputs: StepInputs, encoder_ends: np.ndarray) -> SplitStep:
    """encoder_ends [max_rows]: where the decoder's tokens begin in each row. A prompt is never cut."""
    ends = encoder_ends[inputs.rows]
    encoded = inputs.rows[inputs.computed < ends]
    computed = np.maximum(inputs.computed, ends)
    counts = inputs.computed + inputs.counts - computed
    kept = counts > 0
    decoder = None
    if kept.any():
        places = np.cumsum(kept) - 1  # of the rows that are kept
        decoder = replace(
            inputs,
            rows=inputs.rows[kept],
            computed=computed[kept],
            counts=counts[kept],
            sources=places[inputs.sources],
        )
    return SplitStep(encoded, decoder)


def decoder_starts(starts: tuple[RowStart, ...], block_size: int) -> tuple[RowStart, ...]:
    """Rows as the decoder and the sampler know them: its first token in place of the encoder's.

    So penalties count the decoder's tokens alone, as in transformers: a prompt's end token must not keep answers from
    ending.
    """
    changed = []
    for start in starts:
        end = encoder_end(start, block_size)
        first = start.token_ids[end : end + 1] if end else ints()
        changed.append(replace(start, token_ids=first * end + start.token_ids[end:]))
    return tuple(changed)


def encoder_end(start: RowStart, block_size: int) -> int:
    """Where the decoder's tokens begin."""
    return -(-start.num_encoder_tokens // block_size) * block_size


def encoder_slots(starts: Sequence[RowStart], block_size: int) -> np.ndarray:
    """[T] int64: where K and V of these rows' encoder tokens go."""
    slots = []
    for start in starts:
        places = np.arange(start.num_encoder_tokens, dtype=np.int64)
        blocks = np.asarray(start.block_ids, np.int64)
        slots.append(blocks[places // block_size] * block_size + places % block_size)
    return np.concatenate(slots)


def encode(
    model: EncoderDecoder, pool: Pool, adapters: AdapterSlots | None, step: Step, rows: np.ndarray
) -> None:
    """A row whose prompt is encoded starts in the same step, which has its tokens and blocks."""
    wanted, device = set(rows.tolist()), pool.data.device
    starts = [start for start in step.starts if start.row in wanted]
    prompts = [start.token_ids[: start.num_encoder_tokens] for start in starts]
    slots = torch.from_numpy(encoder_slots(starts, pool.layout.block_size))
    batch = assemble_encoder_batch(prompts, device)
    if adapters is not None and adapters.runs_in(rows):
        token_rows = np.repeat([start.row for start in starts], [len(prompt) for prompt in prompts])
        batch = replace(batch, lora=adapters.of_tokens(token_rows))
    model.encode(batch, slots.to(device), pool)


class CrossRows(Rows):
    """Rows that know their encoder's part."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, *others: int) -> None:
        super().__init__(max_rows, max_model_len, block_size, *others)
        self._block_size = block_size
        self.encoder_lens = np.zeros(max_rows, np.int32)  # [max_rows], tokens of the encoder
        self.encoder_ends = np.zeros(max_rows, np.int32)  # [max_rows], the same in whole blocks

    def apply(self, step: Step) -> None:
        super().apply(replace(step, starts=decoder_starts(step.starts, self._block_size)))
        for start in step.starts:
            self.encoder_lens[start.row] = start.num_encoder_tokens
            self.encoder_ends[start.row] = encoder_end(start, self._block_size)


class CrossAssembler(Assembler):
    """Batches of the decoder."""

    _rows: CrossRows

    def __init__(
        self, rows: Rows, max_rows: int, max_tokens: int, block_size: int, device: torch.device, *others: Any
    ) -> None:
        super().__init__(rows, max_rows, max_tokens, block_size, device, *others)
        self._cross_starts = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)
        self._cross_lens = Buffer((max_tokens,), torch.int32, device)
        self._cross_tables = Buffer((max_tokens, rows.max_blocks), torch.int32, device)

    def assemble(self, tokens: TokenInputs, all_sampled: bool) -> CrossBatch:
        """The decoder's positions are counted from its first token, those of rows from the encoder's."""
        rows, inputs, trees = self._rows, tokens.inputs, tokens.trees
        row_tables, gathered, slots = rows.tables[0], self._tables[0], self._slots[0]  # layers share a block
        token_rows, places = tokens.token_rows(), tokens.places()
        offsets = rows.encoder_ends[inputs.rows]
        token_offsets = rows.encoder_ends[token_rows]
        contexts = tokens.contexts - offsets
        self._query_starts.array[1 : len(inputs.rows) + 1] = tokens.ends  # before them stays 0
        size = self._block_size
        first_blocks = offsets // size
        width = -(-int(contexts.max()) // size)
        columns = np.minimum(first_blocks[:, None] + np.arange(width), rows.max_blocks - 1)
        gathered.array[: len(inputs.rows), :width] = row_tables[inputs.rows[:, None], columns]
        cross_width = int(first_blocks.max())
        self._cross_tables.array[: len(token_rows), :cross_width] = row_tables[token_rows, :cross_width]
        masks = None
        if trees is not None:
            starts = np.where(trees.starts == NO_TREE, NO_TREE, trees.starts - token_offsets)
            masks = TreeMasks(self._tree_starts.put(starts), self._ancestors.put(trees.ancestors))
        lora = None
        if self._adapters is not None and self._adapters.runs_in(inputs.rows):
            lora = self._adapters.of_tokens(token_rows)
        return CrossBatch(
            token_ids=self._token_ids.put(rows.tokens[token_rows, places]),
            positions=self._positions.put((places if trees is None else trees.positions) - token_offsets),
            slots=slots.put(self._slots_of(0, token_rows, places)),
            query_starts=self._query_starts.first(len(inputs.rows) + 1),
            context_lens=self._context_lens.put(contexts),
            block_tables=gathered.first(len(inputs.rows)),
            logits_indices=self._logits_indices.put(tokens.wanted),
            trees=masks,
            lora=lora,
            cross_starts=self._cross_starts[: len(token_rows) + 1],
            cross_lens=self._cross_lens.put(rows.encoder_lens[token_rows]),
            cross_tables=self._cross_tables.first(len(token_rows)),
        )


class CrossCpuOps(CpuOps):
    """Decodes and drafts are replayed from tapes; the encoder runs operation by operation."""

    rows_type = CrossRows
    assembler_type = CrossAssembler
    _rows: CrossRows
    _model: EncoderDecoder  # type: ignore[assignment]

    def forward(self, step: Step) -> ForwardPass:
        inputs = step_inputs(step, self._rows.settings)
        split = split_step(inputs, self._rows.encoder_ends)
        if len(split.encoded):
            encode(self._model, self._pool, self._adapters, step, split.encoded)
        if split.decoder is None:
            return ForwardPass(inputs, np.zeros(0, np.int64), None)
        return self._forward(split.decoder)

"""CrossCpuOps: steps of an encoder-decoder model. Prompts go through the encoder, other tokens through the decoder."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.core.step import Step
from quire.layers.cross import CrossBatch
from quire.layers.encoder import assemble_encoder_batch
from quire.models.encoder_decoder import EncoderDecoder
from quire.runner.adapters import AdapterSlots
from quire.runner.cpu import Assembler, CpuOps, Rows, _Buffer
from quire.runner.device_ops import ForwardPass
from quire.runner.step_inputs import StepInputs, TokenInputs, step_inputs, token_inputs


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A step's two passes: `encoded` rows give the encoder their whole prompts; then the decoder's tokens.

    Positions of `decoder` are the decoder's own; `offsets` lead to those in the row.
    """

    encoded: np.ndarray  # [E] int32, rows
    decoder: StepInputs | None  # None: no row has decoder tokens in this step
    offsets: np.ndarray  # [R] int32, of the decoder's rows: positions that are the encoder's


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
            computed=(computed - ends)[kept],
            counts=counts[kept],
            sources=places[inputs.sources],
        )
    return SplitStep(encoded, decoder, ends[kept])


class CrossRows(Rows):
    """Rows that know their encoder's part."""

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        super().__init__(max_rows, max_model_len, block_size, vocab_size)
        self._block_size = block_size
        self.encoder_lens = np.zeros(max_rows, np.int32)  # [max_rows], tokens of the encoder
        self.encoder_ends = np.zeros(max_rows, np.int32)  # [max_rows], the same in whole blocks

    def apply(self, step: Step) -> None:
        super().apply(step)
        for start in step.starts:
            count = start.num_encoder_tokens
            self.encoder_lens[start.row] = count
            self.encoder_ends[start.row] = -(-count // self._block_size) * self._block_size


class CrossAssembler(Assembler):
    """Batches of the decoder."""

    _rows: CrossRows

    def __init__(
        self,
        rows: Rows,
        max_rows: int,
        max_tokens: int,
        block_size: int,
        device: torch.device,
        adapters: AdapterSlots | None = None,
    ) -> None:
        super().__init__(rows, max_rows, max_tokens, block_size, device, adapters)
        self._cross_starts = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)
        self._cross_lens = _Buffer((max_tokens,), torch.int32, device)
        self._cross_tables = _Buffer((max_tokens, rows.max_blocks), torch.int32, device)

    def assemble_cross(self, tokens: TokenInputs, offsets: np.ndarray) -> CrossBatch:
        rows, inputs = self._rows, tokens.inputs
        token_rows, positions = tokens.token_rows(), tokens.places()
        places = positions + np.repeat(offsets, inputs.counts)
        self._query_starts.array[1 : len(inputs.rows) + 1] = tokens.ends  # before them stays 0
        size = self._block_size
        first_blocks = offsets // size
        width = -(-int(tokens.contexts.max()) // size)
        columns = np.minimum(first_blocks[:, None] + np.arange(width), rows.max_blocks - 1)
        self._tables.array[: len(inputs.rows), :width] = rows.tables[inputs.rows[:, None], columns]
        cross_width = int(first_blocks.max())
        self._cross_tables.array[: len(token_rows), :cross_width] = rows.tables[token_rows, :cross_width]
        return CrossBatch(
            token_ids=self._token_ids.put(rows.tokens[token_rows, places]),
            positions=self._positions.put(positions),
            slots=self._slots.put(self.slots_of(token_rows, places)),
            query_starts=self._query_starts.first(len(inputs.rows) + 1),
            context_lens=self._context_lens.put(tokens.contexts),
            block_tables=self._tables.first(len(inputs.rows)),
            logits_indices=self._logits_indices.put(tokens.wanted),
            cross_starts=self._cross_starts[: len(token_rows) + 1],
            cross_lens=self._cross_lens.put(rows.encoder_lens[token_rows]),
            cross_tables=self._cross_tables.first(len(token_rows)),
        )

    def slots_of(self, token_rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        return self._slots_of(token_rows, places)


class CrossCpuOps(CpuOps):
    """On a GPU it works too, with rows in host memory and no graphs."""

    rows_type = CrossRows
    assembler_type = CrossAssembler
    _rows: CrossRows
    _assembler: CrossAssembler
    _model: EncoderDecoder  # type: ignore[assignment]

    def forward(self, step: Step) -> ForwardPass:
        inputs = step_inputs(step, self._rows.settings)
        split = split_step(inputs, self._rows.encoder_ends)
        if len(split.encoded):
            self._encode(split.encoded)
        if split.decoder is None:
            return ForwardPass(inputs, np.zeros(0, np.int64), None)
        tokens = token_inputs(split.decoder)
        batch = self._assembler.assemble_cross(tokens, split.offsets)
        positions = tokens.sample_positions + split.offsets[split.decoder.sources]
        if tokens.are_all_sampled and self._tapes is not None:
            return ForwardPass(inputs, positions, self._tapes.logits(batch))
        hidden = self._model(batch, self._pool)
        logits = self._model.logits(hidden) if len(inputs.sample_rows) else None
        return ForwardPass(inputs, positions, logits)

    def _encode(self, rows: np.ndarray) -> None:
        lens = self._rows.encoder_lens[rows]
        batch = assemble_encoder_batch(
            [self._rows.tokens[row, :count].tolist() for row, count in zip(rows, lens, strict=True)],
            self._device,
        )
        places = np.concatenate([np.arange(count) for count in lens])
        slots = torch.from_numpy(self._assembler.slots_of(np.repeat(rows, lens), places))
        self._model.encode(batch, slots.to(self._device), self._pool)

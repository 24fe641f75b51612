"""CrossCudaOps: steps of an encoder-decoder model on a GPU. The encoder runs without a graph, decodes with one."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.layout import BlockLayout
from quire.core.step import Step
from quire.layers.attention import Pool
from quire.layers.batch import AttentionPlans, Batch
from quire.layers.cross import CrossBatch
from quire.layers.encoder import assemble_encoder_batch
from quire.models.encoder_decoder import EncoderDecoder
from quire.runner.adapters import AdapterSlots
from quire.runner.cross import decoder_starts, encode, encoder_end, split_step
from quire.runner.cuda import CudaOps, attention_planner
from quire.runner.device_inputs import DeviceInputs
from quire.runner.device_ops import ForwardPass, RunnerLimits
from quire.runner.drafts import NO_TREE
from quire.runner.graphs import Graphs
from quire.runner.staging import Sections, send
from quire.runner.step_inputs import step_inputs


class CrossInputs(DeviceInputs):
    """Rows that know how long their encoder's part is; batches of the decoder."""

    def __init__(self, max_rows: int, *others: Any) -> None:
        super().__init__(max_rows, *others)
        self._encoder_lens = torch.zeros(max_rows, 1, dtype=torch.int32, device=self.device)
        self.cross_planner: Any = None  # attention's for the encoder's pages, if its kernel has one
        self.max_planned = 0  # tokens of a step that it takes

    def apply(self, step: Step) -> None:
        super().apply(replace(step, starts=decoder_starts(step.starts, self._block_size)))
        if step.starts:
            rows = np.array([start.row for start in step.starts], np.int32)
            lens = np.array([start.num_encoder_tokens for start in step.starts], np.int32)
            sections = Sections([rows, np.zeros_like(rows), lens])
            self._kernel.scatter(self._encoder_lens, *sections.split(send(sections.packed, self.device)))

    def spread(
        self, rows: Tensor, num_computed: Tensor, query_starts: Tensor, *others: Any, **more: Any
    ) -> Batch:
        """Positions, contexts and tables of the rows become the decoder's own; all on the device."""
        batch = super().spread(rows, num_computed, query_starts, *others, **more)
        size, num_tokens = self._block_size, batch.token_ids.shape[0]
        lens = torch.where(rows < 0, 0, self._encoder_lens[rows.long().clamp(min=0), 0])
        first_blocks = (lens + (size - 1)) // size
        width = batch.block_tables.shape[1]
        columns = first_blocks[:, None] + torch.arange(width, device=self.device)
        tables = batch.block_tables.gather(1, columns.clamp(max=width - 1))
        contexts = (batch.context_lens - first_blocks * size).clamp(min=0)
        cross_starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=self.device)
        cross_lens, cross_tables, offsets = lens, batch.block_tables, first_blocks * size
        if batch.max_query_len != 1:  # a row may have several tokens
            owners = torch.searchsorted(query_starts[1:], cross_starts[:-1], right=True)
            cross_lens, cross_tables, offsets = lens[owners], cross_tables[owners], offsets[owners]
        plans = cross_plans = None
        if batch.plans is not None:
            plans = replace(batch.plans, context_lens=contexts, paged_lens=contexts, block_tables=tables)
        if self.cross_planner is not None and num_tokens <= self.max_planned:
            cross_plans = AttentionPlans(
                self.cross_planner, cross_starts, cross_lens, cross_lens, num_tokens, cross_tables
            )
        return CrossBatch(
            token_ids=batch.token_ids,
            positions=(batch.positions - offsets).clamp(min=0),
            slots=batch.slots,
            query_starts=batch.query_starts,
            context_lens=contexts,
            block_tables=tables,
            logits_indices=batch.logits_indices,
            max_query_len=batch.max_query_len,
            plans=plans,
            lora=batch.lora,
            wanted_lora=batch.wanted_lora,
            cross_starts=cross_starts,
            cross_lens=cross_lens,
            cross_tables=cross_tables,
            cross_plans=cross_plans,
        )

    def with_trees(self, batch: Batch, positions: Tensor, starts: Tensor, ancestors: Tensor) -> Batch:
        assert isinstance(batch, CrossBatch)
        offsets = (batch.cross_lens + (self._block_size - 1)) // self._block_size * self._block_size
        starts = torch.where(starts == NO_TREE, starts, starts - offsets)
        return super().with_trees(batch, (positions - offsets).clamp(min=0), starts, ancestors)


class CrossCudaOps(CudaOps):
    inputs_type = CrossInputs
    _inputs: CrossInputs
    _model: EncoderDecoder  # type: ignore[assignment]

    def __init__(
        self,
        model: EncoderDecoder,
        pool: Pool,
        limits: RunnerLimits,
        device: torch.device,
        adapters: AdapterSlots | None = None,
    ) -> None:
        super().__init__(model, pool, limits, device, adapters)  # type: ignore[arg-type]
        most = max([limits.max_num_seqs, *self._drafts.sizes])  # every token is a row of cross-attention
        self._inputs.cross_planner = attention_planner(
            model.config, replace(limits, max_num_seqs=most), pool.layout, device
        )
        self._inputs.max_planned = most + 1
        self._encoder_ends = np.zeros(limits.max_num_seqs, np.int32)
        if self._graphs is not None:  # prompts are the encoder's: no graphs of them
            self._graphs = Graphs(
                model,  # type: ignore[arg-type]
                pool,
                self._inputs,
                self._drafts,
                limits.max_num_seqs,
                0,
                adapters,
            )

    def change_rows(self, step: Step) -> None:
        super().change_rows(step)
        for start in step.starts:
            self._encoder_ends[start.row] = encoder_end(start, self._pool.layout.block_size)

    def forward(self, step: Step) -> ForwardPass:
        inputs = step_inputs(step, self._settings)
        split = split_step(inputs, self._encoder_ends)
        if len(split.encoded):
            encode(self._model, self._pool, self._adapters, step, split.encoded)
        if split.decoder is None:
            return ForwardPass(inputs, np.zeros(0, np.int64), None)
        return self._forward(split.decoder)

    def _stops(self) -> tuple[int, ...]:
        return ()


@torch.inference_mode()
def cross_activation_bytes(
    model: EncoderDecoder,
    layout: BlockLayout,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    device: torch.device,
) -> int:
    """As `activation_bytes`: the largest step's need beside weights and pool. Prompts are as long as they can be."""
    pool = Pool(layout, 2, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    longest = min(max_num_batched_tokens, max_model_len)
    prompts = [[0] * longest] * (max_num_batched_tokens // longest)
    batch = assemble_encoder_batch(prompts, device)
    model.encode(batch, torch.zeros_like(batch.token_ids, dtype=torch.int64), pool)
    largest = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    hidden = model(_empty_decode(max_num_seqs, layout, device), pool)
    graph = torch.cuda.max_memory_allocated(device) - before
    model.logits(hidden)
    logits = max_num_seqs * model.config.vocab_size * 4
    torch.cuda.synchronize(device)
    return max(largest, 3 * logits) + 2 * graph


def _empty_decode(num_rows: int, layout: BlockLayout, device: torch.device) -> CrossBatch:
    """One token of each row, in block 0."""
    zeros = torch.zeros(num_rows, dtype=torch.int32, device=device)
    starts, tables = torch.arange(num_rows + 1, dtype=torch.int32, device=device), zeros[:, None]
    return CrossBatch(
        token_ids=zeros,
        positions=zeros,
        slots=zeros.long(),
        query_starts=starts,
        context_lens=zeros + 1,
        block_tables=tables,
        logits_indices=None,
        max_query_len=1,
        cross_starts=starts,
        cross_lens=zeros + 1,
        cross_tables=tables,
    )

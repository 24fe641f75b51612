"""activation_bytes: what the largest step needs beside weights and pool, measured once on the device."""

import torch

from quire.core.layout import BlockLayout
from quire.layers.batch import Batch
from quire.layers.pool import Pool
from quire.models.model import Model


@torch.inference_mode()
def activation_bytes(
    model: Model,
    layout: BlockLayout,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Peak of the largest prompt step, the logits of every row, and what graphs keep for themselves."""
    pool = Pool(layout, 2, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model(
        _fake_prompts(max_num_batched_tokens, min(max_num_batched_tokens, max_model_len), layout, device),
        pool,
    )
    largest = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    hidden = model(_fake_decodes(max_num_seqs, layout, device), pool)
    decode = torch.cuda.max_memory_allocated(device) - before
    model.logits(hidden)
    logits = max_num_seqs * model.config.vocab_size * 4
    torch.cuda.synchronize(device)
    return max(largest, 3 * logits) + 2 * decode  # graphs keep theirs; sampling may copy the logits twice


def _fake_prompts(num_tokens: int, longest: int, layout: BlockLayout, device: torch.device) -> Batch:
    """Prompts with no content, whose every slot is in block 0."""
    ends = [*range(longest, num_tokens, longest), num_tokens]
    starts = [0, *ends[:-1]]
    lengths = torch.tensor([e - s for s, e in zip(starts, ends, strict=True)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths.tolist()])
    return Batch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int32, device=device),
        positions=positions.to(device),
        slots=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        query_starts=torch.tensor([0, *ends], dtype=torch.int32, device=device),
        context_lens=lengths.to(device),
        block_tables=_no_blocks(len(ends), longest, layout, device),
        logits_indices=torch.tensor([e - 1 for e in ends], dtype=torch.int32, device=device),
        max_query_len=longest,
    )


def _fake_decodes(num_rows: int, layout: BlockLayout, device: torch.device) -> Batch:
    return Batch(
        token_ids=torch.zeros(num_rows, dtype=torch.int32, device=device),
        positions=torch.zeros(num_rows, dtype=torch.int32, device=device),
        slots=torch.zeros(num_rows, dtype=torch.int64, device=device),
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.ones(num_rows, dtype=torch.int32, device=device),
        block_tables=_no_blocks(num_rows, 1, layout, device),
        logits_indices=None,
        max_query_len=1,
    )


def _no_blocks(num_rows: int, longest: int, layout: BlockLayout, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_rows, -(-longest // layout.block_size), dtype=torch.int32, device=device)

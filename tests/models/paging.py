"""Drives a model over pages the way a runner does: ragged batches, chunked prompts, scattered blocks."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quire.core.layout import BlockLayout
from quire.kernels import choose
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.models.model import DecoderModel

only_native = pytest.mark.skipif(
    choose("attention", "cpu").__name__.endswith("reference"),
    reason="native kernels promise this, torch does not",
)
POISON = 255  # of bytes, what a reused page may hold: not-a-numbers, also as scales


class Pages:
    """A pool of poisoned pages and, for each sequence, a table of scattered blocks long enough for it."""

    def __init__(
        self, model: DecoderModel, lengths: Sequence[int], block_size: int, dtype: str = "float32"
    ) -> None:
        config = model.config
        needed = [-(-length // block_size) for length in lengths]
        ids = list(range(1, sum(needed) + 1))
        random.Random(0).shuffle(ids)
        self.block_size = block_size
        self.tables = [[ids.pop() for _ in range(count)] for count in needed]
        layout = BlockLayout(config.num_layers, block_size, config.num_kv_heads, config.head_dim, dtype)
        self.pool = Pool(layout, sum(needed) + 1)
        self.pool.data.fill_(POISON)

    def batch(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> Batch:
        """Each piece: (sequence, first position, its tokens); logits of every token are wanted."""
        token_ids, positions, slots, starts, lengths = [], [], [], [0], []
        for sequence, first, tokens in pieces:
            for position, token in enumerate(tokens, start=first):
                block = self.tables[sequence][position // self.block_size]
                token_ids.append(token)
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(token_ids))
            lengths.append(first + len(tokens))
        tables = [self.tables[sequence] for sequence, _, _ in pieces]
        width = max(map(len, tables))
        return Batch(
            token_ids=torch.tensor(token_ids, dtype=torch.int32),
            positions=torch.tensor(positions, dtype=torch.int32),
            slots=torch.tensor(slots, dtype=torch.int64),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            logits_indices=torch.arange(len(token_ids)),
        )


def run_chunked(
    model: DecoderModel,
    prompts: Sequence[Sequence[int]],
    chunks: Sequence[int],
    block_size: int,
    dtype: str = "float32",
) -> list[Tensor]:
    """Logits [length, vocab] of each prompt; prompt i advances by chunks[i] tokens in every step.

    Short chunks make some rows decode, token by token, while others are still reading their prompt.
    """
    pages = Pages(model, [len(prompt) for prompt in prompts], block_size, dtype)
    done = [0] * len(prompts)
    found: list[list[Tensor]] = [[] for _ in prompts]
    while any(done[i] < len(prompt) for i, prompt in enumerate(prompts)):
        pieces = [
            (i, done[i], prompt[done[i] : done[i] + chunks[i]])
            for i, prompt in enumerate(prompts)
            if done[i] < len(prompt)
        ]
        with torch.inference_mode():
            logits = model.logits(model(pages.batch(pieces), pages.pool))
        for (i, _, tokens), part in zip(pieces, logits.split([len(p[2]) for p in pieces]), strict=True):
            found[i].append(part)
            done[i] += len(tokens)
    return [torch.cat(parts) for parts in found]

"""Quality of a model in some number format: its next-token distributions on texts, beside a reference's."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.core.layout import BlockLayout
from quire.layers.attention import Pool
from quire.layers.batch import Batch
from quire.models.model import DecoderModel
from quire.quant.format import NumberFormat
from quire_lab.measure.speculate import PASSAGES
from quire_lab.report.data import DataFolder

BLOCK_SIZE = 16
MAX_TOKENS = 512  # of one text
STEP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one text or several, position by position. KL divergence is from the reference, in nats."""

    num_tokens: int
    sum_kl: float
    largest_kl: float
    num_same: int  # positions whose most likely token is the reference's
    num_scored: int  # positions with a next token in the text
    sum_nll: float  # of those next tokens

    @property
    def mean_kl(self) -> float:
        return self.sum_kl / self.num_tokens

    @property
    def same_share(self) -> float:
        return self.num_same / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.sum_nll / self.num_scored)

    def record(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "mean_kl": self.mean_kl,
            "largest_kl": self.largest_kl,
            "equal_greedy_tokens": self.same_share,
            "perplexity": self.perplexity,
        }


def compare(reference: Tensor, logits: Tensor, token_ids: Sequence[int]) -> Quality:
    """Logits [T, vocab] of the text's tokens, after each of which the next one is predicted."""
    right, found = torch.log_softmax(reference, -1), torch.log_softmax(logits, -1)
    kl = (right.exp() * (right - found)).sum(-1).clamp_(min=0)
    same = int((reference.argmax(-1) == logits.argmax(-1)).sum())
    following = torch.tensor(token_ids[1:], dtype=torch.int64)
    nll = -found[:-1].gather(1, following[:, None]).sum(dtype=torch.float64)
    return Quality(len(token_ids), float(kl.sum()), float(kl.max()), same, len(token_ids) - 1, float(nll))


def total(parts: Iterable[Quality]) -> Quality:
    kept = list(parts)
    return Quality(
        sum(part.num_tokens for part in kept),
        sum(part.sum_kl for part in kept),
        max(part.largest_kl for part in kept),
        sum(part.num_same for part in kept),
        sum(part.num_scored for part in kept),
        sum(part.sum_nll for part in kept),
    )


def quality_of(
    kept: "KeptLogits", logits: Iterable[Tensor], sequences: Sequence[Sequence[int]]
) -> list[Quality]:
    """Of each text."""
    return [
        compare(kept[i], found, token_ids)
        for i, (found, token_ids) in enumerate(zip(logits, sequences, strict=True))
    ]


def texts(data: DataFolder, count: int) -> tuple[list[str], str]:
    """`count` texts or fewer, and where they come from: XQuAD's paragraphs, spread over its articles."""
    contexts = data.contexts()
    if contexts:
        count = min(count, len(contexts))
        spread = [contexts[i * len(contexts) // count] for i in range(count)]
        return spread, f"{len(spread)} English context{'s' if len(spread) > 1 else ''} of XQuAD"
    return list(PASSAGES[:count]), "passages of the benchmarks (no XQuAD in the data folder)"


def kv_dtype_of(number_format: NumberFormat) -> str:
    """As the engine chooses it."""
    return "float16" if number_format.native else str(number_format.activation_dtype).removeprefix("torch.")


def logits_of(model: DecoderModel, sequences: Sequence[Sequence[int]], kv_dtype: str) -> list[Tensor]:
    """[T, vocab] of each sequence, all in one step."""
    config = model.config
    tables, num_blocks = [], 1
    for token_ids in sequences:
        needed = -(-len(token_ids) // BLOCK_SIZE)
        tables.append(list(range(num_blocks, num_blocks + needed)))
        num_blocks += needed
    layout = BlockLayout(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, kv_dtype)
    lengths = torch.tensor([len(token_ids) for token_ids in sequences], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(token_ids)) for token_ids in sequences])
    slots = torch.cat(
        [table[0] * BLOCK_SIZE + torch.arange(len(ids)) for table, ids in zip(tables, sequences, strict=True)]
    )
    width = max(map(len, tables))
    batch = Batch(
        token_ids=torch.tensor(
            [token_id for token_ids in sequences for token_id in token_ids], dtype=torch.int32
        ),
        positions=positions.int(),
        slots=slots,
        query_starts=torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32))),
        context_lens=lengths,
        block_tables=torch.tensor(
            [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32
        ),
        logits_indices=torch.arange(len(positions)),
    )
    with torch.inference_mode():
        logits = model.logits(model(batch, Pool(layout, num_blocks)))
    return list(logits.split([len(ids) for ids in sequences]))


def each_logits(model: DecoderModel, sequences: Sequence[Sequence[int]], kv_dtype: str) -> Iterator[Tensor]:
    """As `logits_of`, in steps of bounded size: weights that are decoded for every step are decoded less often."""
    step: list[Sequence[int]] = []
    for token_ids in sequences:
        if step and sum(map(len, step)) + len(token_ids) > STEP_TOKENS:
            yield from logits_of(model, step, kv_dtype)
            step = []
        step.append(token_ids)
    yield from logits_of(model, step, kv_dtype)


class KeptLogits:
    """Logits of texts in a folder, one file each: some hundred MB for each ten thousand tokens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, index: int, logits: Tensor) -> None:
        np.save(self._folder / f"{index}.npy", logits.numpy())

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(np.load(self._folder / f"{index}.npy"))

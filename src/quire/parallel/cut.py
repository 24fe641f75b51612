"""Cut: which heads, inner columns and vocabulary rows of a model one rank holds. Parts may be of unequal size.

Heads are cut where a key-value head begins; a rank with more heads gets fewer columns of the MLP, so that all ranks
have about as many weights. Columns are cut at multiples of 64, within which int8 mixes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from quire.core.config import ModelConfig
from quire.core.errors import ConfigError

PIECE = 64  # columns of the MLP that stay together
ROWS = 16  # rows of the vocabulary that do
Span = tuple[int, int]  # from, to


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of `rank`, and what parts there are: spans by rank."""

    model: ModelConfig  # the whole one
    rank: int
    heads: tuple[Span, ...]
    kv_heads: tuple[Span, ...]  # more ranks than key-value heads: neighbours hold the same one
    inner: tuple[Span, ...]
    vocab: tuple[Span, ...]

    @property
    def size(self) -> int:
        return len(self.heads)

    @property
    def local(self) -> ModelConfig:
        """The model that this rank builds. Its vocabulary is whole: the embedding is, and rank 0 samples."""
        return replace(
            self.model,
            num_heads=_width(self.heads[self.rank]),
            num_kv_heads=_width(self.kv_heads[self.rank]),
            intermediate_size=_width(self.inner[self.rank]),
        )

    def __str__(self) -> str:
        shares = (
            f"rank {rank}: {_width(heads)}/{_width(kv)} heads, {_width(inner)} inner columns"
            for rank, (heads, kv, inner) in enumerate(zip(self.heads, self.kv_heads, self.inner, strict=True))
        )
        return "; ".join(shares)


def cut_model(model: ModelConfig, rank: int, size: int) -> Cut:
    """ConfigError with the numbers where there are more ranks than heads or columns to give them."""
    heads, kv_heads = _cut_heads(model, size)
    inner = _cut_inner(model, heads, kv_heads)
    rows = ROWS if model.vocab_size >= ROWS * size else 1
    starts = (rows * round(model.vocab_size * i / size / rows) for i in range(size))
    return Cut(model, rank, heads, kv_heads, inner, tuple(pairwise((*starts, model.vocab_size))))


def cut_layers(model: ModelConfig, num_stages: int) -> tuple[Span, ...]:
    """Layers of each stage. The first has the embedding and the output head too, which count as layers."""
    if num_stages > model.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is more than the model's {model.num_layers} layers: stage "
            f"{model.num_layers} would have none, so give at most {model.num_layers}"
        )
    if num_stages == 1:
        return ((0, model.num_layers),)
    layer = 2 * model.head_dim * (model.num_heads + model.num_kv_heads) + 3 * model.intermediate_size
    head = round(model.vocab_size / layer)  # its weights, in layers
    even = (model.num_layers + head) / num_stages
    first = max(1, min(round(even - head), model.num_layers - num_stages + 1))
    rest = divided(model.num_layers - first, num_stages - 1)
    return ((0, first), *((first + begin, first + end) for begin, end in rest))


def _cut_heads(model: ModelConfig, size: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    kv_heads, group = model.num_kv_heads, model.num_heads // model.num_kv_heads
    if size > kv_heads * group:
        raise ConfigError(
            f"tensor_parallel_size={size} is more than the model's {kv_heads} key-value heads × {group} query heads of "
            f"each: rank {kv_heads * group} would have none, so give at most {kv_heads * group}"
        )
    if size <= kv_heads:
        spans = tuple(divided(kv_heads, size))
        return tuple((first * group, last * group) for first, last in spans), spans
    heads, shared = [], []
    for kv_head, (first, last) in enumerate(divided(size, kv_heads)):  # ranks that share this head
        for begin, end in divided(group, last - first):
            heads.append((kv_head * group + begin, kv_head * group + end))
            shared.append((kv_head, kv_head + 1))
    return tuple(heads), tuple(shared)


def _cut_inner(model: ModelConfig, heads: tuple[Span, ...], kv_heads: tuple[Span, ...]) -> tuple[Span, ...]:
    """Pieces of the MLP so that attention and MLP together are about equal on all ranks."""
    size, inner = len(heads), model.intermediate_size
    piece = PIECE if inner % PIECE == 0 and inner >= PIECE * size else 1
    if inner < size:
        raise ConfigError(f"tensor_parallel_size={size} is more than the {inner} inner columns: lower it")
    attention = [
        2 * model.head_dim * (_width(query) + _width(key)) for query, key in zip(heads, kv_heads, strict=True)
    ]
    even = (sum(attention) + 3 * inner) / size
    wanted = [max(1.0, (even - own) / (3 * piece)) for own in attention]
    counts = [max(1, round(number)) for number in wanted]
    while (excess := sum(counts) - inner // piece) != 0:
        step = -1 if excess > 0 else 1
        able = [rank for rank in range(size) if counts[rank] + step >= 1]
        counts[max(able, key=lambda rank: step * (wanted[rank] - counts[rank]))] += step
    return tuple(pairwise(accumulate((0, *(piece * count for count in counts)))))


def divided(count: int, parts: int) -> Iterator[Span]:
    """Spans of nearly equal size, the larger ones first."""
    sizes = [count // parts + (part < count % parts) for part in range(parts)]
    return pairwise(accumulate((0, *sizes)))


def _width(span: Span) -> int:
    return span[1] - span[0]

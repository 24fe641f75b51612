"""Layers of encoder-decoder models: the decoder's batch, attention over the encoder's pages, scores by distance."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import ModuleType

import torch
from torch import Tensor

from quire.layers.attention import Pool
from quire.layers.batch import AttentionPlans, Batch
from quire.layers.parameters import Loader
from quire.quant.encoded import Weight, floats


@dataclass(frozen=True, slots=True)
class CrossBatch(Batch):
    """A decoder's batch. Positions, contexts and block tables begin with its first token.

    K and V of the encoder are in the blocks before that. Every token is a row of its own there: it sees all of them.
    """

    _: KW_ONLY
    cross_starts: Tensor  # [T + 1] int32: 0, 1, 2, …
    cross_lens: Tensor  # [T] int32, tokens that the encoder took
    cross_tables: Tensor  # [T, max_blocks] int32
    cross_plans: AttentionPlans | None = None  # as `plans`


@dataclass(frozen=True, slots=True, eq=False)
class CrossAttention:
    """A decoder layer's attention over the encoder's output, whose K and V were stored once. Has no weights."""

    rotary: ModuleType
    attention: ModuleType
    index: int  # which layer of the pool
    num_heads: int
    head_dim: int
    scale: float

    def store(self, kv: Tensor, positions: Tensor, slots: Tensor, pool: Pool) -> None:
        """kv [T, 2 * heads * head_dim] of the encoder's tokens, to slots [T] of their pages."""
        self.rotary.rotate_and_store(
            kv,
            0,
            self.num_heads,
            self.head_dim,
            None,
            positions,
            slots,
            *pool.layer(self.index),
            *pool.scales(self.index),
        )

    def __call__(self, query: Tensor, batch: CrossBatch, pool: Pool) -> Tensor:
        """query [T, heads * head_dim] -> [T, heads * head_dim]."""
        heads = query.view(query.shape[0], self.num_heads, self.head_dim)
        k_scales, v_scales = pool.scales(self.index)
        where = (batch.cross_starts, batch.cross_lens, batch.cross_tables)
        planned = {}
        if batch.cross_plans is not None:
            planned = {"plan": batch.cross_plans.of(0, False), "max_query_len": 1}
        attended: Tensor = self.attention.paged_attention(
            heads,
            *pool.layer(self.index),
            *where,
            self.scale,
            k_scales=k_scales,
            v_scales=v_scales,
            **planned,
        )
        return attended


class DistanceTable:
    """What T5's attention adds to scores: a learned number per head and bucket of distances, kept by distance.

    Attention holds `table` from the start, so loading fills it in place.
    """

    def __init__(
        self, num_heads: int, num_buckets: int, max_distance: int, both_sides: bool, device: torch.device
    ) -> None:
        """Beyond `max_distance` all are one bucket. `both_sides`: keys may follow the query."""
        self._shape = (num_buckets, num_heads)
        distances = torch.arange(-max_distance, max_distance + 1)
        self._buckets = buckets(distances, num_buckets, max_distance, both_sides)
        self.table = torch.zeros(num_heads, len(distances), dtype=torch.float32, device=device)

    def loader(self) -> Loader:
        return Loader(self._shape, self._take)

    def _take(self, weight: Weight) -> None:
        by_bucket = floats(weight).float()
        self.table.copy_(by_bucket[self._buckets.to(by_bucket.device)].t())

    def state(self) -> dict[str, Tensor]:
        return {"scores": self.table}

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        self.table.copy_(state["scores"])


def buckets(distances: Tensor, num_buckets: int, max_distance: int, both_sides: bool) -> Tensor:
    """The bucket of each distance, key minus query: one each while they are small, then ever wider ones."""
    first = torch.zeros_like(distances)
    if both_sides:
        num_buckets //= 2
        first = torch.where(distances > 0, num_buckets, 0)
        away = distances.abs()
    else:
        away = (-distances).clamp(min=0)
    exact = num_buckets // 2
    wide = (
        torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    )
    return first + torch.where(away < exact, away, (exact + wide.long()).clamp(max=num_buckets - 1))

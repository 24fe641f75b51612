"""Batch: a step's tensors. One ragged run of tokens, prompts and decodes mixed, no padding."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quire.layers.lora import LoraBatch


@dataclass(frozen=True, slots=True)
class Span:
    """A row's tokens first … last - 1 of the batch, which are its whole context: nothing of it is cached."""

    first: int
    last: int
    padded: int  # as many tokens as it is computed with


@dataclass(slots=True, eq=False)
class AttentionPlans:
    """How attention divides one batch's work: a plan per sliding window, made on first use, shared by all layers."""

    planner: Any  # the kernel's
    query_starts: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32
    paged_lens: Tensor  # [R] int32, zero for rows whose attention needs no pages
    num_tokens: int
    block_tables: Tensor  # [R, max_blocks] int32
    _plans: dict[tuple[int, bool], Any] = field(default_factory=dict)

    def of(self, window: int, whole: bool) -> Any:
        """The plan for this window, of all rows (`whole`) or without the fresh ones."""
        if (window, whole) not in self._plans:
            lens = self.context_lens if whole else self.paged_lens
            self._plans[window, whole] = self.planner.plan(
                self.query_starts,
                lens,
                lens.shape[0],
                window=window,
                num_tokens=self.num_tokens,
                # rows that read pages together have one position, which slopes cannot have
                block_tables=None if whole else self.block_tables,
            )
        return self._plans[window, whole]


@dataclass(frozen=True, slots=True)
class TreeMasks:
    """What each query sees of its row's token tree; see the reference of attention."""

    starts: Tensor  # [T] int32, where the tree begins; -1: the row has none
    ancestors: Tensor  # [T] int64, bit n: node n is seen


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where the K and V of one group of layers lie, see LayerGroups."""

    slots: Tensor  # [T] int64, block_id * block_size + offset: where the token's K and V go
    block_tables: Tensor  # [R, max_blocks] int32


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R rows. Row r's tokens are query_starts[r]:query_starts[r + 1].

    A row's last query sits at position context_lens[r] - 1 (or slot, where a token tree's nodes lie in
    order); K and V of the batch's own tokens are stored into the pool before attention reads it.
    """

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32, in the sequence: of a token tree's nodes by their depth
    slots: Tensor  # [T] int64, as in GroupTables, of the first group of layers
    query_starts: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32, positions that exist after this step
    block_tables: Tensor  # [R, max_blocks] int32, of the first group of layers
    logits_indices: Tensor | None  # [L] ints, tokens whose hidden state is turned into logits; None: all
    max_query_len: int | None = None  # of any row, where the host knows it
    fresh: tuple[Span, ...] = ()  # rows that are long enough to be read from the batch itself, not from pages
    plans: AttentionPlans | None = None  # where attention's kernel divides its work once for all layers
    trees: TreeMasks | None = None  # where rows have token trees
    lora: LoraBatch | None = None  # adapters of the T tokens; None: none of them has any
    wanted_lora: LoraBatch | None = None  # adapters of the tokens at logits_indices
    more_groups: tuple[GroupTables, ...] = ()  # of layers after the first

    def group(self, index: int) -> "GroupTables | Batch":
        """The tables of a group of layers."""
        return self.more_groups[index - 1] if index else self

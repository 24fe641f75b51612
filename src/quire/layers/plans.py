"""AttentionPlans: how attention divides one batch's work, made once per step and shared by all layers."""

from typing import Any

from torch import Tensor


class AttentionPlans:
    """One plan per sliding window, made when the first layer that has it asks; `planner` is the kernel's."""

    def __init__(
        self,
        planner: Any,
        query_starts: Tensor,  # [R + 1] int32
        context_lens: Tensor,  # [R] int32
        paged_lens: Tensor,  # [R] int32, zero for rows whose attention needs no pages
        num_tokens: int,
        block_tables: Tensor,  # [R, max_blocks] int32
    ) -> None:
        self._planner = planner
        self._query_starts = query_starts
        self._context_lens = context_lens
        self._paged_lens = paged_lens
        self._num_tokens = num_tokens
        self._block_tables = block_tables
        self._plans: dict[int, Any] = {}

    def of(self, window: int) -> Any:
        """Only without a window may fresh rows be left out."""
        if window not in self._plans:
            lens = self._context_lens if window else self._paged_lens
            self._plans[window] = self._planner.plan(
                self._query_starts,
                lens,
                lens.shape[0],
                window=window,
                num_tokens=self._num_tokens,
                block_tables=self._block_tables,
            )
        return self._plans[window]

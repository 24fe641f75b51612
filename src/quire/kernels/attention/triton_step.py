"""StepPlanner: the tuning for each number of rows, measured on this GPU or the default."""

from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention.triton_plan import AttentionPlan, AttentionPlanner
from quire.kernels.attention.tuning import TUNINGS, HeadShape, Ranges, key_of, load


class StepPlanner:
    """Plans by an AttentionPlanner per range of rows; each owns its buffers, so all may be captured."""

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: str | torch.device,
        *,
        block_size: int | None = None,  # without it or the next, measured tiles cannot be looked up
        kv_dtype: str | None = None,  # as the pool's layout names it
        dtype: torch.dtype = torch.bfloat16,  # of q
        deterministic: bool = False,
        **settings: Any,
    ) -> None:
        """The rest as AttentionPlanner has it. A deterministic plan has one tuning for all."""
        self._block_size = block_size or 0
        measured = None
        if block_size is not None and kv_dtype is not None and not deterministic:
            group = num_heads // num_kv_heads
            heads = HeadShape(num_kv_heads, group, head_dim, kv_dtype, dtype.itemsize, block_size)
            measured = load(key_of(heads, device))
        # Where the tiles come from, for the start's report.
        self.tiles = "fixed" if deterministic else "default" if measured is None else "tuned"
        ranges: Ranges = TUNINGS if measured is None else measured.ranges
        self._planners: list[tuple[int, AttentionPlanner]] = []
        for limit, tuning in ranges:
            rows = max_rows if deterministic else min(limit, max_rows)
            planner = AttentionPlanner(
                rows, num_heads, num_kv_heads, head_dim, device,
                dtype=dtype, deterministic=deterministic, tuning=tuning, **settings,
            )  # fmt: skip
            self._planners.append((rows, planner))
            if rows == max_rows:
                break

    @property
    def range_sizes(self) -> tuple[int, ...]:
        """The most rows of each range: one step of each size compiles all kernels."""
        return tuple(rows for rows, _ in self._planners)

    def plan(
        self,
        query_starts: Tensor,  # [num_rows + 1] int32
        context_lens: Tensor,  # [num_rows] int32
        num_rows: int,
        *,
        window: int = 0,
        num_tokens: int | None = None,
        block_tables: Tensor | None = None,  # [num_rows, max_blocks] int32
    ) -> AttentionPlan:
        planner = next(planner for rows, planner in self._planners if num_rows <= rows)
        shared = block_tables if self._block_size else None
        return planner.plan(
            query_starts, context_lens, num_rows,
            window=window, num_tokens=num_tokens, block_tables=shared, block_size=self._block_size,
        )  # fmt: skip

"""StepPlanner: which tuning serves a step of so many rows. Measured on an H200 with benchmarks/attention_gpu.py."""

from typing import Any

from torch import Tensor

from quire.kernels.attention.triton_plan import AttentionPlan, AttentionPlanner, Tuning

# (up to so many rows, tuning). One row needs many small pieces to reach every multiprocessor; tens of rows need
# programs that start fast; hundreds keep the memory busy whatever they do, and want deep pipelines.
TUNINGS = (
    (16, Tuning(decode_tile=32, decode_warps=2, decode_stages=2, decode_pieces=16)),
    (128, Tuning(decode_tile=64, decode_warps=2, decode_stages=2, decode_pieces=4)),
    (1 << 30, Tuning(decode_tile=64, decode_warps=4, decode_stages=3, decode_pieces=8)),
)


class StepPlanner:
    """Plans by an AttentionPlanner per range of rows; each owns its buffers, so all may be captured."""

    def __init__(self, max_rows: int, *sizes: Any, deterministic: bool = False, **settings: Any) -> None:
        """Everything but the tuning as AttentionPlanner has it. A deterministic plan has one tuning for all."""
        ranges = ((max_rows, None),) if deterministic else TUNINGS
        self._planners: list[tuple[int, AttentionPlanner]] = []
        for limit, tuning in ranges:
            rows = min(limit, max_rows)
            planner = AttentionPlanner(rows, *sizes, deterministic=deterministic, tuning=tuning, **settings)
            self._planners.append((rows, planner))
            if rows == max_rows:
                break

    def plan(
        self,
        query_starts: Tensor,  # [num_rows + 1] int32
        context_lens: Tensor,  # [num_rows] int32
        num_rows: int,
        *,
        window: int = 0,
        num_tokens: int | None = None,
    ) -> AttentionPlan:
        planner = next(planner for rows, planner in self._planners if num_rows <= rows)
        return planner.plan(query_starts, context_lens, num_rows, window=window, num_tokens=num_tokens)

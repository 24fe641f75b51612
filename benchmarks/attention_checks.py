"""Attention's kernels against float64: ragged batches and trees, of usual and of wide heads.

`attention_gpu.py --sections check` runs these on a GPU. Without one, in Triton's interpreter, with short contexts:

    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/attention_checks.py
"""

import sys

import torch
from attention_cases import DEVICE, REPORT, Case, Heads, error, make_case, record, reference

from quire.core.draft import ancestors, depths
from quire.core.ints import ints
from quire.kernels.attention import reference as plain
from quire.kernels.attention import triton as attention
from quire.kernels.attention.triton import AttentionTuning

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
VARIANTS: dict[str, tuple[AttentionTuning, bool]] = {
    "default": (AttentionTuning(), False),
    "unfused": (AttentionTuning(fused_reduction=False), False),
    "deterministic": (AttentionTuning(), True),
}
USUAL = [
    Heads(), Heads(3, 3, 64), Heads(2, 8, 80, 1), Heads(4, 1, 96, 128, torch.float16),
    Heads(2, 4, 64, 16, torch.float32),
]  # fmt: skip
WIDE = [Heads(2, group, size, block) for group, size in ((4, 192), (2, 256)) for block in (16, 1)]
CONTEXTS = [1, 70, 5, 1300, 64, 4000, 900, 33, 2048, 17]
QUERIES = [1, 1, 5, 400, 3, 1, 1, 33, 300, 2]
PARENTS = ints([-1, 0, 1, 2, -1, 4, 5, 6, -1, 8, 9, 10])  # three branches of four


def check_batches(shapes: list[Heads], contexts: list[int], queries: list[int]) -> None:
    """Prompts, chunks behind a prefix and decodes in one batch, with and without a window."""
    for heads in shapes:
        case = make_case(heads, contexts, queries, poison=True)
        for window in (0, 100):
            expected = reference(case, window)
            for name, (tuning, deterministic) in VARIANTS.items():
                plan = case.planner(tuning, deterministic).plan(
                    case.query_starts, case.context_lens, len(contexts), window=window
                )
                out = torch.full_like(expected, float("nan"), dtype=heads.dtype)
                attention.paged_attention(*case.arguments(0), window, out, plan=plan)
                _note(case, name, error(out, expected), window=window)


def check_trees(shapes: list[Heads], contexts: list[int]) -> None:
    """A tree at the end of each of these contexts, beside a decode and a chunk."""
    count = len(PARENTS) + 1
    for heads in shapes:
        case = make_case(heads, [*contexts, 90, 65], [count] * len(contexts) + [1, 40])
        starts, seen, positions = [], [], []
        for context, queries in zip(case.contexts, case.queries, strict=True):
            if queries != count:
                starts, seen = starts + [-1] * queries, seen + [0] * queries
                positions += range(context - queries, context)
                continue
            base = context - len(PARENTS)
            starts, seen = starts + [base] * count, [*seen, 0, *ancestors(PARENTS)]
            positions += [base - 1, *(base + depth for depth in depths(PARENTS))]
        masks = (
            torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            torch.tensor(seen, dtype=torch.int64, device=DEVICE),
        )
        q, *where = case.arguments(0)
        exact = [part.float() for part in (q, *where[:2])]
        expected = plain.paged_attention(*exact, *where[2:], 0, None, *masks).double()
        for name in ("default", "deterministic"):
            found = attention.paged_attention(
                *case.arguments(0), 0, None, *masks, torch.tensor(positions, dtype=torch.int32, device=DEVICE),
                deterministic=name == "deterministic",
            )  # fmt: skip
            _note(case, name, error(found, expected), trees=len(contexts))


def _note(case: Case, variant: str, found: float, **more: int) -> None:
    heads = case.heads
    what = f"{heads.kv_heads}x{heads.group}x{heads.head_dim} block {heads.block_size} {str(heads.dtype)[6:]}"
    record("check", what=what, **more, variant=variant, error=found, ok=found < LIMITS[heads.dtype])


def main() -> None:
    """The wide heads, as far as the interpreter comes in a minute."""
    check_batches(WIDE, [1, 70, 150], [1, 1, 40])
    check_trees(WIDE, [60])
    sys.exit(sum(not line["ok"] for line in REPORT["check"]))


if __name__ == "__main__":
    main()

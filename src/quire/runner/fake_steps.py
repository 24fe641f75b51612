"""fake_steps: small steps that make every kernel of a runner compile before a request needs it."""

from collections.abc import Iterator

from quire.core.ints import ints
from quire.core.sampling import SamplingParams
from quire.core.step import RowStart, Step

PROMPT = 20  # tokens, where the limits allow
DRAWN = SamplingParams(temperature=0.8, top_p=0.95)
PENALISED = DRAWN.changed(presence_penalty=0.5)  # its logits are edited first


def fake_steps(
    max_rows: int, max_tokens: int, max_model_len: int, block_size: int, prompt: int = PROMPT
) -> Iterator[Step]:
    """Prompts, then prompts beside decodes, then decodes. Every block is block 0, so nothing of value is written."""
    rows = range(min(2, max_rows, max_tokens))
    prompt = max(1, min(prompt, max_tokens // len(rows), max_model_len // 2))
    num_blocks = -(-(prompt + 1) // block_size)
    yield _step(0, rows, [0] * len(rows), [prompt] * len(rows), num_blocks)
    if len(rows) > 1:
        yield _step(1, rows, [0, prompt], [prompt, 1], num_blocks, PENALISED)
    yield _step(2, rows, [prompt] * len(rows), [1] * len(rows), num_blocks)


def _step(
    step_id: int,
    rows: range,
    computed: list[int],
    counts: list[int],
    num_blocks: int,
    second: SamplingParams = DRAWN,  # of the second row
) -> Step:
    samplings = (SamplingParams(temperature=0.0), second)
    blocks = ints([0] * num_blocks)
    tokens = ints([0] * (max(a + b for a, b in zip(computed, counts, strict=True))))
    starts = tuple(
        RowStart(row, tokens, blocks, samplings[row], seed=0, sample_index=0, num_prompt_tokens=1)
        for row in rows
    )
    nothing = ints()
    return Step(
        step_id=step_id,
        starts=starts,
        rows=ints(rows),
        num_computed=ints(computed),
        num_tokens=ints(counts),
        table_rows=nothing,
        table_indices=nothing,
        table_blocks=nothing,
        copy_sources=nothing,
        copy_targets=nothing,
        sample_sources=ints(range(len(rows))),
        sample_rows=ints(rows),
    )

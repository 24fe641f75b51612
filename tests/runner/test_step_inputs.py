"""The arrays of a step are those that a walk over its rows, token by token, would give."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.core.request import ints
from quire.core.sampling import SamplingParams
from quire.core.step import RowStart, Step
from quire.runner.step_inputs import RowSettings, step_inputs, token_inputs

NOTHING = ints()
ROWS = 8


def make_step(rows, samples=(), offsets=()):
    """rows: (row, computed, count) each; samples: indices into them."""
    return Step(
        step_id=0,
        starts=(),
        rows=ints(row for row, _, _ in rows),
        num_computed=ints(computed for _, computed, _ in rows),
        num_tokens=ints(count for _, _, count in rows),
        table_rows=NOTHING,
        table_indices=NOTHING,
        table_blocks=NOTHING,
        copy_sources=NOTHING,
        copy_targets=NOTHING,
        sample_sources=ints(samples),
        sample_rows=ints(rows[i][0] for i in samples),
        sample_offsets=ints(offsets),
    )


def settings_with(prompts=None):
    """prompts: by row, (num_prompt_tokens, prompt_logprobs)."""
    settings = RowSettings(ROWS, 50)
    for row, (length, num_top) in (prompts or {}).items():
        sampling = SamplingParams(prompt_logprobs=num_top)
        settings.start(RowStart(row, ints([1] * length), NOTHING, sampling, 0, 0, length))
    return settings


@st.composite
def steps(draw):
    numbers = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True))
    rows = [(row, draw(st.integers(0, 20)), draw(st.integers(1, 5))) for row in numbers]
    samples = draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    offsets = [draw(st.integers(0, rows[i][2] - 1)) for i in samples] if draw(st.booleans()) else []
    asked = {row: (draw(st.integers(1, 25)), draw(st.sampled_from([None, 0, 3]))) for row in numbers}
    return rows, samples, offsets, asked


@given(steps())
def test_tokens_are_those_of_the_rows_in_order(drawn):
    rows, samples, offsets, asked = drawn
    inputs = step_inputs(make_step(rows, samples, offsets), settings_with(asked))
    tokens = token_inputs(inputs)
    walked = [(row, computed + i) for row, computed, count in rows for i in range(count)]
    assert list(zip(tokens.token_rows().tolist(), tokens.places().tolist(), strict=True)) == walked
    wanted = []
    for sample, source in enumerate(samples):
        row, computed, count = rows[source]
        last = computed + count - 1 - (offsets[sample] if offsets else 0)
        wanted.append(walked.index((row, last)))
        assert tokens.sample_positions[sample] == last + 1
    assert tokens.wanted_rows().tolist() == [rows[i][0] for i in samples]
    for row, computed, count in rows:
        length, num_top = asked[row]
        scored = [position for position in range(computed, computed + count) if position < length - 1]
        if num_top is not None and scored:
            wanted += [walked.index((row, position)) for position in scored]
    assert tokens.wanted.tolist() == wanted
    assert tokens.sample_positions.dtype == tokens.wanted.dtype == np.int64
    assert tokens.are_all_sampled == (wanted == list(range(len(walked))) and not inputs.scored)


def test_a_decode_is_one_token_of_each_row_sampled_in_order():
    settings = settings_with()
    decode = [(3, 7, 1), (1, 4, 1)]
    assert step_inputs(make_step(decode, [0, 1]), settings).is_decode
    assert not step_inputs(make_step(decode, [1, 0]), settings).is_decode
    assert not step_inputs(make_step(decode, [0]), settings).is_decode
    assert not step_inputs(make_step([(3, 7, 2), (1, 4, 1)], [0, 1]), settings).is_decode
    assert not step_inputs(make_step(decode, [0, 1]), settings_with({3: (12, 1)})).is_decode


def test_a_verified_draft_has_all_its_tokens_sampled():
    tokens = token_inputs(step_inputs(make_step([(2, 5, 3)], [0, 0, 0], [2, 1, 0]), settings_with()))
    assert tokens.are_all_sampled
    assert tokens.sample_positions.tolist() == [6, 7, 8]

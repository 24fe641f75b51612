"""Measured tiles: what is kept comes back, what is damaged or foreign is ignored, and only the faster wins."""

import json
import statistics
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels import registry
from quire.kernels.attention import autotune
from quire.kernels.attention import tuning as tiles
from quire.kernels.attention.tuning import (
    TUNINGS,
    AttentionTuning,
    HeadShape,
    MeasuredTiles,
    TunedTiles,
    TuningKey,
)
from quire.kernels.measurement import tuned_folder

HEADS = HeadShape(num_kv_heads=2, group=2, head_dim=16, kv_dtype="float32", query_bytes=4, block_size=16)
KEY = TuningKey("A chip", "9.0", "3.6.0", "0123", HEADS)
OTHER = AttentionTuning(decode_tile=32, decode_warps=4, decode_stages=4, decode_pieces=3, prompt_tile=32)
FOUND = TunedTiles(
    tuple((limit, OTHER if limit < 100 else tuning) for limit, tuning in TUNINGS),
    (MeasuredTiles("decodes", 5.0, 4.5, "tile 32"),),
)


# --- what is kept


def test_what_is_kept_comes_back(empty_cache):
    assert tiles.cache.load(KEY) is None
    assert tiles.store(KEY, FOUND).parent == empty_cache / "tuned"
    assert tiles.cache.load(KEY) == FOUND
    assert tiles.cache.entries() == [(KEY, FOUND)]
    assert [path.name[0] for path in tuned_folder().iterdir()] == ["a"]  # no scratch file stays
    assert tiles.cache.forget() == 1
    assert tiles.cache.load(KEY) is None
    assert tiles.cache.forget() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"chip": "Another"},
        {"capability": "10.0"},
        {"triton": "3.7.0"},
        {"code": "4567"},
        {"heads": replace(HEADS, head_dim=32)},
        {"heads": replace(HEADS, kv_dtype="float8_e4m3fn")},
        {"heads": replace(HEADS, block_size=32)},
        {"heads": replace(HEADS, query_bytes=2)},
    ],
)
def test_tiles_serve_what_they_were_measured_for_and_nothing_else(empty_cache, change):
    path, other = tiles.store(KEY, FOUND), replace(KEY, **change)
    assert tiles.cache.load(other) is None
    path.rename(tiles.cache.path(other))  # and a file under a wrong name does not either
    assert tiles.cache.load(other) is None


def _damaged(record: dict, *places: object, value: object) -> str:
    at = record
    for place in places[:-1]:
        at = at[place]
    at[places[-1]] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    ("places", "value"),
    [
        (("format",), 0),
        (("ranges",), []),
        (("ranges", 0, "max_rows"), 17),
        (("ranges", 0, "tuning"), {}),
        (("ranges", 0, "tuning"), list(asdict(OTHER))),
        (("ranges", 0, "tuning", "decode_tile"), 0),
        (("ranges", 0, "tuning", "decode_tile"), 48),
        (("ranges", 0, "tuning", "decode_tile"), 32.0),
        (("ranges", 0, "tuning", "decode_warps"), True),
        (("ranges", 0, "tuning", "decode_stages"), None),
        (("ranges", 0, "tuning", "prompt_rows"), "128"),
        (("ranges", 0, "tuning", "unheard_of"), 1),
        (("key",), 7),
        (("key", "heads"), {"num_kv_heads": 2}),
        (("measured", 0, "best_us"), 10**400),
    ],
)
def test_a_file_with_a_wrong_value_is_passed_over(empty_cache, places, value):
    path = tiles.store(KEY, FOUND)
    path.write_text(_damaged(json.loads(path.read_text()), *places, value=value))
    assert tiles.cache.load(KEY) is None
    assert tiles.cache.entries() == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_corrupt_file_is_passed_over_with_a_debug_line(empty_cache, caplog, content):
    path = tiles.store(KEY, FOUND)
    path.write_bytes(content)
    with caplog.at_level("DEBUG", logger="quire"):
        assert tiles.cache.load(KEY) is None
    assert "the default tiles serve" in caplog.text
    assert not [line for line in caplog.records if line.levelname != "DEBUG"]


def test_a_folder_that_is_a_file_is_no_error(empty_cache):
    (empty_cache / "tuned").write_text("")
    assert tiles.cache.load(KEY) is None
    assert tiles.cache.entries() == []


# --- the choice

seconds = st.floats(1e-7, 1e-2)


@st.composite
def timings(draw: st.DrawFn) -> dict[int, list[list[float]]]:
    cases, candidates = draw(st.integers(1, 3)), draw(st.integers(0, 7))
    default = [[draw(seconds) for _ in range(cases)] for _ in range(2)]
    near = st.floats(0.9, 1.05)
    others = {
        index: [[draw(near) * one for one in times] for times in default]
        for index in range(1, candidates + 1)
    }
    return {0: default, **others}


def _gain(times: list[float], default: list[float]) -> float:
    return 1 - statistics.geometric_mean(times) / statistics.geometric_mean(default)


@given(timings())
def test_the_choice_is_never_slower_than_the_default(times):
    chosen = autotune.choose(times)
    if chosen:
        for new, old in zip(times[chosen], times[0], strict=True):
            assert all(one <= other * 1.01001 for one, other in zip(new, old, strict=True))
            assert _gain(new, old) >= 0.01999


@given(timings(), st.integers(0, 7))
def test_what_is_faster_everywhere_is_taken(times, index):
    index = min(index, len(times))
    times[index or len(times)] = [[one * 0.5 for one in row] for row in times[0]]
    chosen = autotune.choose(times)
    assert autotune.overall(times[chosen]) <= 0.51 * autotune.overall(times[0])


@pytest.mark.parametrize(
    ("ratios", "chosen"),
    [
        ([[0.97, 0.97], [0.97, 0.97]], 1),
        ([[0.985, 0.985], [0.985, 0.985]], 0),  # too little
        ([[0.90, 1.005], [0.90, 1.005]], 1),
        ([[0.50, 1.02], [0.50, 1.02]], 0),  # a loss somewhere
        ([[0.90, 0.90], [0.99, 0.99]], 0),  # once only
        ([[1.0, 1.0], [1.0, 1.0]], 0),
    ],
)
def test_the_rule(ratios, chosen):
    default = [[2e-6, 5e-5], [2.1e-6, 5.1e-5]]
    times = [
        [a * b for a, b in zip(row, base, strict=True)] for row, base in zip(ratios, default, strict=True)
    ]
    assert autotune.choose({0: default, 1: times}) == chosen


def test_every_range_has_its_default_first_and_eight_candidates_at_most():
    assert [one.max_rows for one in autotune.TILE_CHOICES] == [limit for limit, _ in TUNINGS] + [0]
    for choice in autotune.TILE_CHOICES:
        default = dict(TUNINGS).get(choice.max_rows, TUNINGS[0][1])
        assert choice.candidates[0] == default
        assert len(set(choice.candidates)) == len(choice.candidates) <= 8
        for lengths in choice.batches:
            assert len(lengths.contexts) <= (choice.max_rows or 1 << 30)
            assert len(lengths.contexts) == len(lengths.queries)
        for tuning in choice.candidates:  # a file with it would be taken
            assert tiles._tuning(asdict(tuning)) == tuning


# --- the whole, in the interpreter


@pytest.fixture
def interpreter():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("this runs in the interpreter, on CPU tensors")
    torch.manual_seed(3)


def _choices() -> list[autotune.TileChoice]:
    """Two candidates per range, on batches that the interpreter can do."""
    decodes = autotune.BatchLengths((40, 3), (1, 1))
    prompts = autotune.BatchLengths((20,), (6,))
    return [
        replace(one, batches=(decodes if one.max_rows else prompts,), candidates=one.candidates[:2])
        for one in autotune.TILE_CHOICES
    ]


@pytest.fixture
def marked(monkeypatch):
    """What is measured says with which tiles, so that a clock can know."""
    launches = autotune.TimedBatch.launches

    def with_mark(batch, tuning, calls=1, window=0):
        run = launches(batch, tuning, calls, window)
        run.tuning = tuning
        return run

    monkeypatch.setattr(autotune.TimedBatch, "launches", with_mark)


def test_tuning_end_to_end(interpreter, marked, empty_cache):
    choices, lines = _choices(), []
    faster = {choice.candidates[1] for index, choice in enumerate(choices) if index != 1}

    def clock(run) -> float:
        run()
        return 0.9e-5 if run.tuning in faster else 1e-5

    found = autotune.tune(HEADS, torch.float32, "cpu", lines.append, choices=choices, clock=clock, calls=1)
    assert [line.chosen == "default" for line in found.measured] == [False, True, False]
    assert len(lines) == 6
    assert "decodes, 1 to 16 rows, 2 of 2: tile 32, 2 warps, 2 stages, 8 pieces: 9.00 µs" in lines
    prompt = choices[-1].candidates[1]
    for (_, tuning), choice, best in zip(found.ranges, choices, (1, 0), strict=False):
        assert tuning.decode_pieces == choice.candidates[best].decode_pieces
        assert tuning.prompt_stages == prompt.prompt_stages

    step = registry.load("attention", "triton_plan")
    sizes = {"max_tokens": 8, "dtype": torch.float32, "kv_dtype": "float32"}
    assert step.StepPlanner(20, 4, 2, 16, "cpu", block_size=16, **sizes).tiles == "default"
    tiles.store(tiles.key_of(HEADS, "cpu"), found)
    planner = step.StepPlanner(20, 4, 2, 16, "cpu", block_size=16, **sizes)
    assert planner.tiles == "tuned"
    assert [one.tuning.decode_pieces for _, one in planner._planners] == [8, 4]
    assert step.StepPlanner(20, 4, 2, 16, "cpu", block_size=32, **sizes).tiles == "default"
    fixed = step.StepPlanner(20, 4, 2, 16, "cpu", block_size=16, max_context=64, deterministic=True, **sizes)
    assert fixed.tiles == "fixed"
    assert len(fixed._planners) == 1


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("raise", "passed over, out of resource: shared memory"),
        ("wrong", "passed over, its results are off by"),
    ],
)
def test_a_candidate_that_fails_or_is_wrong_is_passed_over(interpreter, monkeypatch, spoil, said):
    choices, lines = _choices()[:1] + _choices()[-1:], []
    bad = choices[0].candidates[1]
    result = autotune.TimedBatch.result

    def spoilt(batch, tuning, window=0):
        if tuning == bad and spoil == "raise":
            raise RuntimeError("out of resource: shared memory\nRequired: 1")
        return result(batch, tuning, window) * (1.1 if tuning == bad else 1.0)

    monkeypatch.setattr(autotune.TimedBatch, "result", spoilt)
    found = autotune.tune(
        HEADS, torch.float32, "cpu", lines.append, choices=choices, clock=lambda run: 1e-5, calls=1
    )
    assert said in lines[1]
    assert found.measured[0].chosen == "default"


def test_luck_is_measured_again(interpreter, marked):
    choices, lines, counts = [_choices()[0], _choices()[-1]], [], {}

    def clock(run) -> float:  # one candidate is faster, but only at first
        counts[run.tuning] = counts.get(run.tuning, 0) + 1
        return 0.9e-5 if run.tuning == choices[0].candidates[1] and counts[run.tuning] <= 2 else 1e-5

    found = autotune.tune(HEADS, torch.float32, "cpu", lines.append, choices=choices, clock=clock, calls=1)
    assert found.measured[0].chosen == "default"
    assert any(line.endswith("passed over, not faster when measured again") for line in lines)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_a_batch_keeps_to_its_memory(kv_dtype):
    lengths = autotune.BatchLengths((4096, 4096), (1, 1))
    heads = replace(HEADS, kv_dtype=kv_dtype)
    batch = autotune.make_batch(heads, torch.float16, lengths, torch.device("cpu"), 1 << 16)
    assert batch.pool.nbytes < 1.1 * (1 << 16)
    assert batch.pool.dtype is getattr(torch, kv_dtype)

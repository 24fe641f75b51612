"""Speculation changes how long an answer takes, never its tokens: greedy, drawn, forked, masked, cut into chunks."""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from quire.core.config import EngineConfig, parse_speculative
from quire.core.errors import ConfigError
from quire.core.request import Ints, Request
from quire.core.sampling import SamplingParams
from quire.core.step import Step
from quire.engine import build as building
from quire.engine.build.weights import check_trees
from quire.engine.engine import Engine
from quire.runner.runner import Runner
from quire_lab.baselines.synthetic_drafts import SyntheticProposer
from tests.engine.test_device_runner import SHAPE, DeviceRunner, PaddingRunner

REPEATING = [5, 6, 7, 8, 9, 10, 11, 12] * 4
PROMPTS = [REPEATING, [3, 4, *REPEATING, 5, 6, 7], list(range(10, 60)), [9] * 17, REPEATING[:20], [2, 3] * 9]
SAMPLINGS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.7, seed=3, n=3, max_tokens=14),
    SamplingParams(temperature=1.0, top_p=0.8, max_tokens=20, presence_penalty=1.0, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=16, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.7, top_k=5, seed=8, max_tokens=30, min_tokens=4, stop_token_ids=(5, 17, 40)),
    SamplingParams(temperature=0, max_tokens=12, bad_words_token_ids=((6, 7), (9,)), logit_bias={11: 2.0}),
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
TREES = {**NGRAM, "tree_width": 3}
# Products of which a row's bits do not depend on the batch: rounding to int8 pages would show a difference.
EXACT = {"dtype": "auto", "quantization": "int8"}
Answers = dict[tuple[str, int], tuple]
FORKING = [5, 6, 7, 8, 5, 6, 9, 5, 6, 11, 4, 5, 6, 7, 9, 3, 5, 6]  # 5, 6 went on in four ways


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    (made / "config.json").write_text(json.dumps(SHAPE))
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[..., Answers]:
    """The answers to PROMPTS without speculation, computed once for each setting."""
    return cache(lambda **settings: _answers(_engine_of(folder, **settings)))


def _engine_of(folder: Path, **settings: object) -> Engine:
    config = EngineConfig.of(
        model=str(folder), load_format="dummy", device="cpu", **{"dtype": "float32", **settings}
    )
    return building.build(config).engine


@pytest.fixture
def other(tmp_path: Path) -> Callable[..., str]:
    """Another model, smaller if nothing else is said."""

    def make(**changes: object) -> str:
        changes = changes or {"num_hidden_layers": 1, "hidden_size": 24}
        (tmp_path / "config.json").write_text(json.dumps({**SHAPE, **changes}))
        return str(tmp_path)

    return make


def _answers(engine: Engine) -> Answers:
    """Tokens, then logprobs as (token, rank) pairs, then why it ended."""
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.add(Request(str(index), prompt, sampling))
    found: Answers = {}
    while engine.has_work:
        for update in engine.step():
            key = (update.request_id, update.index)
            tokens, scores, _ = found.get(key, ((), (), None))
            scores += tuple((entry.token_id, entry.rank, entry.top_ids) for entry in update.logprobs)
            found[key] = (tokens + update.token_ids, scores, update.finish_reason)
    engine.check_integrity()
    assert engine.memory.num_free == engine.memory.num_blocks
    engine.close()
    return found


SETTINGS = [
    {}, {"num_blocks": 32, "max_num_seqs": 18}, {"steps_in_flight": 0}, {"max_num_batched_tokens": 9},
    {"enable_prefix_caching": False, "block_size": 1},
    {"num_blocks": 32, "max_num_seqs": 18, "kv_cache_dtype": "int8", **EXACT},
]  # fmt: skip
# Trees meet all settings in test_branches_that_are_not_the_first_are_followed; here are those that are looked up.
LOOKED_UP = [(NGRAM, one) for one in SETTINGS] + [(TREES, one) for one in (*SETTINGS[:2], SETTINGS[-1])]


@pytest.mark.parametrize(("speculative", "settings"), LOOKED_UP)
@pytest.mark.parametrize("runner", [Runner, DeviceRunner, PaddingRunner])
def test_the_same_tokens_with_and_without(
    folder: Path,
    plain: Callable[..., Answers],
    monkeypatch: pytest.MonkeyPatch,
    runner: type,
    speculative: dict[str, object],
    settings: dict[str, object],
) -> None:
    settings = {"block_size": 4, **settings}
    expected = plain(**settings)
    monkeypatch.setattr("quire.engine.build.runner.Runner", runner)
    engine = _engine_of(folder, speculative_config=speculative, **settings)
    assert _answers(engine) == expected
    assert engine.draft_stats.num_draft_tokens > engine.draft_stats.num_accepted_tokens > 0


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_model_that_drafts_for_itself_is_always_right(
    folder: Path, plain: Callable[..., Answers], adaptive: bool
) -> None:
    expected = plain(block_size=4)
    drafting = {
        "method": "draft_model",
        "model": str(folder),
        "num_speculative_tokens": 3,
        "adaptive": adaptive,
    }
    engine = _engine_of(folder, speculative_config=drafting, block_size=4)
    assert _answers(engine) == expected
    stats = engine.draft_stats
    assert stats.num_drafts
    assert stats.num_accepted_tokens >= 0.9 * stats.num_draft_tokens


@pytest.mark.parametrize("settings", [
    {}, {"steps_in_flight": 0, "block_size": 1}, {"max_num_batched_tokens": 19}, {"num_blocks": 32, "max_num_seqs": 18},
    {"block_size": 16}, {"kv_cache_dtype": "int8", **EXACT},
])  # fmt: skip
@pytest.mark.parametrize("runner", [Runner, DeviceRunner, PaddingRunner])
def test_branches_that_are_not_the_first_are_followed(
    folder: Path,
    plain: Callable[..., Answers],
    monkeypatch: pytest.MonkeyPatch,
    runner: type,
    settings: dict[str, object],
) -> None:
    """Pages of accepted nodes move, are read by later steps, and are found again by other requests."""
    settings = {"block_size": 4, **settings}
    expected = plain(**settings)
    monkeypatch.setattr("quire.engine.build.runner.Runner", runner)
    engine = _engine_of(folder, speculative_config=TREES, **settings)
    answers = {
        (tuple(PROMPTS[int(request_id)]), index): tokens
        for (request_id, index), (tokens, *_) in expected.items()
    }
    assert engine.speculation is not None
    engine.speculation.propose_with(
        SyntheticProposer(answers, 97, acceptance_rate=0.3, branch_acceptance=0.9)
    )
    assert _answers(engine) == expected
    stats = engine.draft_stats
    if settings.keys() <= {"block_size", "steps_in_flight"}:  # else there is seldom room for several branches
        # a chain would keep less than 0.43 of a token
        assert stats.num_accepted_tokens > 0.5 * stats.num_drafts


@pytest.mark.parametrize("runner", [Runner, DeviceRunner])
def test_beams_and_trees_run_in_one_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runner: type
) -> None:
    beams = SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=11, logprobs=1)
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", [*PROMPTS, FORKING, FORKING])
    monkeypatch.setattr(sys.modules[__name__], "SAMPLINGS", [*SAMPLINGS, beams, SAMPLINGS[0]])
    expected = _answers(_engine_of(folder, block_size=4))
    monkeypatch.setattr("quire.engine.build.runner.Runner", runner)
    engine = _engine_of(folder, speculative_config=TREES, block_size=4)
    assert _answers(engine) == expected
    assert engine.draft_stats.num_drafts


@pytest.mark.parametrize("settings", [
    {"num_blocks": 32, "max_num_seqs": 8}, {"max_num_batched_tokens": 7}, {"steps_in_flight": 0}, {"tree_width": 3},
    {"tree_width": 3, "num_blocks": 32, "max_num_seqs": 8}, {"tree_width": 3, "max_num_batched_tokens": 7},
])  # fmt: skip
def test_another_model_drafts_worse_and_harms_nothing(
    folder: Path, plain: Callable[..., Answers], other: Callable[..., str], settings: dict[str, object]
) -> None:
    settings = dict(settings)
    width = settings.pop("tree_width", 1)
    expected = plain(block_size=4, **settings)
    drafting = {"method": "draft_model", "model": other(), "num_speculative_tokens": 3, "adaptive": False}
    drafting["tree_width"] = width
    engine = _engine_of(folder, speculative_config=drafting, block_size=4, **settings)
    assert _answers(engine) == expected
    assert engine.draft_stats.num_draft_tokens > engine.draft_stats.num_accepted_tokens


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab_size": 98}, "vocabulary of 98 tokens and the target one of 97"),
        ({"max_position_embeddings": 64}, "lower max_model_len to 64"),
    ],
)
def test_a_draft_that_does_not_fit_its_target_is_refused(
    folder: Path, other: Callable[..., str], change: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        _engine_of(folder, speculative_config={"method": "draft_model", "model": other(**change)})


def test_trees_are_refused_where_a_gpu_would_get_them_wrong(folder: Path) -> None:
    built = building.build(EngineConfig.of(model=str(folder), load_format="dummy", device="cpu"))
    built.engine.close()
    trees = parse_speculative(TREES)
    on_gpu = replace(built.report.precision, device=torch.device("cuda"))
    check_trees(trees, built.model, on_gpu, deterministic=False)
    narrow = replace(built.model, hf={**built.model.hf, "sliding_window": 32})
    with pytest.raises(ConfigError, match="this model's window is 32"):
        check_trees(trees, narrow, on_gpu, deterministic=False)
    check_trees(trees, narrow, on_gpu, deterministic=True)
    sloped = replace(built.model, architecture="BloomForCausalLM")
    with pytest.raises(ConfigError, match=r"no kernel for scores by distance \(ALiBi\)"):
        check_trees(trees, sloped, on_gpu, deterministic=False)
    check_trees(trees, sloped, on_gpu, deterministic=True)
    with pytest.raises(ConfigError, match=r"no kernel for scores by distance \(T5\)"):
        check_trees(
            trees, replace(sloped, architecture="MT5ForConditionalGeneration"), on_gpu, deterministic=False
        )


def test_a_full_batch_drafts_nothing(folder: Path) -> None:
    engine = _engine_of(folder, speculative_config={**NGRAM, "disable_by_batch_size": 2})
    for index in range(3):
        engine.add(Request(str(index), REPEATING, SAMPLINGS[0]))
    for _ in range(12):
        engine.step()
    assert len(engine.scheduler.running) == 3
    assert engine.draft_stats.num_drafts == 0
    engine.close()


def test_what_a_draft_left_behind_is_found_again_by_others(folder: Path) -> None:
    """Accepted tokens are indexed, refused ones are not: the next request's prefix is right."""
    engine = _engine_of(folder, speculative_config=NGRAM, block_size=4)
    first = _run(engine, REPEATING, SAMPLINGS[0])
    again = _run(engine, REPEATING + first[:-1], SamplingParams(temperature=0, max_tokens=1))
    assert engine.memory.stats.prefix_hits > len(REPEATING)
    assert again == first[-1:]
    engine.close()


def _run(engine: Engine, prompt: list[int] | Ints, sampling: SamplingParams) -> list[int]:
    engine.add(Request("one", prompt, sampling))
    found: list[int] = []
    while engine.has_work:
        for update in engine.step():
            found.extend(update.token_ids)
    return found


NUM_SAMPLES = 1500


@pytest.fixture(scope="module")
def plain_third_tokens(folder: Path) -> list[int]:
    return _third_tokens(_engine_of(folder, max_num_seqs=64), range(1, 1 + NUM_SAMPLES))


@pytest.mark.parametrize("how", [
    {}, {"acceptance": "rejection"}, {"tree_width": 3, "num_speculative_tokens": 2, "acceptance": "rejection"},
])  # fmt: skip
def test_unseeded_samples_follow_the_targets_distribution(
    folder: Path, other: Callable[..., str], plain_third_tokens: list[int], how: dict[str, object]
) -> None:
    """Answers with other random numbers, and speculated ones: by the chi-squared test, of one distribution.

    The engine's own seed is fixed, so the same answers are drawn every time.
    """
    plain = plain_third_tokens
    drafting = {"method": "draft_model", "model": other(), "adaptive": False, "disable_by_batch_size": 999}
    engine = _engine_of(folder, max_num_seqs=64, speculative_config={**drafting, **how})
    drafted = _third_tokens(engine, [None] * NUM_SAMPLES)
    assert engine.draft_stats.num_draft_tokens > engine.draft_stats.num_accepted_tokens > 0
    kinds = [token for token in range(97) if plain[token] + drafted[token] >= 20]
    statistic = sum((plain[t] - drafted[t]) ** 2 / (plain[t] + drafted[t]) for t in kinds)
    assert len(kinds) > 3
    assert statistic < len(kinds) + 4 * (2 * len(kinds)) ** 0.5  # four standard deviations above the mean


@pytest.mark.parametrize("runner", [Runner, PaddingRunner])
def test_rejection_leaves_seeded_and_greedy_answers_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, runner: type
) -> None:
    """The request that is drawn without a seed gets other tokens than it would have had; it runs beside the others."""
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", [*PROMPTS, FORKING])
    drawn = SamplingParams(temperature=0.8, top_p=0.9, logit_bias={3: 1.0}, max_tokens=20, ignore_eos=True)
    monkeypatch.setattr(sys.modules[__name__], "SAMPLINGS", [*SAMPLINGS, drawn])
    expected = _answers(_engine_of(folder, block_size=4))
    monkeypatch.setattr("quire.engine.build.runner.Runner", runner)
    drafting = {
        "method": "draft_model", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False,
        "tree_width": 2, "acceptance": "rejection",
    }  # fmt: skip
    engine = _engine_of(folder, speculative_config=drafting, block_size=4)
    found = _answers(engine)
    assert len(found.pop(("6", 0))[0]) == len(expected.pop(("6", 0))[0]) == 20
    assert found == expected


def _third_tokens(engine: Engine, seeds: Iterable[int | None]) -> list[int]:
    """How often each token is an answer's third."""
    found: dict[str, list[int]] = {}
    for index, seed in enumerate(seeds):
        sampling = SamplingParams(temperature=0.4, max_tokens=4, ignore_eos=True, seed=seed)
        engine.add(Request(str(index), REPEATING, sampling))
    while engine.has_work:
        for update in engine.step():
            found.setdefault(update.request_id, []).extend(update.token_ids)
    engine.close()
    counts = [0] * 97
    for tokens in found.values():
        counts[tokens[2]] += 1
    return counts


@pytest.mark.parametrize("how", [
    {}, {"tree_width": 3}, {"acceptance": "rejection"}, {"acceptance": "rejection", "tree_width": 3},
])  # fmt: skip
@pytest.mark.parametrize("first", [0, 2, 5])
def test_a_draft_model_without_finite_logits_harms_nothing(
    folder: Path,
    plain: Callable[..., Answers],
    how: dict[str, object],
    first: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From its `first` pass on: at the first token of a draft, or in the middle of one."""
    drawn = SamplingParams(temperature=0.8, max_tokens=20, ignore_eos=True)  # judged by probabilities
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", [*PROMPTS, FORKING])
    monkeypatch.setattr(sys.modules[__name__], "SAMPLINGS", [*SAMPLINGS, drawn])
    expected = _answers(_engine_of(folder, block_size=4))
    drafting = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3, "adaptive": False}
    engine = _engine_of(folder, block_size=4, speculative_config={**drafting, **how})
    ops, num_passes = engine.speculation._proposer._runner._ops, 0
    forward = ops.forward

    def not_finite(step: Step) -> object:
        nonlocal num_passes
        passed = forward(step)
        if passed.logits is not None and num_passes >= first:
            passed.logits.fill_(float("nan"))
        num_passes += 1
        return passed

    monkeypatch.setattr(ops, "forward", not_finite)
    with caplog.at_level("WARNING"):
        found = _answers(engine)
    assert caplog.text.count("logits that are not finite") == 1
    assert len(found.pop(("6", 0))[0]) == len(expected.pop(("6", 0))[0]) == 20
    assert found == expected
    assert num_passes < first + 20, "what failed is tried again and again"

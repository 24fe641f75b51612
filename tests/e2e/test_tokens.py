"""The same request gives the same tokens, and in fp32 they are transformers' tokens."""

import warnings

import numpy as np
import pytest
import torch

from quire import SamplingParams
from quire.sampling.columns import Purpose, stream_key, uniforms
from tests.e2e.conftest import FEW, MAX_TOKENS, SETTINGS, Setting, generate
from tests.e2e.reference import Answer, Difference, greedy_differences, reference_logits

EDGE = 1e-3  # of probability
TIE = 1e-4  # the reference's own two best logits may be this close; then either is right

GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
BATCH = SETTINGS[1]


def seeded(count: int) -> list[SamplingParams]:
    """Every prompt with its own seed and its own mixture of filters."""
    kinds = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"repetition_penalty": 1.2, "top_p": 0.95}]
    return [
        SamplingParams(temperature=0.8, seed=1000 + i, max_tokens=MAX_TOKENS, **kinds[i % len(kinds)])
        for i in range(count)
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("setting", SETTINGS[:5], ids=lambda s: s.name)
def test_in_fp32_greedy_tokens_are_those_of_transformers(setting: Setting, prompts, run_slow: bool):
    """All 80 in one batch, and in every setting with --run-slow. Else a few of them, where the setting itself is in
    question: that it changes no token is shown on all 80 in int8, with the same memory, scheduler and attention."""
    if not run_slow and setting is not BATCH:
        prompts = _few(setting, prompts)
    outputs, num_preemptions = generate(setting, prompts, [GREEDY] * len(prompts), quantization="none")
    assert ("tiny" in setting.name) == (num_preemptions > 0)
    assert all(0 < len(output) <= MAX_TOKENS for output in outputs)
    differences = _checked([(list(p), list(o)) for p, o in zip(prompts, outputs, strict=True)])
    if differences:  # allowed or not, people should see them
        warnings.warn(f"{setting.name}: not the reference's best token: {differences}", stacklevel=1)
    assert all(d.gap <= TIE for d in differences), differences


def _few(setting: Setting, prompts: list) -> list:
    """Fewer still one by one, where fp32 takes 50 ms a token."""
    return prompts[FEW][::3] if setting.alone else prompts[FEW]


_CHECKED: dict[str, list[Difference]] = {}  # the settings mostly agree, so each answer is checked once


def _checked(answers: list[Answer]) -> list[Difference]:
    new = [answer for answer in answers if str(answer) not in _CHECKED]
    _CHECKED.update(zip(map(str, new), greedy_differences(new), strict=True))
    return [difference for answer in answers for difference in _CHECKED[str(answer)]]


@pytest.fixture(scope="module")
def int8_outputs(prompts):
    """Greedy and seeded tokens of all prompts in one batch: what every other setting must give."""
    both = generate(BATCH, prompts * 2, [GREEDY] * len(prompts) + seeded(len(prompts)))[0]
    return {"greedy": both[: len(prompts)], "seeded": both[len(prompts) :]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s is not BATCH], ids=lambda s: s.name)
def test_in_int8_tokens_do_not_depend_on_batch_chunks_blocks_or_preemption(
    setting: Setting, prompts, int8_outputs, run_slow: bool
):
    """Greedy and seeded requests in one batch: all 80 prompts, of either kind in turn. Alone and committed at
    once a few prompts of both kinds: their steps are the slowest, and differ from the others' only in how many rows a
    step has and when it is committed. All prompts of both kinds with --run-slow."""
    slow = setting.alone or "steps_in_flight" in setting.options
    greedy, drawn = range(0, len(prompts), 2), range(1, len(prompts), 2)
    if run_slow or slow:
        greedy = drawn = range(len(prompts))[slice(None) if run_slow else FEW]
    outputs, num_preemptions = generate(
        setting,
        [prompts[i] for i in (*greedy, *drawn)],
        [GREEDY] * len(greedy) + [seeded(len(prompts))[i] for i in drawn],
    )
    assert ("tiny" in setting.name) == (num_preemptions > 0)
    assert outputs[: len(greedy)] == [int8_outputs["greedy"][i] for i in greedy]
    assert outputs[len(greedy) :] == [int8_outputs["seeded"][i] for i in drawn]


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[4]], ids=lambda s: s.name)
def test_in_fp32_seeded_tokens_are_drawn_from_the_distribution_of_transformers(setting, prompts):
    """The counted random number of each position must fall into the chosen token's share of the reference.

    Shares move by rounding between batches in fp32, so a number at their very edge may fall to either side.
    """
    few, temperature = _few(setting, prompts), 0.8
    sampling = [SamplingParams(temperature=temperature, seed=i, max_tokens=32) for i in range(len(few))]
    outputs, _ = generate(setting, few, sampling, quantization="none")
    answers = [(list(prompt), list(output)) for prompt, output in zip(few, outputs, strict=True)]
    for seed, ((prompt, output), row_logits) in enumerate(
        zip(answers, reference_logits(answers), strict=True)
    ):
        logits = row_logits.double()
        ends = (logits / temperature).softmax(-1).cumsum(-1)
        chosen = torch.tensor(output)[:, None]
        upper = ends.gather(1, chosen).squeeze(1)
        lower = upper - (logits / temperature).softmax(-1).gather(1, chosen).squeeze(1)
        positions = np.arange(len(prompt), len(prompt) + len(output))
        key = np.full(len(output), stream_key(seed, 0, Purpose.TOKEN), np.uint64)
        drawn = torch.from_numpy(uniforms(key, positions))
        assert bool(((lower - EDGE <= drawn) & (drawn <= upper + EDGE)).all())


@pytest.mark.timeout(600)
def test_an_int8_kv_cache_gives_the_same_tokens_in_every_setting(prompts):
    """Greedy and seeded, twice through one engine, so that the second time most pages come from the prefix index."""
    few = prompts[FEW]
    asked = [GREEDY if i % 2 else one for i, one in enumerate(seeded(len(few)))]
    pages = {"kv_cache_dtype": "int8"}
    wanted, _ = generate(BATCH, few * 2, asked * 2, **pages)
    assert wanted[: len(few)] == wanted[len(few) :]
    for setting in (SETTINGS[0], SETTINGS[2], SETTINGS[3], SETTINGS[4]):
        outputs, num_preemptions = generate(setting, few, asked, **pages)
        assert ("tiny" in setting.name) == (num_preemptions > 0)
        assert outputs == wanted[: len(few)], setting.name


def test_prefix_hits_change_no_token(prompts, int8_outputs):
    """Everything twice through one engine: the second time most of it comes from the prefix index."""
    twice = prompts[:20] * 2
    outputs, _ = generate(Setting("cached", {"max_num_seqs": 20}), twice, [GREEDY] * len(twice))
    assert outputs == int8_outputs["greedy"][:20] * 2

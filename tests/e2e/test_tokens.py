"""The same request gives the same tokens, and in fp32 they are transformers' tokens."""

import warnings

import numpy as np
import pytest
import torch

from quire import SamplingParams
from quire.sampling.columns import Purpose, stream_key, uniforms
from tests.e2e.conftest import FEW, MAX_TOKENS, SETTINGS, Setting, generate
from tests.e2e.reference import greedy_differences, reference_logits

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
    differences = []
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        assert 0 < len(output) <= MAX_TOKENS
        differences += _checked(i, tuple(prompt), tuple(output))
    if differences:  # allowed or not, people should see them
        warnings.warn(f"{setting.name}: not the reference's best token: {differences}", stacklevel=1)
    assert all(d.gap <= TIE for d in differences), differences


def _few(setting: Setting, prompts: list) -> list:
    """Fewer still one by one, where fp32 takes 50 ms a token."""
    return prompts[FEW][::3] if setting.alone else prompts[FEW]


_CHECKED: dict[tuple, list] = {}  # the settings mostly agree, so each answer is checked once


def _checked(index: int, prompt: tuple, output: tuple) -> list:
    key = (prompt, output)
    if key not in _CHECKED:
        _CHECKED[key] = greedy_differences(index, list(prompt), list(output))
    return _CHECKED[key]


@pytest.fixture(scope="module")
def int8_outputs(prompts):
    """Greedy and seeded tokens of all prompts in one batch: what every other setting must give."""
    both = generate(BATCH, prompts * 2, [GREEDY] * len(prompts) + seeded(len(prompts)))[0]
    return {"greedy": both[: len(prompts)], "seeded": both[len(prompts) :]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", [s for s in SETTINGS if s is not BATCH], ids=lambda s: s.name)
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_in_int8_tokens_do_not_depend_on_batch_chunks_blocks_or_preemption(
    setting, kind, prompts, int8_outputs, run_slow: bool
):
    """All 80, but a few alone and committed at once: their steps are the slowest, and differ from the others' only in
    how many rows a step has and when it is committed. All of them with --run-slow."""
    slow = setting.alone or "steps_in_flight" in setting.options
    which = slice(None) if run_slow or not slow else FEW
    sampling = [GREEDY] * len(prompts) if kind == "greedy" else seeded(len(prompts))
    outputs, num_preemptions = generate(setting, prompts[which], sampling[which])
    assert ("tiny" in setting.name) == (num_preemptions > 0)
    assert outputs == int8_outputs[kind][which]


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[4]], ids=lambda s: s.name)
def test_in_fp32_seeded_tokens_are_drawn_from_the_distribution_of_transformers(setting, prompts):
    """The counted random number of each position must fall into the chosen token's share of the reference.

    Shares move by rounding between batches in fp32, so a number at their very edge may fall to either side.
    """
    few, temperature = _few(setting, prompts), 0.8
    sampling = [SamplingParams(temperature=temperature, seed=i, max_tokens=32) for i in range(len(few))]
    outputs, _ = generate(setting, few, sampling, quantization="none")
    for seed, (prompt, output) in enumerate(zip(few, outputs, strict=True)):
        logits = reference_logits(prompt, output).double()
        ends = (logits / temperature).softmax(-1).cumsum(-1)
        chosen = torch.tensor(output)[:, None]
        upper = ends.gather(1, chosen).squeeze(1)
        lower = upper - (logits / temperature).softmax(-1).gather(1, chosen).squeeze(1)
        positions = np.arange(len(prompt), len(prompt) + len(output))
        key = np.full(len(output), stream_key(seed, 0, Purpose.TOKEN), np.uint64)
        drawn = torch.from_numpy(uniforms(key, positions))
        assert bool(((lower - EDGE <= drawn) & (drawn <= upper + EDGE)).all())


def test_prefix_hits_change_no_token(prompts, int8_outputs):
    """Everything twice through one engine: the second time most of it comes from the prefix index."""
    twice = prompts[:20] * 2
    outputs, _ = generate(Setting("cached", {"max_num_seqs": 20}), twice, [GREEDY] * len(twice))
    assert outputs == int8_outputs["greedy"][:20] * 2

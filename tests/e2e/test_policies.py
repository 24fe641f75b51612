"""The built-in model under every policy: the same tokens, in another order and with other waste."""

import pytest

from quire import LLM, SamplingParams
from quire_lab.baselines.timeline import Timeline

PROMPTS = ["The capital of France is", "Once upon a time", "2 + 2 =", "The quick brown fox jumps over"]
LENGTHS = (4, 14, 9, 18)
POLICIES = [
    {"batching": "static", "batch_size": 3},
    {"batching": "dynamic", "batch_window_ms": 5.0},
    {"reservation": "pow2", "num_blocks": 2048},
    {"reservation": "oracle", "num_blocks": 2048},
    {"preset": "ft", "num_blocks": 2048, "max_model_len": 256},
    {"schedule": "fair"},
    {"schedule": "shortest", "max_num_seqs": 3},
]


def answers(**settings):
    with LLM(use_tqdm=False, **{"num_blocks": 256, **settings}) as llm:
        exact = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in LENGTHS]
        drawn = SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=6)
        outputs = llm.generate(PROMPTS, exact, use_tqdm=False)
        outputs += llm.generate(PROMPTS[:2], drawn, use_tqdm=False)
        outputs += llm.beam_search(PROMPTS[:2], 3, 6, use_tqdm=False)
        llm.engine.check_integrity()
        assert llm.engine.memory.num_free == llm.engine.memory.num_blocks
        return [one.token_ids for output in outputs for one in output.outputs], llm


@pytest.fixture(scope="module")
def usual():
    tokens, llm = answers()
    assert not any(line.startswith("policies") for line in llm.report.lines())
    return tokens


@pytest.mark.parametrize("settings", POLICIES, ids=lambda settings: " ".join(map(str, settings.values())))
def test_no_policy_changes_a_token_and_the_report_names_it(usual, settings):
    tokens, llm = answers(**settings)
    assert tokens == usual
    assert any(line.startswith("policies") for line in llm.report.lines())
    wasted = getattr(llm.engine.scheduler.policy, "num_wasted_tokens", 0)
    assert (wasted > 0) == (settings.get("batching") in ("static", "dynamic") or "preset" in settings)


def test_prompts_name_their_priority_and_tenant():
    with LLM(use_tqdm=False, num_blocks=64, max_num_seqs=1, schedule="priority") as llm:
        prompts = [
            {"prompt": text, "priority": place} for place, text in zip((3, 1, 2), PROMPTS, strict=False)
        ]
        timeline = Timeline.watch(llm.engine)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    in_order = [request_id for request_id, _ in timeline.admissions()]
    assert in_order == [outputs[1].request_id, outputs[2].request_id, outputs[0].request_id]

"""Several ranks on the built-in model, in int8: the tokens and logprobs of one rank, bit for bit.

The model has 9 query and 3 key-value heads: two ranks hold 6 and 3 of the former, three hold 3 each.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutput
from quire.bench.capacity import Capacity, Device, plan_capacity
from quire.cli.start import described_source
from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, EngineDead
from quire.engine.build import ranks
from tests.e2e.conftest import FEW, TINY
from tests.e2e.reference import greedy_differences

TIE = 1e-4  # the reference's own two best logits may be this close; then either is right

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=7)
ADAPTERS = ("smollm-med-5epochs", "smollm-med-100epochs")
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
# One after the other: swapped out while a step is in flight; computed again, with drafts, and none in flight.
SETTINGS: dict[str, dict[str, Any]] = {
    "swap, one step in flight": {**TINY, "preemption_mode": "swap"},
    "recompute, drafts, none in flight": {
        **TINY, "num_blocks": 30, "preemption_mode": "recompute", "steps_in_flight": 0, "speculative_config": NGRAM,
    },
}  # fmt: skip


def _facts(results: list[Any]) -> list[Any]:
    return [
        [(o.token_ids, o.cumulative_logprob, o.logprobs, result.prompt_logprobs) for o in result.outputs]
        for result in results
    ]


def _everything(llm: LLM, prompts: list[list[int]], adapters: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Requests of every kind, and all that they return."""
    few = [{"prompt_token_ids": ids} for ids in prompts[FEW]]
    before = llm.engine.scheduler.stats.num_preemptions
    mixed = [GREEDY if i % 2 else SEEDED for i in range(len(few))]
    yield "greedy and seeded", _facts(llm.generate(few, mixed, use_tqdm=False))
    assert llm.engine.scheduler.stats.num_preemptions > before
    hits = llm.engine.memory.stats.prefix_hits
    yield "cached", _facts(llm.generate(few[:2], GREEDY, use_tqdm=False))
    assert llm.engine.memory.stats.prefix_hits > hits
    yield "n", _facts(llm.generate(few[2], SEEDED.changed(n=3, logprobs=2), use_tqdm=False))
    scored = GREEDY.changed(prompt_logprobs=1, max_tokens=2)
    yield "prompt logprobs", _facts(llm.generate(few[3], scored, use_tqdm=False))
    yield "beams", _facts(llm.beam_search(few[4], 3, max_tokens=8, use_tqdm=False))
    words = GREEDY.changed(structured=StructuredOutput.regex("(red|green|blue) [0-9]{3}"))
    yield "grammar", _facts(llm.generate([few[5], few[6]], words, use_tqdm=False))
    if adapters:
        names = [*adapters, None, adapters[0]]
        answers = llm.generate(few[:4], GREEDY.changed(max_tokens=12), adapter=names, use_tqdm=False)
        yield "adapters", _facts(answers)
    llm.engine.check_integrity()
    assert llm.engine.memory.num_free == llm.engine.memory.num_blocks


# Ranks of a layer, and stages of layers.
SHAPES = [((3, 1), (1, 3)), ((2, 2),)]


@pytest.mark.parametrize(("setting", "shapes"), list(zip(SETTINGS, SHAPES, strict=True)))
def test_ranks_give_the_bits_of_one_rank(prompts, shared, setting, shapes):
    folder = shared / "adapters"
    adapters = ADAPTERS if folder.is_dir() else ()
    modules = {"lora_modules": {name: str(folder / name) for name in adapters}} if adapters else {}
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for shape in ((1, 1), *shapes):
        parallel = {"tensor_parallel_size": shape[0], "pipeline_parallel_size": shape[1]}
        options = {**SETTINGS[setting], **modules, **parallel}
        with LLM(use_tqdm=False, max_model_len=512, **options) as llm:
            found[shape] = dict(_everything(llm, prompts, adapters))
    for shape in shapes:
        for kind, facts in found[1, 1].items():
            assert found[shape][kind] == facts, f"{shape}, {kind}"


@pytest.mark.parametrize(
    ("shapes", "which"),
    [
        (((2, 1), (1, 2)), slice(None, None, 16)),
        pytest.param(
            ((2, 1), (3, 1), (1, 2), (1, 3), (2, 2)),
            slice(None),
            marks=[pytest.mark.slow, pytest.mark.timeout(3600)],
        ),
    ],
    ids=["few questions", "all questions, all shapes"],
)
def test_questions_have_the_bits_of_one_rank(prompts, shapes, which):
    inputs = [{"prompt_token_ids": ids} for ids in prompts[which]]
    facts: dict[tuple[int, int], Any] = {}
    for tp, pp in ((1, 1), *shapes):
        parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        with LLM(use_tqdm=False, max_model_len=512, num_blocks=400, max_num_seqs=16, **parallel) as llm:
            facts[tp, pp] = [_facts(llm.generate(inputs, kind, use_tqdm=False)) for kind in (GREEDY, SEEDED)]
    for shape in shapes:
        assert facts[shape] == facts[1, 1], f"-tp {shape[0]} -pp {shape[1]}"


def test_bytes_and_memory_of_a_rank_are_those_of_the_formulas_and_of_the_plan():
    config = EngineConfig.of(tensor_parallel_size=3, num_blocks=40, max_model_len=512)
    with LLM(use_tqdm=False, max_num_seqs=8, num_blocks=40, max_model_len=512, tensor_parallel_size=3) as llm:
        _check_bytes(llm, 3)
        start, pool = llm.report.start, llm.report.pool
    plan = plan_capacity(config, described_source(config), Device("", False, None, 1.0, 0.0, ""))
    assert abs(start.weights_bytes / plan.weights.num_bytes - 1) < 0.02
    assert pool.num_bytes == plan.pool.num_bytes
    whole = EngineConfig.of(num_blocks=40, max_model_len=512)
    alone = plan_capacity(whole, described_source(whole), Device("", False, None, 1.0, 0.0, ""))
    assert pool.num_bytes * 3 == alone.pool.num_bytes


def test_a_stage_has_kv_of_its_own_layers_and_the_plan_is_of_the_one_with_most():
    """Of 30 layers: 5 beside the token table and the head, then 13 and 12."""

    def planned(num_blocks: int, stages: int) -> Capacity:
        config = EngineConfig.of(num_blocks=num_blocks, pipeline_parallel_size=stages)
        return plan_capacity(config, described_source(config), Device("", False, None, 1.0, 0.0, ""))

    first, later, whole = planned(40, 3), planned(4000, 3), planned(4000, 1)
    with LLM(use_tqdm=False, pipeline_parallel_size=3, num_blocks=40, num_threads=1) as llm:
        start, pool = llm.report.start, llm.report.pool
    assert pool.num_bytes == first.pool.num_bytes == planned(40, 1).pool.num_bytes * 5 // 30
    assert abs(start.weights_bytes / first.weights.num_bytes - 1) < 0.02
    assert later.pool.num_bytes == whole.pool.num_bytes * 13 // 30
    names = [plan.model_name.partition(", ")[2] for plan in (first, later)]
    assert names == ["rank 0 of 3", "rank 1 of 3"]


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_ranks_over_tcp_give_the_bits_of_one_and_a_lost_one_is_named(shape, monkeypatch):
    """As on several machines, but started here and not by Ray."""
    monkeypatch.setitem(ranks.PEERS, "ray", ranks.PEERS["mp"])
    settings = {
        "num_threads": 1,
        "num_blocks": 32,
        "max_num_seqs": 2,
        "max_model_len": 128,
        "use_tqdm": False,
    }
    parallel = {"tensor_parallel_size": shape[0], "pipeline_parallel_size": shape[1]}
    few = [GREEDY.changed(max_tokens=6), SEEDED.changed(max_tokens=6, logprobs=1)]
    with LLM(**settings) as one, LLM(**settings, **parallel, distributed_executor_backend="ray") as llm:
        found = [_facts(each.generate(["One, two,", "A"], few, use_tqdm=False)) for each in (one, llm)]
        assert found[0] == found[1]
        with pytest.raises(ConfigError, match="in use in this process, by an engine perhaps: close it"):
            LLM(**settings, **parallel, distributed_executor_backend="ray")
        llm.engine._runner._peers._processes[0].kill()
        with pytest.raises(EngineDead, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
            llm.generate(["One, two,"] * 2, GREEDY.changed(max_tokens=64), use_tqdm=False)


def test_a_rank_that_ends_before_all_have_met_is_named(monkeypatch):
    monkeypatch.setitem(ranks.PEERS, "ray", "this")  # a module that prints a poem, and has no `main`
    with pytest.raises(EngineDead, match=r"rank 1 \(pid \d+\) exited with code 1"):
        LLM(tensor_parallel_size=2, distributed_executor_backend="ray", num_blocks=32, use_tqdm=False)


def _check_bytes(llm: LLM, size: int) -> None:
    """Of a prompt of 30 tokens and 5 more: in the last layer only sampled tokens go on."""
    before = llm.engine._runner.traffic()
    sampling = GREEDY.changed(max_tokens=5, ignore_eos=True)
    llm.generate({"prompt_token_ids": list(range(100, 130))}, sampling, use_tqdm=False)
    after = llm.engine._runner.traffic()
    moved = {key: count - before.get(key, 0) for key, count in after.items()}
    tokens = 29 * (30 + 4) + 5  # through each projection of 30 layers
    assert moved.pop(("all_gather", "start"), 0) == 0
    assert moved == {
        ("all_reduce", "attention"): 2 * (size - 1) * tokens * 576 * 4 // size,
        ("all_reduce", "mlp"): 2 * (size - 1) * tokens * 576 * 4 // size,
        ("all_reduce", "scales"): 2 * (size - 1) * 2 * tokens * 4 // size,
        ("gather", "logits"): (size - 1) * 5 * 49152 * 4 // size,
        ("broadcast", "tokens"): 5 * 4,
    }


def test_full_precision_gives_the_tokens_of_transformers(prompts, monkeypatch):
    with LLM(
        use_tqdm=False,
        max_num_seqs=8,
        num_blocks=100,
        max_model_len=512,
        quantization="none",
        tensor_parallel_size=2,
    ) as llm:
        few = prompts[FEW][:4]
        inputs = [{"prompt_token_ids": ids} for ids in few]
        outputs = llm.generate(inputs, GREEDY.changed(max_tokens=8), use_tqdm=False)
    answers = [(ids, list(output.outputs[0].token_ids)) for ids, output in zip(few, outputs, strict=True)]
    gaps = [difference.gap for found in greedy_differences(answers) for difference in found]
    assert all(gap < TIE for gap in gaps), gaps
    monkeypatch.setattr(ranks, "VERSION", "0.0.1")
    with pytest.raises(
        ConfigError, match=r"rank 1: Quire .* 0\.0\.1 .* on rank 0: start all ranks from one version"
    ):
        LLM(use_tqdm=False, num_blocks=40, max_model_len=64, tensor_parallel_size=2)


def test_trees_of_drafts_give_the_bits_of_one_rank():
    prompt = "one two three four one two three five one two three four one two three"
    trees = {"method": "ngram", "num_speculative_tokens": 4, "tree_width": 3, "adaptive": False}
    found = []
    for size in (1, 2):
        with LLM(
            use_tqdm=False,
            num_blocks=60,
            max_model_len=256,
            tensor_parallel_size=size,
            speculative_config=trees,
        ) as llm:
            found.append(_facts(llm.generate([prompt, "A list:"], [GREEDY, SEEDED], use_tqdm=False)))
            assert llm.engine.speculation.stats.num_accepted_tokens > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("stages", [2, 3])
def test_a_pipeline_of_many_sequences_is_full(stages):
    with LLM(
        use_tqdm=False,
        num_blocks=100,
        max_model_len=64,
        max_num_seqs=16,
        pipeline_parallel_size=stages,
        num_threads=1,
    ) as llm:
        sampling = GREEDY.changed(max_tokens=24, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5 + i, 9, 11]} for i in range(16)], sampling, use_tqdm=False)
        steps, collects = llm.engine._runner._stage._in_flight
    assert steps / collects >= stages - 0.2


def test_int4_on_two_ranks_scores_a_text_as_one_rank_does_within_its_rounding():
    scored = GREEDY.changed(prompt_logprobs=1, max_tokens=8)
    means, answers = [], []
    for size in (1, 2):
        with LLM(
            use_tqdm=False, num_blocks=40, max_model_len=64, quantization="int4", tensor_parallel_size=size
        ) as llm:
            output, again = llm.generate(["The capital of France is a city that"] * 2, scored, use_tqdm=False)
        answers.append((_facts([output]), _facts([again])))
        each = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
        means.append(sum(each) / len(each))
    assert all(first == second for first, second in answers)
    assert means[1] == pytest.approx(means[0], abs=0.5)  # weights are rounded in other groups


def test_a_rank_that_hangs_in_a_step_is_named(monkeypatch):
    monkeypatch.setitem(ranks.PEERS, "mp", "tests.e2e.hanging_peer")
    words = "rank 1: its step hung: 1 s without computing or waiting"
    with (
        LLM(use_tqdm=False, num_blocks=40, max_model_len=64, tensor_parallel_size=2) as llm,
        pytest.raises(EngineDead, match=words),
    ):
        llm.generate(["One, two,"], GREEDY, use_tqdm=False)


def test_an_idle_engine_notices_that_a_rank_is_gone():
    with LLM(use_tqdm=False, num_blocks=40, max_model_len=64, tensor_parallel_size=2) as llm:
        llm.engine.check_ranks()
        llm.engine._runner._peers._processes[0].kill()
        deadline = time.monotonic() + 60
        while llm.engine._runner._peers._fault is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(EngineDead, match=r"rank 1 \(pid \d+\) was killed by SIGKILL"):
            llm.engine.check_ranks()

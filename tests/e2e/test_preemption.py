"""The built-in model in a pool of a quarter of what is asked for: the same tokens, whichever way requests leave it."""

import random

from quire import LLM, SamplingParams

BLOCK = 16
MODES = ("recompute", "swap", "auto")


def test_a_quarter_of_the_demand_gives_the_same_tokens_in_all_three_modes():
    chosen = random.Random(3)
    lengths = [chosen.randrange(20, 90) for _ in range(12)]
    prompts = [{"prompt_token_ids": [chosen.randrange(1000, 40000) for _ in range(n)]} for n in lengths]
    sampling = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=32, ignore_eos=True) for i in range(len(prompts))
    ]
    demand = sum(-(-(length + 32) // BLOCK) for length in lengths)
    found = {}
    with LLM(use_tqdm=False, max_model_len=256, num_blocks=2 * demand) as llm:
        wanted = [one.outputs[0].token_ids for one in llm.generate(prompts, sampling, use_tqdm=False)]
        assert not llm.engine.scheduler.stats.num_preemptions
    for mode in MODES:
        with LLM(use_tqdm=False, max_model_len=256, num_blocks=demand // 4, preemption_mode=mode) as llm:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            found[mode] = [one.outputs[0].token_ids for one in outputs]
            stats, memory = llm.engine.scheduler.stats, llm.engine.memory
            assert stats.num_preemptions
            assert bool(stats.num_swaps_out) == (mode != "recompute")
            llm.engine.check_integrity()
            assert (memory.num_free, memory.swap.hosts.num_used) == (memory.num_blocks, 0)
    assert found == dict.fromkeys(MODES, wanted)

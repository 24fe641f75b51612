"""Layers with a sliding window free the blocks behind it, and every answer stays that of transformers."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.layout import LayerGroups
from quire.core.request import Request
from tests.models.checkpoints import gemma2, gemma3, mistral, phi3, prompts, reference_logits, save

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
LONG = {"max_position_embeddings": 256}
MODELS = {
    "all layers": lambda: mistral(**LONG, sliding_window=12),
    "all layers, fused": lambda: phi3(**LONG, sliding_window=9),
    "every second layer": lambda: gemma2(**LONG, sliding_window=8, num_hidden_layers=4),
    "most layers": lambda: gemma3(
        **LONG, sliding_window=10, num_hidden_layers=5
    ),  # two groups, one of them padded
}
SMALL = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1, "block_size": 4},
    "mixed batch": {"max_num_seqs": 8, "block_size": 8},
    "chunked, no cache": {**SMALL, "enable_prefix_caching": False},
    "recomputed": {**SMALL, "num_blocks": 14, "preemption_mode": "recompute"},
    "swapped": {**SMALL, "num_blocks": 14, "preemption_mode": "swap"},
    "offloaded": {**SMALL, "num_blocks": 14, "kv_offload_gb": 0.001},
    "one step at a time": {**SMALL, "steps_in_flight": 0},
    "prompt lookup": {**SMALL, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
}


def open_llm(folder: Path, **settings: Any) -> LLM:
    settings = {"max_model_len": 96, "swap_space": 0.001, **settings}
    return LLM(str(folder), device="cpu", dtype="float32", quantization="none", use_tqdm=False, **settings)


def texts() -> list[list[int]]:
    """Most are longer than any window; some begin alike."""
    some = prompts(5, 3, 6, 4, 41, 33)
    return [*some, some[4][:30] + [3, 4], some[4][:36]]


def tokens_of(llm: LLM, given: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[list[int]]]:
    outputs = llm.generate([{"prompt_token_ids": text} for text in given], sampling, use_tqdm=False)
    llm.engine.check_integrity()
    return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_past_the_window_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = save(tmp_path, MODELS[name]())
    answers = {}
    for how, settings in SETTINGS.items():
        with open_llm(tmp_path, **settings) as llm:
            answers[how] = tokens_of(llm, texts())
            # again: prefix hits, of which the window's blocks may be gone
            assert tokens_of(llm, texts()) == answers[how], how
            stats = llm.engine.scheduler.stats
            assert (stats.num_preemptions > 0) == (how in ("recomputed", "swapped", "offloaded")), how
            assert (stats.num_swaps_out > 0) == (how == "swapped") or how == "offloaded"
            if how in ("mixed batch", "chunked, no cache"):
                assert (llm.engine.memory.stats.prefix_hits > 0) == (how == "mixed batch")
        assert answers[how] == answers["alone"], how
    for text, (answer,) in zip(texts(), answers["alone"], strict=True):
        logits = reference_logits(reference, [*text, *answer])
        assert logits[len(text) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.parametrize("name", ["all layers", "most layers"])
def test_samples_and_beams_share_what_they_see(name: str, tmp_path: Path) -> None:
    save(tmp_path, MODELS[name]())
    drawn = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    beams = SamplingParams(n=3, use_beam_search=True, max_tokens=20, temperature=0.0, ignore_eos=True)
    found = []
    small = {"block_size": 4, "max_num_seqs": 12, "max_num_batched_tokens": 12, "num_blocks": 36}
    for settings in (
        {"block_size": 16, "max_num_seqs": 4, "num_blocks": 200},
        {**small, "preemption_mode": "recompute"},
        {**small, "preemption_mode": "swap"},
    ):
        with open_llm(tmp_path, **settings) as llm:
            found.append([tokens_of(llm, texts()[:4], sampling) for sampling in (drawn, beams, drawn)])
            if "preemption_mode" in settings:
                assert llm.engine.scheduler.stats.num_preemptions > 0
    assert found[0][0] == found[0][2]
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize(("name", "num_full", "num_window"), [
    ("all layers", 0, 1), ("every second layer", 1, 1), ("most layers", 1, 4),
])  # fmt: skip
def test_a_long_sequence_holds_the_blocks_of_its_window(
    name: str, num_full: int, num_window: int, tmp_path: Path
) -> None:
    """In a pool that could not hold all of its tokens in all layers."""
    save(tmp_path, MODELS[name]())
    groups = num_full + num_window
    num_blocks = (50 * num_full + 14 * num_window) // groups + 1
    (text,) = prompts(90)
    settings = {"max_model_len": 200, "block_size": 4, "max_num_batched_tokens": 8, "num_blocks": num_blocks}
    sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with open_llm(tmp_path, max_num_seqs=1, **settings) as llm:
        memory = llm.engine.memory
        window = memory._counts._window
        assert (memory.num_full, memory.num_groups) == (num_full, groups)
        llm.engine.add(Request("long", tuple(text), sampling))
        while llm.engine.has_work:
            llm.engine.step()
            for sequence in llm.engine.scheduler.running:
                held = len(sequence.block_ids) - sequence.block_ids.count(0)
                whole = len(sequence.block_ids) // groups
                # the window, the block that is written, and prompts of two steps that wait for their commit
                kept = -(-window // 4) + 2 + 2 * 8 // 4
                assert held <= num_full * whole + num_window * min(whole, kept)
            llm.engine.check_integrity()
        assert memory.num_free == memory.num_blocks
    if num_full == 0:
        assert num_blocks < 190 // 4, "the pool is smaller than the sequence"


def test_layers_are_grouped_by_their_windows() -> None:
    together = LayerGroups.of([0, 0, 0])
    assert (together.num_groups, together.num_layers, together.window) == (1, 3, 0)
    assert LayerGroups.of([0, 0, 8]) == LayerGroups.together(3), (
        "a group of one layer in three would be padding"
    )
    alternating = LayerGroups.of([8, 0, 8, 0])
    assert alternating.places == ((1, 0), (0, 0), (1, 1), (0, 1))
    padded = LayerGroups.of([8, 8, 8, 0, 8, 8, 0])
    assert (padded.num_full, padded.num_window, padded.num_layers) == (1, 3, 2)
    assert len(set(padded.places)) == 7

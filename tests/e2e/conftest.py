"""The 80 MT-bench questions as prompts, and the settings under which the tokens must not change."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams

MAX_TOKENS = 40  # more than two blocks of 16, and more than a step of the tiny pool


@dataclass(frozen=True)
class Setting:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    alone: bool = False  # one request after the other, instead of all at once


# Of the 80 questions every sixth, two or so of each kind: for settings in which all of them take minutes. Six and the
# five kinds of seeded requests have no common factor, so these are of all kinds too.
FEW = slice(None, None, 6)
TINY = {"num_blocks": 40, "max_num_seqs": 12, "max_num_batched_tokens": 24}  # chunks and preempts
SETTINGS = [
    Setting("alone", {"max_num_seqs": 1, "enable_prefix_caching": False}, alone=True),
    Setting("batch", {"max_num_seqs": 80}),
    Setting("blocks of 1", {"max_num_seqs": 80, "block_size": 1, "max_num_batched_tokens": 300}),
    Setting("blocks of 128", {"max_num_seqs": 80, "block_size": 128, "num_blocks": 400}),
    Setting("tiny pool", TINY),
    Setting("tiny pool, committed at once", {**TINY, "steps_in_flight": 0}),
]


@pytest.fixture(scope="session")
def questions(shared: Path) -> list[str]:
    lines = (shared / "data" / "mtbench" / "question.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines]


@pytest.fixture(scope="session")
def prompts(questions: list[str]) -> list[list[int]]:
    """Token ids in the chat format. The tiny pool can hold any one of them."""
    with LLM(use_tqdm=False) as llm:
        texts = [llm.template.render([{"role": "user", "content": q}]) for q in questions]
        return [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def generate(setting: Setting, prompts: list[list[int]], sampling: list[SamplingParams], **options: Any):
    """Token ids per prompt, and how often the engine preempted."""
    with LLM(use_tqdm=False, max_model_len=512, **{**setting.options, **options}) as llm:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        if setting.alone:
            outputs = [llm.generate(p, s, use_tqdm=False)[0] for p, s in zip(inputs, sampling, strict=True)]
        else:
            outputs = llm.generate(inputs, sampling, use_tqdm=False)
        llm.engine.check_integrity()
        assert llm.engine.memory.num_free == llm.engine.memory.num_blocks
        return [o.outputs[0].token_ids for o in outputs], llm.engine.scheduler.stats.num_preemptions


@pytest.fixture(scope="session")
def llm():
    """The built-in model as people get it, shared by tests that leave no trace in it."""
    with LLM(use_tqdm=False, max_num_seqs=32, kv_cache_memory_bytes=512 << 20) as engine:
        yield engine
        engine.engine.check_integrity()

"""Pinned prefixes: computed once, held whatever happens, and every conversation that begins with one hits."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, InvalidRequest
from quire.engine.build.pins import pin_prefixes

RULES = "You answer in one short sentence. " + "Rule: be kind, exact and brief. " * 12
MESSAGES = [{"role": "system", "content": RULES}]
SHORT = SamplingParams(temperature=0, max_tokens=2)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("prefixes")
    (folder / "rules.txt").write_text(RULES)
    (folder / "system.json").write_text(json.dumps(MESSAGES))
    files = [str(folder / "rules.txt"), str(folder / "system.json")]
    with LLM(use_tqdm=False, num_blocks=60, max_model_len=512, pin_prefix=files) as made:
        yield made
        made.engine.check_integrity()


def cached(llm: LLM, question: str) -> tuple[int, int]:
    """Of a completion and of a chat that begin with the rules."""
    (plain,) = llm.generate(RULES + question, SHORT, use_tqdm=False)
    (chat,) = llm.chat([*MESSAGES, {"role": "user", "content": question}], SHORT, use_tqdm=False)
    return plain.num_cached_tokens, chat.num_cached_tokens


def test_every_request_that_begins_with_a_pinned_prefix_hits_whatever_was_served_between(llm: LLM) -> None:
    size = llm.engine.memory.block_size
    plain, chat = (prefix.num_blocks * size for prefix in llm.report.pinned)
    assert plain > 100
    assert chat > 100
    assert llm.engine.stats.num_requests == 0
    assert llm.engine.memory.num_blocks - llm.engine.memory.num_free == (plain + chat) // size
    assert cached(llm, "Why is the sky blue?") == (plain, chat)
    for start in range(0, 4000, 500):  # more than the pool holds
        llm.generate({"prompt_token_ids": list(range(start, start + 400))}, SHORT, use_tqdm=False)
    assert cached(llm, "What is a quire?") == (plain, chat)
    llm.engine.memory.reset_prefix_index()
    assert cached(llm, "Who wrote Faust?") == (plain, chat)
    llm.engine.check_integrity()
    assert any("rules.txt: " in line and "never given up" in line for line in llm.report.lines())


def test_a_request_that_needs_the_pinned_blocks_is_refused_at_once(llm: LLM) -> None:
    held = llm.engine.memory.num_pinned
    with pytest.raises(InvalidRequest, match=f"the whole pool has {60 - held}"):
        llm.generate("hello", SamplingParams(max_tokens=500, n=2), use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.txt", None, r"missing\.txt: cannot be read"),
        ("empty.txt", " \n", "the file is empty"),
        ("short.txt", "Hello.", "do not fill a block of 16"),
        ("long.txt", "a b c d " * 200, "the context is 512"),
        ("broken.json", '[{"role": ', "is no valid JSON"),
        ("other.json", "[1, 2]", "give a list of messages"),
        ("roles.json", '[{"role": "system", "content": 3}]', r"roles\.json"),
    ],
)
def test_a_file_that_cannot_be_held_is_one_clear_line(
    llm: LLM, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    changed = replace(llm.config, memory=replace(llm.config.memory, pin_prefix=(str(path),), num_blocks=999))
    with pytest.raises(ConfigError, match=message):
        pin_prefixes(llm.engine, changed, llm._built.source)


def test_more_than_half_of_the_pool_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rules.txt").write_text(RULES)
    with pytest.raises(ConfigError, match=r"would hold \d+ of the pool's 8 blocks, and at most half"):
        LLM(use_tqdm=False, num_blocks=8, max_model_len=512, pin_prefix=str(tmp_path / "rules.txt"))
    with pytest.raises(ConfigError, match="needs the prefix cache"):
        LLM(use_tqdm=False, num_blocks=8, share=False, pin_prefix=str(tmp_path / "rules.txt"))

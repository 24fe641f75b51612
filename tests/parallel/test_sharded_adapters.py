"""Adapters whose matrices are divided among ranks: the answers of one rank, and S-LoRA's bytes."""

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import AdapterError
from tests.adapters.making import config, random_tensors, write, write_model

PROMPT = list(range(20, 32))
RANKS = {"eight": 8, "five": 5, "sixteen": 16, "one": 1}  # none is padded; of one rank, a process has nothing
SAMPLING = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)


def _answers(folder, size: int, names: list[str | None], **settings) -> tuple[list, dict]:
    modules = {name: str(folder / name) for name in RANKS}
    with LLM(
        str(folder / "model"), use_tqdm=False, load_format="dummy", quantization="none", num_blocks=400,
        max_model_len=64, max_num_seqs=8, enable_prefix_caching=False, lora_modules=modules,
        tensor_parallel_size=size, **settings,
    ) as llm:  # fmt: skip
        prompts = [{"prompt_token_ids": PROMPT}] * len(names)
        outputs = llm.generate(prompts, SAMPLING, adapter=names, use_tqdm=False)
        llm.engine.check_integrity()
        traffic = llm.engine._runner.traffic() if size > 1 else {}
        if settings.get("fully_sharded_loras"):
            with pytest.raises(AdapterError, match=r"given from memory.*save it"):
                llm.add_adapter("other", random_tensors(9, 4), config(4))
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs], traffic


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    write_model(path / "model")
    for seed, (name, rank) in enumerate(RANKS.items()):
        write(path / name, seed, rank, lora_alpha=rank * 0.01)
    return path


def test_answers_are_those_of_one_rank_and_bytes_those_of_the_paper(folder):
    names = [*RANKS, None]
    alone, _ = _answers(folder, 1, names)
    assert len({str(answer) for answer, _ in alone}) > 1  # adapters change answers
    sharded, traffic = _answers(folder, 2, names, fully_sharded_loras=True)
    whole, others = _answers(folder, 2, names)
    for found in (sharded, whole):
        for (tokens, logprob), (expected, near) in zip(found, alone, strict=True):
            assert tokens == expected
            assert logprob == pytest.approx(near, abs=1e-4)
    assert not [tag for _, tag in others if tag.startswith("lora")]
    # Two layers; of the last one, what follows attention is computed where tokens are sampled.
    first, last = len(PROMPT) + 3, 4
    ranks = sum(RANKS.values())
    gathered = {"attention": 3 * 2 * first, "mlp": 2 * (first + last)}
    for part, tokens in gathered.items():
        assert traffic["all_gather", f"lora {part}"] == tokens * ranks * 4 * 1 // 2
        assert traffic["all_reduce", f"lora {part}"] == 2 * (first + last) * ranks * 4 * 1 // 2

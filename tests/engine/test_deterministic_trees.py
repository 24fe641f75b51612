"""With --deterministic, trees give the bits of plain decoding on a GPU too: its kernels, in Triton's interpreter."""

import json
from pathlib import Path

import pytest
import torch

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine import build as building
from quire.engine.engine import Engine
from quire.kernels import registry
from quire.models import loading
from quire.quant import choice
from quire.quant.full import FullPrecision
from quire.speculate.adapt import Shape
from quire_lab.baselines.synthetic_drafts import SyntheticProposer
from tests.engine.test_device_runner import SHAPE, PaddingRunner

pytestmark = pytest.mark.skipif(
    "triton" not in registry.alternatives("attention") or torch.cuda.is_available(),
    reason="needs Triton, in its interpreter and on CPU tensors",
)
PROMPTS = [tuple(range(10, 69)), (5, 6, 7)]  # the first answer crosses a border of tiles, at 64 positions
SAMPLING = SamplingParams(temperature=0, max_tokens=10, logprobs=3, ignore_eos=True)
TREES = {"method": "ngram", "num_speculative_tokens": 3, "tree_width": 3, "adaptive": False}


@pytest.fixture
def as_on_a_gpu(ordered_dots: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides bits is what a GPU has: attention, products, and the pages that an accepted path leaves."""
    for operation in ("attention", "invariant_linear", "trees"):
        monkeypatch.setitem(registry._ALTERNATIVES, operation, (("triton", "cpu"),))
    monkeypatch.setattr(choice, "FullPrecision", lambda dtype, device, _: FullPrecision(dtype, device, True))
    monkeypatch.setattr("quire.engine.build.runner.Runner", PaddingRunner)
    monkeypatch.setattr(PaddingRunner, "warm_up", lambda self, seconds: 0)
    small = loading._random_tensors  # matrices too small for attention's last bits to show in a logprob
    monkeypatch.setattr(
        loading,
        "_random_tensors",
        lambda *how: ((name, one * 8 ** (one.dim() - 1)) for name, one in small(*how)),
    )


def _answers(engine: Engine) -> tuple[list[list[int]], list[list[tuple]]]:
    """Tokens, and logprobs as they are."""
    for index, prompt in enumerate(PROMPTS):
        engine.add(Request(str(index), list(prompt), SAMPLING))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    scores: list[list[tuple]] = [[] for _ in PROMPTS]
    while engine.has_work:
        for update in engine.step():
            tokens[int(update.request_id)] += update.token_ids
            scores[int(update.request_id)] += [
                (entry.logprob, entry.top_ids, entry.top_logprobs) for entry in update.logprobs
            ]
    engine.check_integrity()
    return tokens, scores


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_trees_give_the_bits_of_plain_decoding(
    tmp_path: Path, as_on_a_gpu: None, kv_cache_dtype: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 1}))
    config = EngineConfig.of(
        model=str(tmp_path), load_format="dummy", dtype="float32", device="cpu", block_size=4, deterministic=True,
        speculative_config=TREES, max_num_seqs=16, enable_prefix_caching=False, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    engine = building.build(config).engine
    assert engine.speculation is not None
    engine.speculation.propose_with(SyntheticProposer({}, SHAPE["vocab_size"], 0.0), Shape(0))
    plain = _answers(engine)
    known = {(prompt, 0): answer for prompt, answer in zip(PROMPTS, plain[0], strict=True)}
    proposer = SyntheticProposer(known, SHAPE["vocab_size"], 0.3, 1.0, seed=2)
    engine.speculation.propose_with(proposer, Shape(2, 3))
    assert _answers(engine) == plain
    assert engine.draft_stats.num_accepted_tokens > 3  # most of them in branches that are not the first
    engine.close()

"""Launching a step reads nothing back from the device: on a GPU every such read would wait for all that is queued."""

import json
import sys
from pathlib import Path

import pytest
import torch

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine import build as building
from quire.sampling.logprobs import prompt_logprobs
from tests.engine.test_device_runner import SHAPE, DeviceRunner, PaddingRunner

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
# What stands in for a GPU's kernels here; and host memory that is about to be sent, filled through numpy.
ELSEWHERE = (
    "quire/kernels/",
    "quire/sampling/draw.py",
    "quire/runner/staging.py",
    "quire/sampling/columns.py",
)
PROMPTS = [[5, 6, 7], list(range(10, 60)), [9] * 17, list(range(10, 26)), [3], list(range(20, 40))]
SAMPLINGS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=12, logprobs=2),
    SamplingParams(
        temperature=1.0, top_p=0.8, seed=1, max_tokens=30, presence_penalty=1.0, logit_bias={3: 1.0}
    ),
    SamplingParams(temperature=0, max_tokens=9, logprobs=2, bad_words_token_ids=((6, 7), (9,))),
    SamplingParams(temperature=0.7, top_k=5, seed=8, max_tokens=40, min_tokens=4, repetition_penalty=1.2),
    SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=11, logprobs=1),
]
TREES = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "tree_width": 2}


class Watched:
    """Between engine and runner: notes which lines of ours read a tensor's content while a step is launched."""

    def __init__(self, runner: DeviceRunner, patched: pytest.MonkeyPatch) -> None:
        self.runner, self.reads, self.num_steps = runner, set(), 0
        self._launching = False
        for name in READS:
            patched.setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))

    def _noting(self, name, read):
        def noted(tensor, *given, **named):
            if self._launching:
                frame = sys._getframe(1)
                while frame is not None and "/quire/" not in frame.f_code.co_filename:
                    frame = frame.f_back
                if frame is not None and not any(one in frame.f_code.co_filename for one in ELSEWHERE):
                    self.reads.add(f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}")
            return read(tensor, *given, **named)

        return noted

    def launch(self, step):
        self._launching, self.num_steps = True, self.num_steps + 1
        self.runner.launch(step)
        self._launching = False

    def mask(self, mask):
        self.runner.mask(mask)

    def collect(self):
        return self.runner.collect()

    def close(self):
        self.runner.close()


@pytest.mark.parametrize(("runner", "settings"), [
    (DeviceRunner, {"max_num_batched_tokens": 16}), (PaddingRunner, {}), (PaddingRunner, {"speculative_config": TREES}),
])  # fmt: skip
def test_a_launch_reads_nothing_back(tmp_path: Path, monkeypatch, runner: type, settings: dict) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    monkeypatch.setattr("quire.engine.build.runner.Runner", runner)
    config = EngineConfig.of(
        model=str(tmp_path), load_format="dummy", dtype="float32", device="cpu", block_size=4, num_blocks=200,
        swap_space=0.001, **settings,
    )  # fmt: skip
    engine = building.build(config).engine
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.add(Request(str(index), prompt, sampling))
    watched = engine.watch(lambda inner: Watched(inner, monkeypatch))
    while engine.has_work:
        engine.step()
    engine.close()
    assert watched.num_steps > 20
    assert watched.reads == set()


def test_a_read_would_be_seen(monkeypatch) -> None:
    """Prompts' logprobs are read at once, by design: whoever wants them reads far more than tokens."""

    class AnswerParsers:
        def launch(self, step):
            prompt_logprobs(torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64), 1)

    watched = Watched(AnswerParsers(), monkeypatch)
    watched.launch(None)
    assert any("tolist at" in one and "logprobs.py" in one for one in watched.reads)

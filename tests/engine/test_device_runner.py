"""CudaOps gives the tokens of CpuOps: same steps, same model, rows kept on the device."""

import json
import sys
from pathlib import Path

import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling import SamplingParams
from quire.engine import build as building
from quire.runner.cuda import CudaOps
from quire.runner.graphs import Graphs, Kind, StepShape, adapted_sizes, decode_sizes, prompt_shapes
from quire.runner.runner import Runner

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
PROMPTS = [[5, 6, 7], list(range(10, 60)), [9] * 17, list(range(10, 26)), [3], list(range(20, 40))]
SAMPLINGS = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=12),
    SamplingParams(temperature=1.0, top_p=0.8, seed=1, max_tokens=30, presence_penalty=1.0),
    SamplingParams(temperature=0, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.7, top_k=5, seed=8, max_tokens=40, min_tokens=4),
    SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=11, logprobs=1),
]


class EagerGraphs(Graphs):
    """Pads as graphs do, and runs at once: what a graph would have captured."""

    num_small = 0

    def __init__(self, model, pool, inputs, drafts, limits, adapters=None) -> None:
        self._model, self._pool, self._inputs, self._drafts = model, pool, inputs, drafts
        self._adapters, self._adapted_sizes = adapters, adapted_sizes(limits.max_num_seqs)
        self._decode_sizes = decode_sizes(limits.max_num_seqs)
        self._prompt_shapes = prompt_shapes(limits.max_num_seqs, limits.max_num_batched_tokens)

    def capture(self, seconds: float) -> int:
        return 0

    def _run(self, shape: StepShape, adapted: bool = False):
        EagerGraphs.num_small += shape.kind is not Kind.DECODE
        return self._model(self._batch(shape, adapted), self._pool)


class DeviceRunner(Runner):
    """A Runner with the GPU's operations, here through the reference kernels."""

    make_ops = CudaOps

    def __init__(self, model, pool, limits, device, proposals=None, adapters=None, transfers=None) -> None:
        super().__init__(model, pool, limits, device, proposals, adapters, transfers, self.make_ops)


class PaddingOps(CudaOps):
    def __init__(self, model, pool, limits, device, adapters=None) -> None:
        super().__init__(model, pool, limits, device, adapters)
        self._graphs = EagerGraphs(model, pool, self._inputs, self._drafts, limits, adapters)


class PaddingRunner(DeviceRunner):
    make_ops = PaddingOps


def _outputs(
    runner: type, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> dict[tuple[str, int], tuple]:
    monkeypatch.setattr("quire.engine.build.runner.Runner", runner)
    config = EngineConfig.of(
        model=str(folder), load_format="dummy", dtype="float32", device="cpu", block_size=4, **settings
    )
    engine = building.build(config).engine
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        engine.add(Request(str(index), prompt, sampling))
    found: dict[tuple[str, int], tuple] = {}
    while engine.has_work:
        for update in engine.step():
            key = (update.request_id, update.index)
            found[key] = found.get(key, ()) + update.token_ids
            if update.prompt_logprobs:
                found[(update.request_id, -1)] = tuple(entry.token_id for entry in update.prompt_logprobs)
    engine.check_integrity()
    engine.close()
    return found


@pytest.mark.parametrize("settings", [
    {}, {"steps_in_flight": 0}, {"max_num_batched_tokens": 8}, {"num_blocks": 40, "max_num_seqs": 6},
    {"num_blocks": 40, "max_num_seqs": 6, "kv_cache_dtype": "int8"},
])  # fmt: skip
def test_tokens_are_those_of_the_plain_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    expected = _outputs(Runner, tmp_path, monkeypatch, **settings)
    assert _outputs(DeviceRunner, tmp_path, monkeypatch, **settings) == expected


@pytest.mark.parametrize(("times", "settings"), [
    (1, {}),
    (1, {"kv_cache_dtype": "int8"}),
    (1, {"max_num_batched_tokens": 32, "max_num_seqs": 18}),
    (1, {"steps_in_flight": 0, "max_num_batched_tokens": 64}),
    (4, {"max_num_batched_tokens": 96, "max_num_seqs": 30}),  # every row is taken: the padding has one of its own
])  # fmt: skip
def test_padding_to_the_sizes_of_graphs_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, settings: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    samplings = [one.changed(prompt_logprobs=None) for one in SAMPLINGS]  # steps with those are never padded
    monkeypatch.setattr(sys.modules[__name__], "SAMPLINGS", samplings * times)
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", PROMPTS * times)
    expected = _outputs(Runner, tmp_path, monkeypatch, **settings)
    EagerGraphs.num_small = 0
    assert _outputs(PaddingRunner, tmp_path, monkeypatch, **settings) == expected
    assert EagerGraphs.num_small > 0


def test_a_step_with_prompts_takes_the_least_shape_with_a_row_to_spare() -> None:
    shapes = prompt_shapes(512, 8192)
    assert all(
        shape.size > previous for shape in shapes for previous in (16, 64, 256) if shape.rows > previous
    )
    graphs = EagerGraphs.__new__(EagerGraphs)
    graphs._prompt_shapes = shapes
    assert graphs.prompt_shape(10, 3) == StepShape(Kind.PROMPTS, 16, 16)
    assert graphs.prompt_shape(260, 15) == StepShape(Kind.PROMPTS, 320, 16)
    assert graphs.prompt_shape(260, 16) == StepShape(Kind.PROMPTS, 320, 64)
    assert graphs.prompt_shape(1300, 40) == StepShape(Kind.PROMPTS, 1408, 256)
    assert graphs.prompt_shape(600, 400) == StepShape(Kind.PROMPTS, 640, 513)
    assert graphs.prompt_shape(2048, 512) == StepShape(Kind.PROMPTS, 2048, 513)
    assert graphs.prompt_shape(2049, 512) is None

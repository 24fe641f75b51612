"""What a closed engine held is freed with the last reference to it: no collection of garbage has to run."""

import gc
from pathlib import Path

import pytest
import torch

from quire.core.sampling import SamplingParams
from quire.llm.llm import LLM
from tests.adapters.making import write_model


@pytest.mark.parametrize("feature", ["plain", "draft model", "disk tier", "adapters", "ranks"])
def test_no_tensor_of_a_closed_engine_is_left_to_the_garbage_collector(tmp_path: Path, feature: str) -> None:
    model = str(write_model(tmp_path / "model"))
    settings: dict[str, object] = {
        "plain": {},
        "draft model": {
            "speculative_config": {"method": "draft_model", "model": model, "quantization": "none"}
        },
        "disk tier": {"kv_offload_gb": 0.01, "kv_offload_dir": str(tmp_path / "tier")},
        "adapters": {"enable_lora": True},
        "ranks": {
            "tensor_parallel_size": 2,
            "kv_offload_gb": 0.01,
            "kv_offload_dir": str(tmp_path / "tier"),
            "role": "prefill",
        },
    }[feature]
    gc.collect()
    gc.disable()
    try:
        with LLM(model, load_format="dummy", dtype="float32", device="cpu", num_blocks=40, **settings) as llm:
            llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4), use_tqdm=False)
        del llm
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [kept.shape for kept in gc.garbage if isinstance(kept, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []

"""Tokens and probabilities are those of the base with the adapter merged by PEFT, on every architecture."""

import warnings
from copy import deepcopy

import pytest
import torch

from quire import LLM, SamplingParams
from tests.models import seq2seq
from tests.models.checkpoints import VARIANTS, save

peft = pytest.importorskip("peft", reason="PEFT is what adapters are compared with")

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPT = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
CASES = {
    "llama": {"target_modules": [*LLAMA, "lm_head", "embed_tokens"], "r": 7, "rank_pattern": {"q_proj": 20}},
    "llama-with-biases": {
        "target_modules": LLAMA,
        "r": 33,
        "use_rslora": True,
        "alpha_pattern": {"up_proj": 3},
    },
    "llama-tied": {"target_modules": ["q_proj", "v_proj"], "r": 16},
    "mistral-window": {"target_modules": LLAMA, "r": 4, "layers_to_transform": [0, 2]},
    "qwen2": {"target_modules": LLAMA, "r": 8},
    "qwen3": {"target_modules": LLAMA, "r": 8},
    "mixtral": {"target_modules": LLAMA[:4], "r": 8},
    "qwen2-moe": {"target_modules": [*LLAMA[:4], "shared_expert.up_proj", "shared_expert.down_proj"], "r": 5},
    "olmoe": {"target_modules": LLAMA[:4], "r": 8},
    "phi3": {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "r": 5},
    "granite": {"target_modules": [*LLAMA, "lm_head", "embed_tokens"], "r": 8},
    "olmo2": {"target_modules": LLAMA, "r": 8},
    "smollm3": {"target_modules": LLAMA, "r": 8},
    "gemma": {"target_modules": LLAMA, "r": 8},
    "gemma2": {"target_modules": LLAMA, "r": 8},
    "gemma3": {"target_modules": LLAMA, "r": 8},
    "starcoder2": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"], "r": 8},
    "neox": {"target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"], "r": 8},
    "falcon-7b": {"target_modules": ["query_key_value", "dense"], "r": 8},
    "falcon-40b": {"target_modules": ["query_key_value", "dense", "dense_h_to_4h"], "r": 8},
    "bloom": {"target_modules": ["query_key_value", "dense", "dense_4h_to_h"], "r": 8},
    "opt": {"target_modules": OPT, "r": 8},
    "opt-350m": {"target_modules": [*OPT, "project_in", "project_out"], "r": 3},
    "opt-gelu-untied": {"target_modules": [*OPT, "lm_head", "embed_tokens"], "r": 1},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "r": 8},
    "gpt2-unscaled-untied": {"target_modules": ["c_attn", "lm_head"], "r": 8},
}
PROMPTS = [[1, 5, 9, 13, 17, 21], [40, 3]]


@pytest.mark.parametrize("variant", CASES)
def test_tokens_and_probabilities_are_those_of_the_merged_model(variant, tmp_path):
    base = save(tmp_path / "base", VARIANTS[variant]())
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(
            base, peft.LoraConfig(lora_alpha=2, init_lora_weights=False, **CASES[variant])
        )
        adapted.save_pretrained(tmp_path / "adapter")
        merged = adapted.merge_and_unload().eval()
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    settings = {
        "dtype": "float32",
        "quantization": "none",
        "device": "cpu",
        "num_blocks": 100,
        "use_tqdm": False,
    }
    with LLM(str(tmp_path / "base"), lora_modules={"mine": str(tmp_path / "adapter")}, **settings) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(inputs, sampling, adapter="mine", use_tqdm=False)
        llm.engine.check_integrity()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = output.outputs[0]
        token_ids = [*prompt, *answer.token_ids]
        with torch.inference_mode():
            logprobs = merged(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        assert logprobs[len(prompt) - 1 : -1].argmax(-1).tolist() == list(answer.token_ids)
        found = [entry for entry in [*output.prompt_logprobs, *answer.logprobs] if entry is not None]
        for position, entry in enumerate(found, start=1):
            expected = float(logprobs[position - 1, token_ids[position]])
            assert _logprob(entry, token_ids[position]) == pytest.approx(expected, abs=2e-4)


T5 = ["q", "k", "v", "o", "wi", "wo"]
FLAN = [*T5[:4], "wi_0", "wi_1", "wo"]
# Two adapters each; a text is a pattern for whole names.
SEQ2SEQ = {
    "t5": ({"target_modules": T5, "r": 5}, {"target_modules": r"encoder\..*\.(q|wo)", "r": 8}),
    "t5-gelu": ({"target_modules": T5, "r": 8}, {"target_modules": r".*EncDecAttention\.(k|v)", "r": 4}),
    "flan-untied": ({"target_modules": [*FLAN, "lm_head"], "r": 20}, {"target_modules": ["q", "v"], "r": 4}),
    "flan-silu": ({"target_modules": FLAN, "r": 8}, {"target_modules": r"decoder\..*\.(q|o|wi_1)", "r": 3}),
    "mt5-untied": ({"target_modules": FLAN, "r": 8}, {"target_modules": ["wi_0", "shared"], "r": 3}),
    "bart": ({"target_modules": OPT, "r": 8}, {"target_modules": ["q_proj", "v_proj"], "r": 4}),
    "bart-scaled-untied-relu": (
        {"target_modules": [*OPT, "lm_head"], "r": 8},
        {"target_modules": r".*encoder_attn\.(k|v)_proj", "r": 4},
    ),
}


@pytest.mark.parametrize("variant", SEQ2SEQ)
def test_encoder_decoder_tokens_are_those_of_the_merged_models_in_one_batch(variant, tmp_path):
    base = seq2seq.save(tmp_path / "base", seq2seq.VARIANTS[variant](), untied="untied" in variant)
    texts = seq2seq.prompts(21, 5)
    expected, adapters = {None: [seq2seq.generate(base, text, 8)[0] for text in texts]}, {}
    for index, config in enumerate(SEQ2SEQ[variant]):
        torch.manual_seed(index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = peft.get_peft_model(
                deepcopy(base), peft.LoraConfig(lora_alpha=8, init_lora_weights=False, **config)
            )
            folder = adapters[str(index)] = str(tmp_path / str(index))
            adapted.save_pretrained(folder)
            merged = adapted.merge_and_unload().eval()
        expected[str(index)] = [seq2seq.generate(merged, text, 8)[0] for text in texts]
        assert expected[str(index)] != expected[None], "an adapter that changes nothing proves nothing"
    assert expected["0"] != expected["1"]
    names = [name for name in expected for _ in texts]
    inputs = [{"prompt_token_ids": text} for _ in expected for text in texts]
    settings = {"dtype": "float32", "quantization": "none", "num_blocks": 200, "use_tqdm": False}
    with LLM(str(tmp_path / "base"), lora_modules=adapters, **settings) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        for _ in range(2):  # the second time, the encoder's pages of each adapter are found
            outputs = llm.generate(inputs, sampling, adapter=names, use_tqdm=False)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            assert found == [tokens for answers in expected.values() for tokens in answers]
        assert llm.engine.memory.stats.prefix_hits >= 3 * 16
        llm.engine.check_integrity()


def _logprob(entry, token_id: int) -> float:
    found = entry[token_id] if isinstance(entry, dict) else entry
    return found.logprob

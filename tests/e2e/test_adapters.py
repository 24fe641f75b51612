"""The two real adapters on the built-in model: the tokens of the base with the adapter merged by PEFT."""

from contextlib import contextmanager

import pytest
import torch

from quire import LLM, SamplingParams
from tests.e2e.reference import reference_model

peft = pytest.importorskip("peft", reason="PEFT is what adapters are compared with")

NAMES = ("smollm-med-5epochs", "smollm-med-100epochs")
QUESTIONS = ("What causes a fever?", "The patient has a headache and", "1, 2, 3,")
TIE = 1e-3  # the reference's own two best logits may be this close; then either is right
TOP = 20  # logits that are compared at every token
# Of a logprob. fp32 sums in another order over 30 layers; 1.1e-3 was seen on AVX-512 without AMX.
CLOSE = 2e-3


@pytest.fixture(scope="module")
def folders(shared):
    if not (shared / "adapters").is_dir():
        pytest.skip("no real adapters in the shared folder")
    return {name: str(shared / "adapters" / name) for name in NAMES}


def test_real_adapters_give_the_tokens_and_logits_of_the_merged_model(folders):
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=TOP)
    with LLM(
        use_tqdm=False, quantization="none", max_model_len=256, max_num_seqs=8, lora_modules=folders
    ) as llm:
        names = [name for name in (*NAMES, None) for _ in QUESTIONS]
        outputs = llm.generate(list(QUESTIONS) * 3, sampling, adapter=names, use_tqdm=False)
        llm.engine.check_integrity()
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert len({str(answer) for answer in answers}) > len(QUESTIONS)  # adapters do change answers
    model = peft.PeftModel.from_pretrained(reference_model(), folders[NAMES[0]], NAMES[0])
    try:
        model.load_adapter(folders[NAMES[1]], NAMES[1])
        for first, name in zip(range(0, 9, 3), (*NAMES, None), strict=True):
            with _merged(model, name):
                for output in outputs[first : first + 3]:
                    _check(model, output)
    finally:
        model.unload()


@contextmanager
def _merged(model, name: str | None):
    """The base within, with this adapter or none added to its weights."""
    if name is None:
        with model.disable_adapter():
            yield
        return
    model.set_adapter(name)
    model.merge_adapter([name])
    try:
        yield
    finally:  # the reference is shared: later tests need its own weights
        model.unmerge_adapter()


@torch.inference_mode()
def _check(model, output) -> None:
    prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    logits = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0, :-1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None]).squeeze(1)
    assert float((logits.max(-1).values - chosen).max()) <= TIE
    right = torch.log_softmax(logits, -1)  # as logits, but for a number of each line's own
    for line, logprobs in zip(right, output.outputs[0].logprobs, strict=True):
        assert len(logprobs) >= TOP
        for token, logprob in logprobs.items():
            assert abs(logprob.logprob - float(line[token])) <= CLOSE


def test_on_int8_adapters_answer_the_same_alone_and_together(folders):
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(use_tqdm=False, max_model_len=256, max_num_seqs=8, num_blocks=200, lora_modules=folders) as llm:
        names = [*NAMES, None]
        alone = [llm.generate(QUESTIONS[0], sampling, adapter=name, use_tqdm=False)[0] for name in names]
        together = llm.generate([QUESTIONS[0]] * 3, sampling, adapter=names, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
        assert llm.engine.memory.adapter_pages.num_resident == 2

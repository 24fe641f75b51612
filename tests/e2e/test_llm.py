"""LLM as its users meet it, on the built-in model."""

import math
import os
import signal
import time

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, ContextExceeded, EngineDead, InvalidRequest, QuireError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


def test_it_knows_the_capital_of_france(llm):
    (result,) = llm.chat(QUESTION, GREEDY, use_tqdm=False)
    output = result.outputs[0]
    assert "Paris" in output.text
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == llm.tokenizer.eos_token_id
    assert result.finished
    assert result.metrics.first_token <= result.metrics.total


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = [f"{i} plus {i} is" for i in range(40)]
    results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    assert [r.prompt for r in results] == prompts
    alone = [
        llm.generate(p, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)[0] for p in prompts[:5]
    ]
    assert [r.outputs[0].text for r in alone] == [r.outputs[0].text for r in results[:5]]


def test_text_and_token_ids_are_the_same_prompt(llm):
    ids = llm.tokenizer.encode("The sky is")
    by_text, by_ids = llm.generate(["The sky is", {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    assert by_text.prompt_token_ids == ids
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids


def test_a_stop_string_ends_the_text_before_it_or_after_it_if_asked(llm):
    whole = llm.generate("Count: one, two,", GREEDY.changed(max_tokens=24), use_tqdm=False)[0].outputs[0].text
    word = whole.split()[2]
    cut = llm.generate("Count: one, two,", GREEDY.changed(max_tokens=24, stop=word), use_tqdm=False)[
        0
    ].outputs[0]
    assert cut.text == whole[: whole.index(word)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", word)
    kept = GREEDY.changed(max_tokens=24, stop=[word], include_stop_str_in_output=True)
    assert llm.generate("Count: one, two,", kept, use_tqdm=False)[0].outputs[0].text.endswith(word)


def test_a_stop_token_ends_the_sequence_and_is_named(llm):
    free = llm.generate("Count: one, two,", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stopped = GREEDY.changed(stop_token_ids=[free[5]])
    output = llm.generate("Count: one, two,", stopped, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == free[: free.index(free[5]) + 1]
    assert output.stop_reason == free[5]


def test_ignore_eos_and_min_tokens_keep_it_talking(llm):
    for sampling in (GREEDY.changed(ignore_eos=True), GREEDY.changed(min_tokens=32)):
        assert len(llm.chat(QUESTION, sampling, use_tqdm=False)[0].outputs[0].token_ids) == 32


def test_several_samples_of_one_prompt_differ_and_repeat_with_the_seed(llm):
    sampling = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=16, ignore_eos=True)
    first = llm.generate("Once upon a time", sampling, use_tqdm=False)[0]
    again = llm.generate("Once upon a time", sampling, use_tqdm=False)[0]
    texts = [o.text for o in first.outputs]
    assert len(set(texts)) == 4
    assert texts == [o.text for o in again.outputs]


def test_best_of_returns_the_likeliest(llm):
    sampling = SamplingParams(n=2, best_of=6, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    result = llm.generate("Once upon a time", sampling, use_tqdm=False)[0]
    scores = [o.cumulative_logprob for o in result.outputs]
    assert len(scores) == 2
    assert scores == sorted(scores, reverse=True)


def test_logprobs_are_those_of_the_chosen_tokens_and_the_best(llm):
    sampling = GREEDY.changed(max_tokens=8, logprobs=3, ignore_eos=True)
    output = llm.generate("The capital of France is", sampling, use_tqdm=False)[0].outputs[0]
    assert output.cumulative_logprob == pytest.approx(
        sum(position[t].logprob for position, t in zip(output.logprobs, output.token_ids, strict=True))
    )
    for position, token_id in zip(output.logprobs, output.token_ids, strict=True):
        assert len(position) == 3
        assert position[token_id].rank == 1
        assert sum(math.exp(p.logprob) for p in position.values()) <= 1.0


def test_prompt_logprobs_do_not_depend_on_chunks_or_cache(llm):
    prompt = "The quick brown fox jumps over the lazy dog. " * 12
    sampling = GREEDY.changed(max_tokens=1, prompt_logprobs=2)
    whole = llm.generate(prompt, sampling, use_tqdm=False)[0]
    assert whole.prompt_logprobs[0] is None
    assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids)
    again = llm.generate(prompt, sampling, use_tqdm=False)[0]
    assert again.prompt_logprobs == whole.prompt_logprobs
    with LLM(use_tqdm=False, max_num_batched_tokens=7, max_num_seqs=1, num_blocks=40) as small:
        assert small.generate(prompt, sampling, use_tqdm=False)[0].prompt_logprobs == whole.prompt_logprobs


def test_a_prefix_computed_before_is_not_computed_again(llm):
    prompt = "A long preamble that many requests share, word for word. " * 10
    llm.generate(prompt + "First", GREEDY, use_tqdm=False)
    second = llm.generate(prompt + "Second", GREEDY, use_tqdm=False)[0]
    assert second.num_cached_tokens >= 0.8 * len(second.prompt_token_ids)


def test_a_bad_word_is_not_said(llm):
    free = llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text
    assert "Paris" in free
    assert (
        "Paris"
        not in llm.chat(QUESTION, GREEDY.changed(bad_words=["Paris"]), use_tqdm=False)[0].outputs[0].text
    )


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ("", {}, "the prompt is empty"),
        ({"prompt_token_ids": []}, {}, "the prompt is empty"),
        ({"prompt_token_ids": [1, 49152]}, {}, "token id 49152 is outside the vocabulary of 49152"),
        ({"prompt_token_ids": [-1]}, {}, "token id -1 is outside the vocabulary"),
        ({"prompt_token_ids": [5] * 9000}, {}, "the prompt has 9000 tokens and the context is 8192"),
        ({"text": "no"}, {}, 'needs "prompt" or "prompt_token_ids"'),
        ("hello", {"logit_bias": {99999: 1.0}}, "logit_bias names token id 99999"),
        (
            "hello",
            {"n": 33, "temperature": 1.0},
            "n=33 sequences can never run together with max_num_seqs=32",
        ),
    ],
)
def test_a_bad_request_is_one_clear_line_and_the_engine_serves_on(llm, prompt, sampling, message):
    with pytest.raises(InvalidRequest) as refused:
        llm.generate([prompt, "fine"], SamplingParams(**{"temperature": 0.0, **sampling}), use_tqdm=False)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not llm.engine.has_work
    assert "Paris" in llm.chat(QUESTION, GREEDY, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seq": 4}, "did you mean max_num_seqs"),
        ({"block_size": 0}, "block_size=0 must be a whole number of at least 1"),
        ({"block_size": 512}, "block_size=512 is larger than 256"),
        ({"kv_cache_memory_bytes": 1000}, "the pool cannot hold one block"),
        ({"num_blocks": 4, "max_num_seqs": 8}, "too few for one per sequence with max_num_seqs=8"),
        ({"max_model_len": 9000}, "max_model_len=9000 is more than the model's 8192 positions"),
        ({"device": "cuda:7"}, "PyTorch sees no GPU here"),
        ({"quantization": "int3"}, "quantization='int3' is not known"),
        ({"steps_in_flight": 2}, "must be 0 or 1"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_is_loaded(settings, message):
    with pytest.raises(ConfigError) as refused:
        LLM(use_tqdm=False, **settings)
    assert message in str(refused.value)


def test_a_request_larger_than_the_pool_is_refused_but_a_missing_length_is_capped():
    with LLM(use_tqdm=False, num_blocks=8, max_num_seqs=2) as small:
        with pytest.raises(InvalidRequest, match="may need 13 blocks of 16 tokens and the whole pool has 8"):
            small.generate("Hi", SamplingParams(max_tokens=200), use_tqdm=False)
        endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        output = small.generate({"prompt_token_ids": [100] * 10}, endless, use_tqdm=False)[0].outputs[0]
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 8 * 16 + 1 - 10


def test_closing_twice_is_fine_and_a_context_manager_closes():
    with LLM(use_tqdm=False, num_blocks=64) as engine:
        assert engine.generate("Hi", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
    engine.close()
    with pytest.raises(EngineDead, match="the engine was closed: load the model again"):
        engine.generate("Hi", SamplingParams(max_tokens=2), use_tqdm=False)


@pytest.mark.parametrize("sampling", [{"n": 1}, [GREEDY, None], (5 for _ in range(2))])
def test_what_is_no_sampling_parameters_is_refused_in_one_line(llm, sampling):
    with pytest.raises(InvalidRequest, match=r"the sampling parameters are a \w+: give SamplingParams"):
        llm.generate(["one", "two"], sampling, use_tqdm=False)


@pytest.mark.parametrize("messages", [5, QUESTION[0], (message for message in QUESTION)])
def test_messages_that_are_no_list_are_refused(llm, messages):
    with pytest.raises(InvalidRequest, match="messages must be a list of messages, not "):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_a_second_call_is_refused_and_the_first_one_loses_nothing(llm):
    """Its tokens went to whichever call stepped the engine, and both ended with parts of answers."""
    (whole,) = llm.generate("Count: one, two,", GREEDY, use_tqdm=False)
    stream = llm.stream(llm.prepare("Count: one, two,"), GREEDY)
    pieces = [next(stream).text]
    with pytest.raises(QuireError, match="another call is under way"):
        llm.generate("Hi", GREEDY, use_tqdm=False)
    pieces += [piece.text for piece in stream]
    assert "".join(pieces) == whole.outputs[0].text
    assert llm.generate("Hi", GREEDY, use_tqdm=False)[0].finished


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_is_refused_and_does_not_wait_for_threads_that_it_has_not(llm):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # it waited for ever
        try:
            llm.generate("Hi", GREEDY, use_tqdm=False)
        except EngineDead as error:
            os._exit(7 if "was forked from" in str(error) else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_parameters_that_break_a_row_end_their_own_request_only(llm):
    broken = SamplingParams(max_tokens=4)
    object.__setattr__(broken, "top_p", "x")  # past every check, into the runner's thread
    with pytest.raises(QuireError):
        llm.generate("Hello", broken, use_tqdm=False)
    assert llm.generate("Hello", SamplingParams(max_tokens=4), use_tqdm=False)[0].finished


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(llm):
    begun = time.process_time()
    with pytest.raises(ContextExceeded, match="at least"):
        llm.generate("word " * 10_000_000, use_tqdm=False)
    assert time.process_time() - begun < 2

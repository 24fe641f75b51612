"""Chats through the official client, against the real server and the real model."""

import asyncio
import math

import openai
import pytest

from tests.server.running import MODEL, RunningServer

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def test_a_question_gets_its_answer_and_an_honest_bill(client: openai.OpenAI):
    first = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0)
    assert first.choices[0].message.content == ANSWER
    assert first.choices[0].message.role == "assistant"
    assert first.choices[0].finish_reason == "stop"
    assert (first.object, first.model, first.id[:9]) == ("chat.completion", MODEL, "chatcmpl-")
    assert first.usage.prompt_tokens == 37
    assert first.usage.completion_tokens == 8
    assert first.usage.total_tokens == 45
    again = client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0)
    assert again.choices[0].message.content == ANSWER
    assert again.usage.prompt_tokens_details.cached_tokens == 32


def test_a_stream_has_a_role_then_text_then_a_reason_then_usage(client: openai.OpenAI):
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=PARIS, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    *body, last = chunks
    assert body[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in body) == ANSWER
    assert [c.choices[0].finish_reason for c in body][-1] == "stop"
    assert all(c.choices[0].finish_reason is None for c in body[:-1])
    assert all(c.usage is None for c in body)
    assert last.choices == []
    assert last.usage.completion_tokens == 8
    assert len({c.id for c in chunks}) == 1


@pytest.mark.parametrize("logprobs", [False, True])
def test_counts_come_with_every_chunk_if_asked_for(client: openai.OpenAI, logprobs: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    ask = {"model": MODEL, "temperature": 0, "stream": True, "stream_options": options}
    *body, last = list(client.chat.completions.create(messages=PARIS, logprobs=logprobs, **ask))  # type: ignore[call-overload]
    counts = [chunk.usage.completion_tokens for chunk in body]
    assert counts == sorted(counts)
    assert 0 < counts[1] < counts[-1] == last.usage.completion_tokens == 8
    assert {chunk.usage.prompt_tokens for chunk in body} == {37}
    *body, last = list(client.completions.create(prompt="Water boils at", max_tokens=6, **ask))  # type: ignore[call-overload]
    assert [chunk.usage.completion_tokens for chunk in body][-1] == last.usage.completion_tokens == 6
    ask["stream_options"] = {"continuous_usage_stats": True}  # means nothing without include_usage
    assert all(chunk.usage is None for chunk in client.chat.completions.create(messages=PARIS, **ask))  # type: ignore[call-overload]


def test_a_stream_without_usage_has_none(client: openai.OpenAI):
    chunks = list(client.chat.completions.create(model=MODEL, messages=PARIS, max_tokens=2, stream=True))
    assert all(len(c.choices) == 1 and c.usage is None for c in chunks)


def test_a_seed_gives_the_same_answer_whoever_else_is_there(server: RunningServer):
    async def run() -> None:
        async with server.async_client() as client:

            async def ask(seed: int, stream: bool) -> str:
                settings = {
                    "model": MODEL,
                    "messages": PARIS,
                    "seed": seed,
                    "max_tokens": 24,
                    "temperature": 1.2,
                }
                if not stream:
                    return (await client.chat.completions.create(**settings)).choices[0].message.content
                pieces = await client.chat.completions.create(**settings, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in pieces])

            alone = [await ask(seed, False) for seed in range(4)]
            together = await asyncio.gather(*(ask(seed % 4, seed % 2 == 0) for seed in range(24)))
            assert together == [alone[seed % 4] for seed in range(24)]
            assert len(set(alone)) == 4

    asyncio.run(run())


def test_several_choices_differ_and_share_the_prompt(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL, messages=PARIS, n=3, seed=1, temperature=1.5, max_tokens=12
    )
    assert [c.index for c in answer.choices] == [0, 1, 2]
    texts = [c.message.content for c in answer.choices]
    assert len(set(texts)) == 3
    assert answer.usage.prompt_tokens == 37
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(
        model=MODEL, messages=PARIS, n=3, seed=1, temperature=1.5, max_tokens=12, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI, stream: bool):
    settings = {"model": MODEL, "messages": PARIS, "temperature": 0, "stop": [" France", "never"]}
    if stream:
        chunks = list(client.chat.completions.create(**settings, stream=True))
        text, reason = (
            "".join(c.choices[0].delta.content or "" for c in chunks),
            chunks[-1].choices[0].finish_reason,
        )
    else:
        choice = client.chat.completions.create(**settings).choices[0]
        text, reason = choice.message.content, choice.finish_reason
        assert choice.stop_reason == " France"
    assert (text, reason) == ("The capital of", "stop")


def test_include_stop_str_in_output_shows_it(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=PARIS,
        temperature=0,
        stop=" of",
        extra_body={"include_stop_str_in_output": True},
    )
    assert answer.choices[0].message.content == "The capital of"


def test_logprobs_are_there_for_each_token_with_its_bytes(client: openai.OpenAI):
    settings = {"model": MODEL, "messages": PARIS, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**settings).choices[0].logprobs.content
    assert b"".join(bytes(t.bytes) for t in whole[:-1]).decode() == ANSWER
    assert whole[-1].token == "<|im_end|>"
    for token in whole:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token  # greedy
        assert math.isclose(token.top_logprobs[0].logprob, token.logprob)
    chunks = client.chat.completions.create(**settings, stream=True)
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == whole


def test_limits_penalties_and_biases_do_what_they_say(client: openai.OpenAI):
    def ask(**fields):
        settings = {"model": MODEL, "messages": PARIS, "temperature": 0, **fields}
        return client.chat.completions.create(**settings).choices[0]

    assert ask(max_completion_tokens=3).finish_reason == "length"
    assert ask(max_tokens=3).message.content == "The capital of"
    assert ask(max_completion_tokens=2, max_tokens=9).message.content == "The capital"
    token = client.chat.completions.create(
        model=MODEL, messages=PARIS, temperature=0, max_tokens=1, logprobs=True
    )
    assert token.choices[0].message.content == "The"
    biased = ask(max_tokens=1, logit_bias={"504": -100})  # 504: "The"
    assert biased.message.content != "The"
    longer = ask(max_tokens=20, extra_body={"ignore_eos": True})
    assert longer.finish_reason == "length"
    assert ask(max_tokens=12, extra_body={"min_tokens": 12}).finish_reason == "length"
    assert "Paris" not in ask(max_tokens=12, extra_body={"bad_words": ["Paris"]}).message.content
    assert ask(extra_body={"stop_token_ids": [504]}).stop_reason == 504
    for extra in (
        {"top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"priority": 3},
        {"cache_salt": "x"},
    ):
        assert ask(max_tokens=2, extra_body=extra).message.content
    assert ask(max_tokens=4, presence_penalty=1.0, frequency_penalty=-1.0, top_p=0.5).message.content


def test_a_salt_hides_cached_prefixes(client: openai.OpenAI):
    def cached(salt: str) -> int:
        answer = client.chat.completions.create(
            model=MODEL, messages=PARIS, max_tokens=2, extra_body={"cache_salt": salt, "ignore_eos": True}
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached("one"), cached("one"), cached("two")] == [0, 32, 0]


def test_the_templates_switches_work(client: openai.OpenAI, server: RunningServer):
    begun = [*PARIS, {"role": "assistant", "content": "The capital of France is"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=begun, temperature=0, max_tokens=2, extra_body={"continue_final_message": True}
    )
    assert answer.choices[0].message.content == " Paris."
    developer = [{"role": "developer", "content": "Be brief."}, *PARIS]
    assert client.chat.completions.create(model=MODEL, messages=developer, max_tokens=1).choices
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}]
    said = client.chat.completions.create(model=MODEL, messages=parts, temperature=0)
    assert said.choices[0].message.content == ANSWER


def test_prompt_logprobs_and_truncation_reach_the_engine(server: RunningServer):
    body = {"messages": PARIS, "max_tokens": 1, "prompt_logprobs": 1, "truncate_prompt_tokens": 5}
    answer = server.post("/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == 5
    assert all("decoded_token" in one for p in answer["prompt_logprobs"][1:] for one in p.values())


def test_fields_that_nobody_knows_are_ignored(server: RunningServer):
    body = {"messages": PARIS, "max_tokens": 1, "frobnicate": True, "store": False, "metadata": {"a": "b"}}
    assert server.post("/v1/chat/completions", json=body).status_code == 200

"""A conversation forgets its oldest turns, never its system message, and only when it must."""

from types import SimpleNamespace

import pytest

from quire.cli.chat import CALM, MAX_TOKENS, ChatHistory, chat_sampling
from quire.core.errors import InvalidRequest
from quire.core.sampling import SamplingParams


class Words:
    """A tokenizer and a template in one: each word is a token."""

    def render(self, messages):
        return " ".join(f"{message['role']}: {message['content']}" for message in messages)

    def encode(self, text, add_special_tokens=True):
        return list(range(len(text.split())))


def llm(context: int):
    return SimpleNamespace(
        template=Words(),
        tokenizer=Words(),
        engine=SimpleNamespace(
            limits=SimpleNamespace(max_model_len=context),
            memory=SimpleNamespace(num_blocks=1000, num_groups=1, block_size=16),
        ),
    )


def long_conversation(num_turns: int) -> ChatHistory:
    made = ChatHistory("be brief")
    for turn in range(num_turns):
        made.say("user", f"question {turn}")
        made.say("assistant", f"answer {turn}")
    made.say("user", "last one")
    return made


def test_all_is_kept_while_it_fits():
    made = long_conversation(5)
    prepared, num_forgotten = made.prompt(llm(1000), 100)
    assert num_forgotten == 0
    assert prepared.text.count("question") == 5


def test_the_oldest_turns_go_when_the_context_is_full():
    made = long_conversation(5)  # 3 + 5 * 6 + 3 words
    prepared, num_forgotten = made.prompt(llm(28), 7)
    assert num_forgotten == 6
    assert len(prepared.token_ids) <= 28 - 7
    assert prepared.text.startswith("system: be brief user: question 3")
    assert prepared.text.endswith("user: last one")
    assert made.prompt(llm(28), 7)[1] == 0  # what is forgotten stays so


def test_a_quarter_is_kept_for_an_answer_of_any_length():
    made = long_conversation(5)
    prepared, _ = made.prompt(llm(40), None)
    assert len(prepared.token_ids) <= 30


def test_one_message_that_is_too_long_is_refused_with_both_numbers():
    made = ChatHistory()
    made.say("user", "word " * 50)
    with pytest.raises(
        InvalidRequest, match="this message has 51 tokens with its template and the context is 20"
    ):
        made.prompt(llm(20), 8)


def test_a_model_that_recommends_nothing_is_kept_calm():
    silent = chat_sampling(SamplingParams(max_tokens=256))
    assert (silent.temperature, silent.top_p, silent.max_tokens) == (
        CALM["temperature"],
        CALM["top_p"],
        MAX_TOKENS,
    )
    recommended = chat_sampling(SamplingParams(max_tokens=256, top_k=20))
    assert (recommended.temperature, recommended.top_k) == (1.0, 20)

"""Beam search over HTTP, spelled as vLLM spelled it; what it cannot do is a 400 that names the field."""

import openai
import pytest

from tests.server.running import MODEL, RunningServer

ASKED = {"prompt": "The capital of France is", "max_tokens": 6, "use_beam_search": True}


def test_completions_return_the_best_hypotheses_with_their_logprobs(server: RunningServer):
    asked = {**ASKED, "best_of": 4, "n": 2, "length_penalty": 1.0, "logprobs": 0, "temperature": 0}
    answer = server.post("/v1/completions", json=asked).json()
    values = [
        sum(one["logprobs"]["token_logprobs"]) / len(one["logprobs"]["tokens"]) for one in answer["choices"]
    ]
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    assert values == sorted(values, reverse=True)
    assert len({one["text"] for one in answer["choices"]}) == 2
    greedy = server.post("/v1/completions", json={**ASKED, "use_beam_search": False, "temperature": 0}).json()
    single = server.post("/v1/completions", json={**ASKED, "best_of": 1}).json()
    assert single["choices"][0]["text"] == greedy["choices"][0]["text"]


def test_chats_take_beams_too(server: RunningServer):
    client: openai.OpenAI = server.client()
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say hi."}], max_tokens=8, n=3,
        extra_body={"use_beam_search": True, "early_stopping": "never"},
    )  # fmt: skip
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_beams_keep_to_a_form(server: RunningServer):
    cities = [" Rome", " Lisbon", " Paris", " London"]
    asked = {**ASKED, "n": 3, "guided_choice": cities, "max_tokens": 12}
    answer = server.post("/v1/completions", json=asked).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[0] == " Paris"
    assert set(texts) <= set(cities)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


@pytest.mark.parametrize(("wrong", "param"), [
    ({"best_of": 33}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"stream": True}, "stream"),
    ({"temperature": 0.5}, "temperature"),
    ({"stop": "."}, "stop"),
    ({"early_stopping": "soon"}, "early_stopping"),
    ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_requests_name_the_field(server: RunningServer, path: str, wrong: dict, param: str):
    asked = {**ASKED, **wrong}
    if "chat" in path:
        asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
    refused = server.post(path, json=asked)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"].split(".")[0]) == (400, param), error

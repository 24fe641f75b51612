"""Completions: batches, token ids, echo, best_of, and the endpoints around them."""

import openai
import pytest

from tests.server.running import ADMIN_KEY, MODEL, RunningServer


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return server.client()


def test_a_prompt_is_continued_by_sixteen_tokens_at_most(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", temperature=0)
    assert answer.choices[0].text.startswith(" Paris")
    assert (answer.object, answer.usage.completion_tokens <= 16) == ("text_completion", True)


def test_text_token_ids_and_batches_of_both_mean_the_same(client: openai.OpenAI, server: RunningServer):
    texts = ["The capital of France is", "One, two,"]
    ids = [server.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]

    def ask(prompt):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4)
        assert [c.index for c in answer.choices] == list(range(len(answer.choices)))
        return [c.text for c in answer.choices]

    alone = ask(texts[0]) + ask(texts[1])
    assert ask(texts) == ask(ids) == alone
    assert ask(ids[0]) == alone[:1]


def test_a_streamed_batch_says_which_choice_each_piece_belongs_to(client: openai.OpenAI):
    settings = {"model": MODEL, "prompt": ["One, two,", "Hello"], "n": 2, "seed": 3, "max_tokens": 6}
    whole = client.completions.create(**settings)
    pieces = ["", "", "", ""]
    for chunk in client.completions.create(**settings, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == [c.text for c in whole.choices]
    assert whole.usage.completion_tokens == 24


def test_echo_shows_the_prompt_and_its_logprobs(client: openai.OpenAI):
    for stream in (False, True):
        settings = {"model": MODEL, "prompt": "One, two,", "echo": True, "temperature": 0, "max_tokens": 3}
        answer = client.completions.create(**settings, logprobs=2, stream=stream)
        choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
        text = "".join(c.text for c in choices)
        tokens = [t for c in choices for t in c.logprobs.tokens]
        offsets = [o for c in choices for o in c.logprobs.text_offset]
        logprobs = [p for c in choices for p in c.logprobs.token_logprobs]
        assert text.startswith("One, two,")
        assert "".join(tokens) == text
        assert [text[a : a + len(t)] for a, t in zip(offsets, tokens, strict=True)] == tokens
        assert logprobs[0] is None
        assert all(p <= 0 for p in logprobs[1:])


def test_scoring_a_prompt_generates_nothing(server: RunningServer):
    body = {"prompt": "One, two, three", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = server.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "One, two, three"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


def test_best_of_returns_the_likeliest(client: openai.OpenAI):
    settings = {"model": MODEL, "prompt": "Hello", "seed": 5, "max_tokens": 6, "temperature": 1.5}
    best = client.completions.create(**settings, best_of=4, n=1)
    every = client.completions.create(**settings, n=4, logprobs=0)
    score = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in every.choices}
    assert best.choices[0].text == max(score, key=score.__getitem__)
    assert best.usage.completion_tokens == 24


def test_tokens_there_and_back(server: RunningServer):
    text = "Grüße, 世界! <|im_start|>"
    found = server.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert server.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    assert server.post("/tokenize", json=chat).json()["count"] == 37


def test_models_are_listed_and_found(client: openai.OpenAI):
    assert [m.id for m in client.models.list()] == [MODEL, "all-MiniLM-L6-v2"]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-17")


def test_probes_version_and_documents_answer(server: RunningServer):
    assert server.get("/health").status_code == 200
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.get("/version").json()["version"]
    document = server.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/metrics"} <= set(document["paths"])
    assert "422" not in str(document["paths"]["/v1/completions"]["post"]["responses"])


def test_metrics_count_what_happened(server: RunningServer):
    added = {"prompt_tokens_total": 4, "generation_tokens_total": 10, "request_success_total": 2}
    server.wait_idle()  # whoever left before is counted by now
    before = {name: server.metric(name) for name in added}
    server.post("/v1/completions", json={"prompt": "One, two,", "max_tokens": 5, "n": 2, "ignore_eos": True})
    for name, count in added.items():
        server.wait_metric(before[name] + count, name)
    server.wait_metric(0, "num_requests_running")
    text = server.get("/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        'request_success_total{finished_reason="length"',
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket",
        "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket",
    ):
        assert f"\nquire_{name}" in text


def test_the_prefix_cache_can_be_forgotten_by_operators_only(server: RunningServer):
    body = {
        "prompt": "An operator's prompt that is long enough to fill at least one block of sixteen tokens."
    }

    def cached() -> int:
        answer = server.post("/v1/completions", json=body).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(), cached()] == [0, 16]
    assert server.error("/reset_prefix_cache", 401)["code"] == "invalid_api_key"
    reset = server.post("/reset_prefix_cache", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
    assert reset.status_code == 200
    assert cached() == 0

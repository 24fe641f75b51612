"""The server's small parts, without a server: keys, error shapes, sampling fields, metrics."""

import asyncio
import threading
from typing import Any

import pydantic
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ConfigError, EngineDead, InvalidRequest, QueueFull
from quire.core.request import QueueBounds
from quire.core.sampling import SamplingParams
from quire.link.client import EngineClient
from quire.server.access import Keys, offered_key, read_key_file
from quire.server.errors import ApiError, as_api_error, from_validation
from quire.server.metrics import Metrics
from quire.server.protocol.completions import ChatCompletionRequest, CompletionRequest
from quire.server.sampling import chat_sampling, completion_sampling
from quire.server.settings import ServerSettings
from quire.text.template import ChatTemplate
from tests.server.scripted import ScriptedEngine, scripted_service

MESSAGES = [{"role": "user", "content": "Hi"}]
RECOMMENDED = SamplingParams(temperature=0.3, top_p=0.9, max_tokens=256)


def chat(**fields: Any) -> SamplingParams:
    return chat_sampling(ChatCompletionRequest(messages=MESSAGES, **fields), RECOMMENDED)


def complete(**fields: Any) -> SamplingParams:
    return completion_sampling(CompletionRequest(prompt="a", **fields), RECOMMENDED)


# Prompts


@pytest.mark.parametrize("field", ["content", "tool_calls", "chat_template_kwargs", "documents"])
def test_a_long_conversation_is_rendered_beside_the_event_loop(field: str, monkeypatch: pytest.MonkeyPatch):
    threads = []

    def render(*_arguments: Any, **_settings: Any) -> str:
        threads.append(threading.get_ident())
        return "Hi"

    service = scripted_service(ScriptedEngine(()))
    monkeypatch.setattr(ChatTemplate, "render", render)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    async def sent(count: int) -> None:
        prompts, variables = service.model.prompts, {}
        message: dict[str, Any] = {"role": "assistant", "content": "a"}
        match field:
            case "content":
                message["content"] = "a" * count
            case "tool_calls":
                message["tool_calls"] = [call] * count
            case "chat_template_kwargs":
                variables = {"a": {f"key {number}": {} for number in range(count)}}
            case "documents":
                variables = {"documents": [{"text": "a"}] * count}
        await prompts.chat([*MESSAGES, message], variables=variables)

    asyncio.run(sent(1))
    asyncio.run(sent(10_000))
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


# Keys


def test_a_key_is_known_by_a_name_that_does_not_give_it_away():
    keys = Keys(["secret", "grüße"])
    name = keys.identify(b"secret")
    assert name is not None
    assert "secret" not in name
    assert keys.identify("grüße".encode())
    assert [keys.identify(other) for other in (None, b"", b"secre", b"secret ")] == [None] * 4


def test_keys_are_read_from_the_headers_that_clients_use():
    assert offered_key([(b"authorization", b"Bearer abc")]) == b"abc"
    assert offered_key([(b"Authorization", b"bearer  abc ")]) == b"abc"
    assert offered_key([(b"x-api-key", b"abc")]) == b"abc"
    assert offered_key([(b"authorization", b"Basic abc")]) is None


def test_a_key_holds_no_more_than_its_limit_and_gives_back_what_it_held():
    keys = Keys(["a", "b"], max_concurrent=1)
    with (
        keys.hold("a"),
        keys.hold("b"),
        pytest.raises(ApiError, match="1 requests under way"),
        keys.hold("a"),
    ):
        pass
    with keys.hold("a"), keys.hold(None), keys.hold(None):
        pass


def test_a_key_file_without_keys_is_refused(tmp_path):
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_key_file(str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(str(tmp_path / "nothing"))


# Errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("no", "n"), 400, "invalid_request_error"),
        (QueueFull("full"), 429, "rate_limit_error"),
        (EngineDead("dead"), 500, "server_error"),
        (ValueError("secret internals"), 500, "server_error"),
    ],
)
def test_every_error_has_a_status_and_openais_shape(error: Exception, status: int, kind: str):
    found = as_api_error(error, retry_seconds=7)
    assert (found.status, found.kind) == (status, kind)
    assert set(found.body()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in str(found)
    assert found.headers.get("Retry-After") == ("7" if status == 429 else None)


def test_validation_names_the_place_and_not_pydantics_unions():
    body = {"messages": MESSAGES, "stop": {"a": 1}, "stream_options": {"include_usage": "yes"}}
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatCompletionRequest.model_validate(body)
    problems = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
    first = from_validation(problems, body)
    assert (first.param, str(first)) == (
        "stop",
        "stop: input should be a valid string, or input should be a valid list",
    )
    last = from_validation(problems[-1:], body)
    assert last.param == "stream_options.include_usage"


# Sampling


def test_what_is_not_asked_for_comes_from_the_model():
    assert chat() == RECOMMENDED.changed(max_tokens=None)
    assert complete() == RECOMMENDED.changed(max_tokens=16)
    assert chat(temperature=1.0, top_p=None).temperature == 1.0
    assert chat(logit_bias={"5": 1.5}, stop="a").logit_bias == {5: 1.5}


def test_chat_logprobs_and_lengths_have_two_names_each():
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert chat(logprobs=False).logprobs is None
    assert chat(max_tokens=3).max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=5).max_tokens == 5


def test_scoring_needs_one_token_and_prompt_logprobs():
    scored = complete(echo=True, max_tokens=0, logprobs=2)
    assert (scored.max_tokens, scored.prompt_logprobs) == (1, 2)
    with pytest.raises(InvalidRequest, match="max_tokens=0"):
        complete(max_tokens=0)


# Settings and metrics


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": ""},
        {"port": -1},
        {"ssl_certfile": "a.pem"},
        {"ssl_certfile": "none.pem", "ssl_keyfile": "none.pem"},
        {"ssl_certfile": __file__, "ssl_keyfile": __file__},
        {"root_path": "api"},
        {"max_queue_requests": 0},
        {"request_timeout": 0.0},
        {"shutdown_timeout": -1.0},
        {"isolate_keys": True},
        {"max_requests_per_minute_per_key": 5},
        {"api_keys": ("a",), "max_tokens_per_minute_per_key": 0},
        {"engine_timeout": 0.0},
        {"sse_keep_alive": -1.0},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError):
        ServerSettings(**wrong)


def test_metrics_are_text_that_prometheus_reads():
    metrics = Metrics()
    metrics.first_token(0.5, 0.1, 0.2, 7)
    metrics.gap(0.03, 3)
    metrics.finished(2.0, 1.5, ["stop", "length"])
    metrics.http_request("/v1/models", 200)
    client = EngineClient(EngineConfig(), QueueBounds(1))
    text = metrics.rendered([client]).decode()
    assert 'quire_time_to_first_token_seconds_bucket{le="0.5",model_name=""} 1.0' in text
    assert 'quire_inter_token_latency_seconds_count{model_name=""} 3.0' in text
    assert 'quire_request_success_total{finished_reason="stop",model_name=""} 1.0' in text
    assert 'quire_prompt_tokens_total{model_name=""} 7.0' in text
    assert 'quire_engine_up{model_name=""} 0.0' in text

"""`suffix` in /v1/completions."""

import asyncio
import json
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Inner

from quire.text.tokenizer import Tokenizer
from tests.server.scripted import ScriptedEngine, byte_tokenizer, posted, scripted_app, update

TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def infilling() -> str:
    inner = Inner.from_str(byte_tokenizer())
    inner.add_special_tokens([AddedToken(token, special=True) for token in TOKENS])
    return inner.to_str()


def asked(engine: ScriptedEngine, body: dict[str, Any], **options: Any) -> tuple[int, dict[str, Any]]:
    app = scripted_app(engine, **{"tokenizer": infilling(), "vocab_size": 260, **options})
    status, pieces = asyncio.run(posted(app, "/v1/completions", body))
    return status, json.loads(b"".join(pieces))


def test_the_prompt_has_prefix_and_suffix_and_the_middle_ends_at_a_token_of_the_format():
    engine = ScriptedEngine([[update("x):", finish_reason="stop")]])
    status, answer = asked(engine, {"prompt": "def f(", "suffix": "\n    return x", "echo": True})
    assert (status, answer["choices"][0]["text"]) == (200, "def f(x):")
    (request,) = engine.requests
    tokenizer = Tokenizer(infilling())
    shown = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert shown == "<|fim_prefix|>def f(<|fim_suffix|>\n    return x<|fim_middle|>"
    assert set(request.sampling.stop_token_ids) == {tokenizer.token_id(token) for token in TOKENS}


def test_each_prompt_of_several_has_the_suffix():
    engine = ScriptedEngine(
        [[update("x", finish_reason="stop"), update("y", request=1, finish_reason="stop")]]
    )
    status, answer = asked(engine, {"prompt": ["a", "b"], "suffix": "c"})
    assert (status, [choice["text"] for choice in answer["choices"]]) == (200, ["x", "y"])
    assert [len(request.prompt_token_ids) for request in engine.requests] == [5, 5]


@pytest.mark.parametrize(
    ("body", "options", "param", "said"),
    [
        ({"prompt": "a", "suffix": "b"}, {"tokenizer": None}, "suffix", "Qwen2.5-Coder"),
        ({"prompt": [1, 2], "suffix": "b"}, {}, "prompt", "send no token ids"),
        ({"prompt": [], "suffix": "b"}, {}, "prompt", "a prompt of text"),
        ({"prompt": "a", "suffix": "x" * 5000}, {}, "prompt", "maximum context length"),
    ],
    ids=str,
)
def test_what_cannot_be_filled_is_a_400(body: dict[str, Any], options: dict[str, Any], param: str, said: str):
    status, answer = asked(ScriptedEngine([]), body, **options)
    assert (status, answer["error"]["param"]) == (400, param)
    assert said in answer["error"]["message"]

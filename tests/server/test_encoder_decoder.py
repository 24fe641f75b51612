"""A T5-like folder, served: text and chat, streams, samples and beams, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.models.seq2seq import generate, write_text_model
from tests.server.running import RunningServer

PROMPT = "the cat sat on a mat."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("t5")
    return path, write_text_model(path)


@pytest.fixture(scope="module")
def t5(folder: tuple[Path, Any]) -> Iterator[RunningServer]:
    server = RunningServer(
        "--model",
        str(folder[0]),
        "--served-model-name",
        "tiny",
        "--quantization",
        "none",
        "--dtype",
        "float32",
    )
    try:
        yield server.wait_ready()
        server.wait_idle()
    finally:
        server.close()


@pytest.fixture(scope="module")
def expected(folder: tuple[Path, Any]) -> str:
    """What transformers makes of the prompt."""
    path, model = folder
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    (tokens,) = generate(model, tokenizer(PROMPT)["input_ids"], 10, ends=(1,))
    text: str = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def ask(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> Any:
    return server.post(path, json={"model": "tiny", "max_tokens": 10, "temperature": 0, **fields})


def test_completions_and_chat_give_the_text_of_transformers(t5: RunningServer, expected: str) -> None:
    answer = ask(t5, prompt=PROMPT).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["prompt_tokens"] == 8  # seven pieces and the end token
    message = [{"role": "user", "content": PROMPT}]
    answer = ask(t5, "/v1/chat/completions", messages=message).json()
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    both = [{"role": "system", "content": "translate:"}, *message]
    assert ask(t5, "/v1/chat/completions", messages=both).json()["usage"]["prompt_tokens"] > 8


def test_streams_samples_and_beams(t5: RunningServer, expected: str) -> None:
    lines = ask(t5, prompt=PROMPT, stream=True).text.split("\n\n")
    *pieces, last = (json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2])
    # a busy server joins tokens of several steps
    assert "".join(piece["text"] for piece in pieces) == expected
    assert (last["finish_reason"], lines[-2:]) == ("length", ["data: [DONE]", ""])
    answer = ask(t5, prompt=PROMPT, n=4, temperature=1.0, seed=3).json()
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    answer = ask(t5, prompt=PROMPT, n=3, use_beam_search=True).json()
    assert len(answer["choices"]) == 3
    chosen = ask(t5, prompt=PROMPT, structured_outputs={"choice": ["a dog", "the cat"]}).json()
    assert chosen["choices"][0]["text"] in ("a dog", "the cat")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": PROMPT, "echo": True}, "echo", "echo is not available from an encoder-decoder model"),
        ({"prompt": PROMPT, "prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs is not available"),
        ({"prompt": "cat " * 2040}, "prompt", "encoder takes at most 2032"),
    ],
)
def test_what_is_refused_says_why(t5: RunningServer, fields: dict[str, Any], param: str, said: str) -> None:
    response = ask(t5, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert said in error["message"]

"""A Llama-2-like folder, served: SentencePiece tokens, and a model_max_length that no message can hold."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.llm.llm import LLM
from tests.models.llama2 import write_llama2
from tests.server.running import RunningServer

PROMPT = "the quick brown fox"
FORMS = {"normalizer": False, "metaspace": True}


@pytest.fixture(scope="module", params=FORMS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama2(tmp_path_factory.mktemp("llama2") / request.param, FORMS[request.param])


@pytest.fixture(scope="module")
def llama2(folder: Path) -> Iterator[RunningServer]:
    server = RunningServer("--model", str(folder), "--served-model-name", "tiny")
    try:
        yield server.wait_ready()
        server.wait_idle()
    finally:
        server.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> tuple[Any, list[int], list[int]]:
    """transformers' tokenizer, the prompt's ids and the ids of the greedy answer."""
    with LLM(str(folder), kv_cache_memory_bytes=1 << 24, max_num_seqs=4) as llm:
        (output,) = llm.generate(PROMPT, llm.default_sampling().changed(temperature=0.0, max_tokens=24))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return tokenizer, output.prompt_token_ids, output.outputs[0].token_ids


def expected(reference: tuple[Any, list[int], list[int]]) -> str:
    """What follows the prompt in transformers' text of the whole sequence."""
    tokenizer, prompt, answer = reference
    whole = tokenizer.decode([*prompt, *answer], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert whole.startswith(PROMPT)
    return whole[len(PROMPT) :]


def complete(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    response = server.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_text_is_what_follows_the_prompt_in_the_whole_text(
    llama2: RunningServer, reference: tuple[Any, list[int], list[int]]
) -> None:
    text = expected(reference)
    assert complete(llama2)["text"] == text
    assert complete(llama2, echo=True)["text"] == PROMPT + text
    assert complete(llama2, prompt=reference[1])["text"] == text
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stream": True}
    lines = llama2.post("/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


def test_a_first_token_with_a_space_keeps_it_and_stops_at_it(
    llama2: RunningServer, reference: tuple[Any, list[int], list[int]]
) -> None:
    """The answer is forced to begin with a piece that begins a word."""
    tokenizer = reference[0]
    (dog,) = tokenizer.convert_tokens_to_ids(["\u2581dog"])
    forced = {"allowed_token_ids": [dog], "max_tokens": 2}
    assert complete(llama2, **forced)["text"] == " dog dog"
    assert complete(llama2, **forced, echo=True)["text"] == f"{PROMPT} dog dog"
    stopped = complete(llama2, **forced, stop=[" dog"])
    assert (stopped["text"], stopped["stop_reason"]) == ("", " dog")
    chat = {"messages": [{"role": "user", "content": "Hi"}], **forced, "temperature": 0}
    answer = llama2.post("/v1/chat/completions", json={"model": "tiny", **chat, "logprobs": True}).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "dog dog"  # a message is a text of its own
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["dog", " dog"]
    assert bytes(choice["logprobs"]["content"][0]["bytes"]) == b"dog"
    chat["messages"].append({"role": "assistant", "content": "the lazy"})
    going_on = {**chat, "continue_final_message": True, "add_generation_prompt": False}
    answer = llama2.post("/v1/chat/completions", json={"model": "tiny", **going_on}).json()
    assert answer["choices"][0]["message"]["content"] == " dog dog"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_logprobs_are_where_their_offsets_say(
    llama2: RunningServer, echo: bool, stream: bool
) -> None:
    fields = {
        "logprobs": 2,
        "echo": echo,
        "max_tokens": 24,
        "seed": 5,
        "temperature": 1.5,
        "prompt": "the größer dog",
        "allowed_token_ids": list(range(3 + 256, 400)),  # pieces: random bytes are no characters
    }
    if not stream:
        choice = complete(llama2, **fields)
        text, places = choice["text"], choice["logprobs"]
    else:
        body = {"model": "tiny", **fields, "stream": True}
        lines = llama2.post("/v1/completions", json=body).text.splitlines()
        choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        text = "".join(choice["text"] for choice in choices)
        found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        places = {name: [one for part in found for one in part[name]] for name in ("tokens", "text_offset")}
    shown = [
        (token, offset)
        for token, offset in zip(places["tokens"], places["text_offset"], strict=True)
        if "\ufffd" not in token and not token.startswith("<")
    ]
    assert len(shown) > 10
    for token, offset in shown:
        assert text[offset : offset + len(token)] == token, (token, offset, text)
    if echo:
        assert places["tokens"][0] == "<s>"
        assert places["tokens"][1].startswith("the")
        assert places["text_offset"][:2] == [0, 0]


def test_other_endpoints_take_the_folder_as_well(llama2: RunningServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    chunks = list(llama2.client().chat.completions.create(**body, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    tokens = llama2.post("/tokenize", json={"prompt": "the dog", "return_token_strs": True}).json()
    assert "".join(tokens["token_strs"]) == "<s> the dog"
    assert llama2.get("/health").status_code == 200

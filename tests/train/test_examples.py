"""Examples are the tokens that serving sees, with a loss on answers only; bad lines are named before training."""

import json
from pathlib import Path

import pytest

from quire.core.errors import TrainingError
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.train.examples import ExampleReader, packed
from quire.train.model import IGNORED, Example
from quire.train.settings import DPO
from tests.server.scripted import byte_tokenizer
from tests.train.conftest import END, TEMPLATE

TOKENIZER = Tokenizer(byte_tokenizer(), {"eos_token": "</s>"})


def reader(**changes) -> ExampleReader:
    settings = {"max_length": 100, "eos_token_ids": (END,), **changes}
    return ExampleReader(TOKENIZER, lambda: ChatTemplate(TEMPLATE), **settings)


def chat(*contents: str, **last) -> str:
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    messages[-1] |= last
    return json.dumps({"messages": messages})


def learned(example: Example) -> str:
    """The text whose tokens have a loss."""
    return TOKENIZER.decode(
        [label for label in example.labels if label != IGNORED], skip_special_tokens=False
    )


def test_a_chat_has_its_loss_on_the_answers_and_their_end_tokens():
    (example,) = reader().item(chat("one?", "1", "two?", "2"))
    text = TOKENIZER.decode(example.token_ids, skip_special_tokens=False)
    assert text == "<user>one?</s>\n<assistant>1</s>\n<user>two?</s>\n<assistant>2</s>"
    assert learned(example) == "1</s>2</s>"
    assert example.labels[-1] == IGNORED  # nothing follows the last token


def test_a_message_of_weight_0_is_read_and_not_learned():
    line = json.loads(chat("one?", "1", "two?", "2"))
    line["messages"][1]["weight"] = 0
    assert learned(reader().item(json.dumps(line))[0]) == "2</s>"


def test_a_completion_ends_with_the_end_token():
    (example,) = reader().item(json.dumps({"prompt": "2+2=", "completion": "4"}))
    assert learned(example) == "4</s>"
    assert TOKENIZER.decode(example.token_ids, skip_special_tokens=False) == "2+2=4</s>"


def test_a_preference_is_two_answers_of_one_question():
    def message(text: str) -> dict:
        return {"role": "assistant", "content": text}

    line = {
        "input": {"messages": json.loads(chat("a?", "b", "c?"))["messages"]},
        "preferred_output": [message("yes")],
        "non_preferred_output": [message("no")],
    }
    pair = reader(method=DPO).item(json.dumps(line))
    assert [learned(example) for example in pair] == ["yes</s>", "no</s>"]


BAD = {
    "{": "is no JSON",
    "[]": "is a list",
    '{"text": "a"}': r"has \['text'\]: write messages, or prompt and completion",
    chat("a", "b", "c"): "ends without an answer",
    json.dumps({"messages": [{"role": "assistant", "content": "a"}]}): "where user belongs",
    json.dumps(
        {"messages": [{"role": "user", "content": "a"}] * 2}
    ): r"messages\[1\] where assistant belongs",
    chat("a", " "): r"has an empty answer in messages\[1\]",
    '{"prompt": "a", "completion": ""}': "has an empty completion",
    '{"prompt": 1, "completion": "a"}': "is no text",
    chat("a" * 100, "b"): r"tokens and the context is 100: shorten it, or raise --max-length",
    chat("a", "b", weight=0): "no answer to learn",
    chat("a", "b", weight="0"): r"has weight '0' in messages\[1\]: give 0 or 1",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_with_its_number(line: str, tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text(f"{chat('a', 'b')}\n\n{line}\n")
    with pytest.raises(
        TrainingError, match=f"data.jsonl: 1 of 2 lines cannot be trained: line 3 .*{BAD[line]}"
    ):
        reader().read(path)


@pytest.mark.parametrize("text", ["a\u2028b", "a\u2029b", "a\u0085b"])
def test_a_line_ends_at_its_newline_only(text: str, tmp_path: Path):
    """JSON's strings may have these characters as they are, and Python takes them for the ends of lines."""
    path = tmp_path / "data.jsonl"
    line = json.dumps({"prompt": "q", "completion": text}, ensure_ascii=False)
    path.write_bytes(
        f"\ufeff{line}\r\n{line}\r\n\r\n{{\r\n".encode()
    )  # with a byte order mark, as Windows writes
    with pytest.raises(TrainingError, match="1 of 3 lines cannot be trained: line 4 is no JSON"):
        reader().read(path)
    path.write_bytes(f"\ufeff{line}\r\n{line}".encode())
    assert [learned(example) for (example,) in reader().read(path)] == [f"{text}</s>"] * 2


@pytest.mark.parametrize("depth", [900, 100_000])
def test_a_line_that_is_nested_too_deeply_is_named_with_its_number(depth: int, tmp_path: Path):
    """The parser refuses the deeper one; the other is read, and too deep for the template."""
    path = tmp_path / "data.jsonl"
    nested = chat("question", "b").replace('"question"', "[" * depth + "]" * depth)
    path.write_text(f"{chat('a', 'b')}\n{nested}\n")
    message = "data.jsonl: 1 of 2 lines cannot be trained: line 2 is nested too deeply"
    with pytest.raises(TrainingError, match=message):
        reader().read(path)


def test_many_bad_lines_are_counted(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_text("{\n" * 9)
    with pytest.raises(
        TrainingError, match=r"9 of 9 lines cannot be trained: line 1 .*line 5 .*; and 4 more"
    ):
        reader().read(path)
    path.write_text("\n")
    with pytest.raises(TrainingError, match="has no examples"):
        reader().read(path)


def test_packing_fills_batches_and_loses_nothing():
    items = [(Example((1,) * n, (IGNORED,) * n),) for n in (5, 3, 9, 2, 12, 1)]
    batches = packed(items, 10)
    assert sorted(len(i[0].token_ids) for batch in batches for i in batch) == [1, 2, 3, 5, 9, 12]
    assert [sum(len(i[0].token_ids) for i in batch) for batch in batches] == [12, 10, 10]

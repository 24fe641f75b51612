"""Training data: JSONL lines to examples, all checked before the first step, and their packing into batches."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.core.errors import QuireError, TrainingError
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.train.model import IGNORED, Example
from quire.train.settings import DPO, SUPERVISED

NAMED = 5  # bad lines that an error names
Item = tuple[Example, ...]  # one example, or for DPO the preferred answer and the other
Segment = tuple[list[int], bool]  # tokens, and whether they are an answer


@dataclass(frozen=True, slots=True)
class ExampleReader:
    """Turns lines into items for one model. `template` is asked for when a line has messages."""

    tokenizer: Tokenizer
    template: Callable[[], ChatTemplate]
    max_length: int
    eos_token_ids: tuple[int, ...]
    method: str = SUPERVISED

    def read(self, path: Path) -> list[Item]:
        """TrainingError names the first lines that cannot be trained, by number, and how many there are."""
        try:
            # "\n" alone ends a line: str.splitlines also cuts at U+2028 and others, which strings may have
            lines = path.read_bytes().decode("utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise TrainingError(f"{path}: cannot be read as text ({error}): give a JSONL file") from error
        items: list[Item] = []
        wrong: list[str] = []
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    items.append(self.item(line))
                except QuireError as error:
                    wrong.append(f"line {number} {error}")
                except RecursionError:  # of the parser, or of the template
                    wrong.append(f"line {number} is nested too deeply: write texts as contents")
        if wrong:
            more = f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
            raise TrainingError(
                f"{path.name}: {len(wrong)} of {len(items) + len(wrong)} lines cannot be trained: "
                f"{'; '.join(wrong[:NAMED])}{more}"
            )
        if not items:
            raise TrainingError(f"{path.name} has no examples: write one JSON object per line")
        return items

    def item(self, line: str) -> Item:
        """TrainingError says what is wrong with the line, to follow its number."""
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TrainingError(f"is no JSON ({error})") from None
        if not isinstance(record, dict):
            raise TrainingError(f"is a {type(record).__name__}: write an object")
        if self.method == DPO:
            return self._pair(record)
        if "messages" in record:
            return (self._example(self._chat(record["messages"])),)
        if {"prompt", "completion"} <= record.keys():
            return (self._example(self._completion(record)),)
        raise TrainingError(f"has {sorted(record)}: write messages, or prompt and completion")

    def _pair(self, record: Mapping[str, Any]) -> Item:
        """OpenAI's preference format."""
        given = record.get("input")
        messages = given.get("messages") if isinstance(given, dict) else None
        outputs = [record.get("preferred_output"), record.get("non_preferred_output")]
        if not isinstance(messages, list) or not all(isinstance(o, list) and len(o) == 1 for o in outputs):
            raise TrainingError(
                "is no preference: write input.messages, and preferred_output and non_preferred_output of one message"
            )
        chats = [self._chat([*messages, *(output or ())]) for output in outputs]
        return tuple(self._example([*((ids, False) for ids, _ in chat[:-1]), chat[-1]]) for chat in chats)

    def _chat(self, messages: Any) -> list[Segment]:
        """The template's text in pieces, as serving makes prompts of them: before an answer, the answer, and so on."""
        _check_roles(messages)
        template, done = self.template(), ""
        segments: list[Segment] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = template.render(messages[:index])
            after = template.render(messages[: index + 1], add_generation_prompt=False)
            if not before.startswith(done) or not after.startswith(before):
                raise TrainingError(
                    f"has messages whose text changes with messages[{index}] in the chat template: train single turns"
                )
            segments.append((self._ids(before[len(done) :]), False))
            answer, rest = self._ended(self._ids(after[len(before) :]))
            segments += [(answer, message.get("weight", 1) != 0), (rest, False)]
            done = after
        return segments[:-1]  # without what follows the last answer's end token

    def _completion(self, record: Mapping[str, Any]) -> list[Segment]:
        prompt, completion = record["prompt"], record["completion"]
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise TrainingError("has a prompt or completion that is no text: write strings")
        if not completion.strip():
            raise TrainingError("has an empty completion: write the answer")
        answer, _ = self._ended(self._ids(completion))
        return [(self.tokenizer.encode(prompt), False), (answer, True)]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _ended(self, answer: list[int]) -> tuple[list[int], list[int]]:
        """An answer up to its end token, which is added where there is none, and what follows."""
        ends = [at for at, token in enumerate(answer) if token in self.eos_token_ids]
        if ends:
            return answer[: ends[-1] + 1], answer[ends[-1] + 1 :]
        return [*answer, *self.eos_token_ids[:1]], []

    def _example(self, segments: Sequence[Segment]) -> Example:
        token_ids = [token for ids, _ in segments for token in ids]
        if len(token_ids) > self.max_length:
            raise TrainingError(
                f"has {len(token_ids)} tokens and the context is {self.max_length}: shorten it, or raise --max-length"
            )
        trained = [is_answer for ids, is_answer in segments for _ in ids]
        labels = [t if is_answer else IGNORED for t, is_answer in zip(token_ids, trained, strict=True)]
        example = Example(tuple(token_ids), (*labels[1:], IGNORED))
        if not example.num_trained:
            raise TrainingError("has no answer to learn: every assistant message has weight 0")
        return example


def _check_roles(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise TrainingError("has messages that are no list, or an empty one: write at least two")
    expected = ("user",)
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if index == 0 and role in ("system", "developer"):
            continue
        if role not in expected:
            raise TrainingError(
                f"has role {role!r} in messages[{index}] where {expected[0]} belongs: user and assistant must alternate"
            )
        if role == "assistant" and not str(message.get("content") or "").strip():
            raise TrainingError(f"has an empty answer in messages[{index}]: write its content")
        if message.get("weight") not in (None, 0, 1):
            raise TrainingError(f"has weight {message['weight']!r:.40} in messages[{index}]: give 0 or 1")
        expected = ("assistant",) if role == "user" else ("user",)
    if messages[-1]["role"] != "assistant":
        raise TrainingError("ends without an answer: the last message must be the assistant's")


def packed(items: Sequence[Item], max_tokens: int) -> list[list[Item]]:
    """Items in batches of at most `max_tokens` tokens, longest first, each in the first batch that has room.

    An item that is longer than that alone is a batch of its own.
    """
    sizes = {id(item): sum(len(example.token_ids) for example in item) for item in items}
    batches: list[tuple[int, list[Item]]] = []
    for item in sorted(items, key=lambda item: -sizes[id(item)]):
        size = sizes[id(item)]
        for at, (used, batch) in enumerate(batches):
            if used + size <= max_tokens:
                batch.append(item)
                batches[at] = (used + size, batch)
                break
        else:
            batches.append((size, [item]))
    return [batch for _, batch in batches]

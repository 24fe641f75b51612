"""Reading: how a chat's answers become thoughts, text and calls in OpenAI's shape."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.server.protocol.chat import ChatDelta, ChatMessage, ToolCallDelta
from quire.text.answer import AnswerSequence
from quire.text.pieces import Arguments, CallBegin, CallEnd, Content, Piece, Reasoning
from quire.text.reader import AnswerReader
from quire.text.reasoning.registry import num_reasoning_tokens, reasoning_parser
from quire.text.tokenizer import Tokenizer
from quire.text.tools.parser import ToolParser


@dataclass(frozen=True, slots=True)
class AnswerParsers:
    """The same for all answers of a request."""

    reasoning: str | None = None  # the parser's name
    prompt: str | None = None  # whose end says whether thoughts have begun
    make_tool_parser: Callable[[], ToolParser] | None = None
    max_calls: int | None = None

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return self.reasoning is None and self.make_tool_parser is None

    def reader(self) -> AnswerReader:
        return AnswerReader(
            reasoning_parser(self.reasoning, self.prompt) if self.reasoning else None,
            self.make_tool_parser() if self.make_tool_parser else None,
            self.max_calls,
        )

    def num_reasoning_tokens(self, sequence: AnswerSequence, tokenizer: Tokenizer | None) -> int:
        thinking = reasoning_parser(self.reasoning, self.prompt) if self.reasoning else None
        if thinking is None or not thinking.begins_with_thoughts(sequence.text):
            return 0
        return num_reasoning_tokens(sequence.text, sequence.token_ids, tokenizer)


def read_message(reader: AnswerReader, text: str) -> ChatMessage:
    """A whole answer."""
    read = reader.whole(text)
    content = None if read.calls and not read.content else read.content
    message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
    if read.reasoning:
        message["reasoning_content"] = read.reasoning
    if read.calls:
        message["tool_calls"] = [
            {
                "id": _call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in read.calls
        ]
    return message


def deltas(pieces: Sequence[Piece]) -> list[ChatDelta]:
    """As few as show the pieces in their order: within a delta thoughts come before text and text before calls."""
    made: list[ChatDelta] = []
    for piece in pieces:
        match piece:
            case Reasoning():
                delta = _last(made, ("content", "tool_calls"))
                delta["reasoning_content"] = delta.get("reasoning_content", "") + piece.text
            case Content():
                delta = _last(made, ("tool_calls",))
                delta["content"] = delta.get("content", "") + piece.text
            case CallBegin():
                begun: ToolCallDelta = {
                    "index": piece.index,
                    "id": _call_id(),
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
                _last(made).setdefault("tool_calls", []).append(begun)
            case Arguments():
                calls = _last(made).setdefault("tool_calls", [])
                if not calls or calls[-1]["index"] != piece.index:
                    calls.append({"index": piece.index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += piece.text
            case CallEnd():
                pass
    return made


def _last(made: list[ChatDelta], later: tuple[str, ...] = ()) -> ChatDelta:
    """The delta to add to: a new one, if the last has what comes after."""
    if not made or any(key in made[-1] for key in later):
        made.append({})
    return made[-1]


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"

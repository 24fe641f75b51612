"""ChatReply: a chat's answers as OpenAI's objects, whole or in chunks. Every endpoint for chats sits on it."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from quire.server.answer_parsers import AnswerParsers, deltas, read_message
from quire.server.generation import Change, Generation
from quire.server.logprobs import chat_logprobs, prompt_logprobs
from quire.server.protocol.base import Usage
from quire.server.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
)
from quire.server.reply import FINGERPRINT
from quire.text.answer import AnswerSequence
from quire.text.reader import AnswerReader
from quire.text.tokenizer import Tokenizer


class ChatReply:
    """Either `whole` or `chunks`, once. Whoever leaves `chunks` early must close it: that aborts the rest."""

    def __init__(
        self,
        response_id: str,
        body: ChatCompletionRequest,
        model: str,
        generation: Generation,
        tokenizer: Tokenizer | None,
        reading: AnswerParsers,
    ) -> None:
        self.response_id = response_id
        self.model = model
        self.created = int(time.time())
        self._body = body
        self._generation = generation
        self._tokenizer = tokenizer
        self._reading = reading
        self._readers: dict[int, AnswerReader] = {}  # of streamed answers that are not plain text
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)

    def usage(self) -> Usage:
        """What it has cost so far."""
        usage = self._generation.usage()
        if self._reading.reasoning is not None:
            counts = [
                self._reading.num_reasoning_tokens(sequence, self._tokenizer)
                for sequence in self._generation.answers[0].sequences
            ]
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(counts)}
        return usage

    async def whole(self) -> ChatCompletion:
        """The answer, when its last token has come."""
        await self._generation.finish()
        answer = self._generation.answers[0]
        choices = [self._whole_choice(index, sequence) for index, sequence in enumerate(answer.best)]
        whole: ChatCompletion = {
            "id": self.response_id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            "usage": self.usage(),
        }
        if answer.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs, self._tokenizer)
        return whole

    async def chunks(self) -> AsyncGenerator[list[ChatCompletionChunk], None]:
        """What each step adds: first a role for each choice, then deltas, last usage if it was asked for."""
        begun = False
        async with aclosing(self._generation.changes()) as changes:
            async for batch in changes:
                shown = []
                if not begun:
                    begun = True
                    num_choices = len(self._generation.answers[0].sequences)
                    shown += [self._role(index) for index in range(num_choices)]
                shown += [chunk for change in batch for chunk in self._deltas(change)]
                if shown:
                    yield shown
        if self._with_usage:
            last = self._chunk([])
            last["usage"] = self.usage()
            yield [last]

    def _role(self, index: int) -> ChatCompletionChunk:
        return self._choice(index, {"role": "assistant", "content": ""}, None, None)

    def _whole_choice(self, index: int, sequence: AnswerSequence) -> ChatChoice:
        reader = self._reading.reader()
        message = read_message(reader, sequence.text)
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(sequence.logprobs, self._tokenizer) if self._body.logprobs else None,
            "finish_reason": _finish_reason(sequence, reader),
            "stop_reason": sequence.stop_reason,
        }

    def _deltas(self, change: Change) -> list[ChatCompletionChunk]:
        """None where a step added nothing that can be shown yet."""
        sequence = change.sequence
        added = sequence.logprobs[change.first_token :] if self._body.logprobs else []
        reason = sequence.finish_reason
        if not (change.text or added or reason):
            return []
        found: list[ChatDelta]
        if self._reading.is_plain:
            found = [{"content": change.text}] if change.text else []
        else:
            reader = self._readers.get(sequence.index)
            if reader is None:
                reader = self._readers[sequence.index] = self._reading.reader()
            pieces = reader.feed(change.text)
            if reason is not None:
                pieces += reader.finish()
                reason = _finish_reason(sequence, reader)
            found = deltas(pieces)
        if not found:
            if not (added or reason):
                return []
            found = [{} if reason else {"content": ""}]
        logprobs = chat_logprobs(added, self._tokenizer) if added else None
        *first, last = found
        chunks = [self._choice(sequence.index, delta, None, None) for delta in first]
        return [*chunks, self._choice(sequence.index, last, logprobs, reason, sequence.stop_reason)]

    def _choice(
        self,
        index: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None,
        finish_reason: str | None,
        stop_reason: int | str | None = None,
    ) -> ChatCompletionChunk:
        choice: ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._chunk([choice])

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        chunk: ChatCompletionChunk = {
            "id": self.response_id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }
        if self._with_usage:
            chunk["usage"] = None
        return chunk


def _finish_reason(sequence: AnswerSequence, reader: AnswerReader) -> str | None:
    """An answer that stopped by itself behind good calls waits for their results."""
    return "tool_calls" if sequence.finish_reason == "stop" and reader.has_calls else sequence.finish_reason

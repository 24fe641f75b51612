"""Generation: one HTTP request at the engine, from submission to the last token of its last sequence."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from quire.core.errors import EngineDead, QueueFull
from quire.core.request import Request
from quire.core.step import SequenceUpdate
from quire.engine.streams import Stream
from quire.link.client import EngineClient
from quire.server.access import RequestContext, until_gone
from quire.server.errors import ClientGone, TimedOut
from quire.server.metrics import Metrics
from quire.server.protocol.base import Usage
from quire.text.answer import Answer, AnswerSequence
from quire.text.prompts import PreparedPrompt
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.fleet.replicas import ReplicaSet


@dataclass(slots=True, eq=False)
class Change:
    """What the last `Generation.take` added to one sequence. One record per sequence, filled again each time."""

    position: int  # of its prompt
    sequence: AnswerSequence
    first_token: int = 0  # the addition starts here in the sequence's tokens (and logprobs)
    text: str = ""
    last_update: float | None = None  # when its last token came


@dataclass(slots=True)
class _PromptState:
    """One prompt of the request, and its answer."""

    prompt: PreparedPrompt
    num_prompt_tokens: int
    answer: Answer
    changes: list[Change]  # one for each sequence
    begun: bool = False

    @classmethod
    def of(
        cls,
        position: int,
        prompt: PreparedPrompt,
        request: Request,
        tokenizer: Tokenizer | None,
        kept_ids: frozenset[int],
    ) -> "_PromptState":
        answer = Answer(
            request.request_id,
            request.sampling,
            tokenizer,
            kept_ids,
            context_id=prompt.context_id(tokenizer),
        )
        changes = [Change(position, sequence) for sequence in answer.sequences]
        return cls(prompt, request.num_prompt_tokens, answer, changes)


class StreamWatch:
    """Fails a stream when its client closes the connection, or after `seconds`. Must be closed."""

    def __init__(
        self, stream: Stream[Any], receive: Receive, seconds: float | None, metrics: Metrics
    ) -> None:
        self.stream = stream
        self._gone = asyncio.create_task(self._fail_when_gone(receive, metrics))
        self._timer: asyncio.TimerHandle | None = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._fail, TimedOut(seconds))

    def close(self) -> None:
        self._gone.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def _fail(self, fault: Exception) -> None:
        self.stream.fail(fault)

    async def _fail_when_gone(self, receive: Receive, metrics: Metrics) -> None:
        await until_gone(receive)
        metrics.disconnected()
        self._fail(ClientGone())


class Generation:
    """Must be closed; `finish` does so. Closing early aborts the sequences that have not ended.

    A stream alternates `await wait()` and `take()` while `is_open`: per token these make no object but the future.
    """

    def __init__(
        self,
        client: "EngineClient | ReplicaSet",
        metrics: Metrics,
        tokenizer: Tokenizer | None,
        context: RequestContext,
        prompts: list[PreparedPrompt],
        requests: list[Request],
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Submits the requests: raises at once what refuses them."""
        self._client = client
        self._metrics = metrics
        self._context = context
        self._requests = requests
        self._new_parts = lambda: {
            request.request_id: _PromptState.of(position, prompt, request, tokenizer, kept_ids)
            for position, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
        }
        self._parts: dict[str, _PromptState] = self._new_parts()
        self._is_whole = False  # whether its consumer takes nothing before the end
        self._is_retry = False
        self._changed: deque[Change] = deque()  # keeps its memory when it is emptied, unlike a list
        self._num_open = len(requests)
        self._submitted = time.monotonic()
        self._stream: Stream[SequenceUpdate] = client.submit(requests)
        self._watch: StreamWatch | None = None
        # whether a sequence ends with its new text
        self.stops: Callable[[AnswerSequence], bool] | None = None

    # ------------------------------------------------------------------ running

    def limit(self, receive: Receive, seconds: float | None) -> None:
        """From now on a closed connection, or that much time, ends the generation within one step."""
        self._watch = StreamWatch(self._stream, receive, seconds, self._metrics)

    @property
    def is_open(self) -> bool:
        """Whether some sequence has not ended."""
        return self._num_open > 0

    def wait(self) -> "asyncio.Future[None]":
        """Done once `take` has something to return or to raise."""
        return self._stream.wait()

    def take(self) -> deque[Change]:
        """What the updates since the last call added, one record per sequence; valid until the next call.

        Several updates of one sequence become one change: a client that lags gets larger pieces.
        """
        changed = self._changed
        while changed:
            changed.pop()
        pending = self._stream.pending
        if not pending:
            try:
                self._stream.check()
            except EngineDead:
                if not self._tried_again():
                    raise
                return changed
        now = time.monotonic()
        num_tokens = 0
        while pending:
            num_tokens += self._add(pending.popleft(), changed, now)
        self._metrics.generated(num_tokens)
        self._context.allowance.spend_tokens(num_tokens)
        return changed

    async def finish(self) -> None:
        self._is_whole = True
        try:
            while self._num_open:
                await self._stream.wait()
                self.take()
        finally:
            self.close()

    def _tried_again(self) -> bool:
        """An engine lost the requests. Another one gets them, once, unless tokens have been passed on."""
        begun = any(part.begun for part in self._parts.values())
        if self._is_retry or (begun and not self._is_whole) or not self._client.can_retry:
            return False
        self._is_retry = True
        try:
            self._stream = self._client.submit(self._requests)
        except (EngineDead, QueueFull):
            return False
        if begun:
            self._parts, self._num_open = self._new_parts(), len(self._requests)
        if self._watch is not None:
            self._watch.stream = self._stream
        return True

    def fail(self, fault: Exception) -> None:
        """Aborts what has not ended; the next `take` without an update raises `fault`."""
        self._stream.fail(fault)

    def close(self) -> None:
        """Aborts what has not ended. Calling it twice is fine."""
        self._stream.close()
        if self._watch is not None:
            self._watch.close()
        self._context.facts.update(
            prompt_tokens=sum(part.num_prompt_tokens for part in self._parts.values()),
            completion_tokens=self._num_generated(),
            cached_tokens=sum(answer.num_cached for answer in self.answers),
            finish=",".join(s.finish_reason or "aborted" for a in self.answers for s in a.sequences),
        )

    # ------------------------------------------------------------------ results

    @property
    def answers(self) -> list[Answer]:
        """One for each prompt, in their order."""
        return [part.answer for part in self._parts.values()]

    @property
    def prompts(self) -> list[PreparedPrompt]:
        return [part.prompt for part in self._parts.values()]

    def usage(self) -> Usage:
        num_prompt = sum(part.num_prompt_tokens for part in self._parts.values())
        num_generated = self._num_generated()
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(answer.num_cached for answer in self.answers)},
        }

    # ------------------------------------------------------------------ taking updates

    def _add(self, update: SequenceUpdate, changed: deque[Change], now: float) -> int:
        """Adds an update to its answer and to `changed`; returns how many tokens it brought."""
        part = self._parts[update.request_id]
        change = part.changes[update.index]
        sequence, answer = change.sequence, part.answer
        if sequence.finish_reason is not None:
            return 0  # made before the engine knew that a stop string had matched
        before = len(sequence.token_ids)
        if answer.take(update, now):
            self._client.stop(update.request_id, update.index)
        elif self.stops is not None and sequence.finish_reason is None and self.stops(sequence):
            sequence.finish_reason = "stop"
            self._client.stop(update.request_id, update.index)
        if answer.fault is not None:
            raise answer.fault
        if change in changed:
            change.text += sequence.new_text
        else:
            change.first_token, change.text = before, sequence.new_text
            changed.append(change)
        num_tokens = len(sequence.token_ids) - before
        if num_tokens:
            self._clock(part, change, update.request_id, num_tokens, now)
        if sequence.finish_reason is not None and answer.finished:
            self._end(part, update.request_id, now)
        return num_tokens

    def _clock(
        self, part: _PromptState, change: Change, request_id: str, num_tokens: int, now: float
    ) -> None:
        if change.last_update is not None:
            self._metrics.gap(now - change.last_update, num_tokens)
        change.last_update = now
        if not part.begun:
            part.begun = True
            queued = self._stream.queue_seconds.get(request_id, 0.0)
            prefill = max(0.0, now - self._submitted - queued)
            first = now - self._context.arrival
            self._metrics.first_token(first, queued, prefill, part.num_prompt_tokens)
            self._context.facts.setdefault("queued", round(queued, 4))
            self._context.facts.setdefault("first_token", round(first, 4))

    def _end(self, part: _PromptState, request_id: str, now: float) -> None:
        self._stream.done(request_id)
        self._num_open -= 1
        first = part.answer.first_token or now
        reasons = [s.finish_reason or "" for s in part.answer.sequences]
        self._metrics.finished(now - self._context.arrival, max(0.0, now - first), reasons)

    def _num_generated(self) -> int:
        return sum(len(s.token_ids) for answer in self.answers for s in answer.sequences)

"""Generation: one HTTP request at the engine, from submission to the last token of its last sequence."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.types import Receive

from quire.core.request import Request
from quire.core.step import SequenceUpdate
from quire.engine.streams import Stream
from quire.link.client import EngineClient
from quire.server.caller import Caller, until_gone
from quire.server.errors import ClientGone, TimedOut
from quire.server.metrics import Metrics
from quire.server.protocol.base import Usage
from quire.text.answer import Answer, AnswerSequence
from quire.text.prompts import PreparedPrompt
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Change:
    """What was added to one sequence since it was last looked at."""

    position: int  # of its prompt
    sequence: AnswerSequence
    first_token: int  # the addition begins here in the sequence's tokens (and logprobs)
    text: str = ""


@dataclass(slots=True)
class _Part:
    """One prompt of the request, and its answer."""

    position: int
    prompt: PreparedPrompt
    num_prompt_tokens: int
    answer: Answer
    begun: bool = False


class Generation:
    """Must be closed; `changes` and `finish` do so. Whoever leaves early has the rest aborted."""

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        tokenizer: Tokenizer | None,
        caller: Caller,
        prompts: list[PreparedPrompt],
        requests: list[Request],
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Submits the requests: raises at once what refuses them."""
        self._client = client
        self._metrics = metrics
        self._caller = caller
        self._parts = {
            request.request_id: _Part(
                position,
                prompt,
                request.num_prompt_tokens,
                Answer(request.request_id, request.sampling, tokenizer, kept_ids),
            )
            for position, (prompt, request) in enumerate(zip(prompts, requests, strict=True))
        }
        self._last_update: dict[tuple[str, int], float] = {}
        self._num_open = len(requests)
        self._submitted = time.monotonic()
        self._stream: Stream[SequenceUpdate] = client.submit(requests)
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ running

    def limit(self, receive: Receive, seconds: float | None) -> None:
        """From now on a closed connection, or that much time, ends the generation within one step."""
        self._watch = asyncio.create_task(self._end_when_gone(receive))
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(seconds, self._stream.fail, TimedOut(seconds))

    async def changes(self) -> AsyncGenerator[list[Change], None]:
        """What each batch of updates added, until everything has ended."""
        try:
            while self._num_open:
                yield self._take(await self._stream.updates())
        finally:
            self.close()

    async def finish(self) -> None:
        try:
            while self._num_open:
                self._take(await self._stream.updates())
        finally:
            self.close()

    def close(self) -> None:
        """Aborts what has not ended. Calling it twice is fine."""
        self._stream.close()
        if self._watch is not None:
            self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._caller.facts.update(
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

    def _take(self, updates: list[SequenceUpdate]) -> list[Change]:
        """Several updates of one sequence become one change: a client that lags gets larger pieces."""
        now = time.monotonic()
        changed: dict[tuple[str, int], Change] = {}
        num_tokens = 0
        for update in updates:
            part = self._parts[update.request_id]
            sequence = part.answer.sequences[update.index]
            if sequence.finish_reason is not None:
                continue  # made before the engine heard that a stop string was found
            key = (update.request_id, update.index)
            before = len(sequence.token_ids)
            if part.answer.take(update):
                self._client.stop(update.request_id, update.index)
            if part.answer.fault is not None:
                raise part.answer.fault
            change = changed.get(key)
            if change is None:
                change = changed[key] = Change(part.position, sequence, before)
            change.text += sequence.new_text
            num_tokens += len(sequence.token_ids) - before
            self._clock(part, key, len(sequence.token_ids) - before, now)
            if part.answer.finished:
                self._end(part, update.request_id, now)
        self._metrics.generated(num_tokens)
        self._caller.allowance.spend_tokens(num_tokens)
        return list(changed.values())

    def _clock(self, part: _Part, key: tuple[str, int], num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        last = self._last_update.get(key)
        self._last_update[key] = now
        if last is not None:
            self._metrics.gap(now - last, num_tokens)
        if not part.begun:
            part.begun = True
            queued = self._stream.queue_seconds.get(key[0], 0.0)
            prefill = max(0.0, now - self._submitted - queued)
            first = now - self._caller.arrival
            self._metrics.first_token(first, queued, prefill, part.num_prompt_tokens)
            self._caller.facts.setdefault("queued", round(queued, 4))
            self._caller.facts.setdefault("first_token", round(first, 4))

    def _end(self, part: _Part, request_id: str, now: float) -> None:
        self._stream.done(request_id)
        self._num_open -= 1
        first = part.answer.first_token or now
        reasons = [s.finish_reason or "" for s in part.answer.sequences]
        self._metrics.finished(now - self._caller.arrival, max(0.0, now - first), reasons)

    async def _end_when_gone(self, receive: Receive) -> None:
        await until_gone(receive)
        self._metrics.disconnected()
        self._stream.fail(ClientGone())

    def _num_generated(self) -> int:
        return sum(len(s.token_ids) for answer in self.answers for s in answer.sequences)

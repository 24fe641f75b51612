"""Answer: a request's sequences as text, made from the engine's updates on the client's side."""

import time

from quire.core.errors import InvalidRequest, QuireError
from quire.core.request import Clock
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate, TokenLogprobs
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer


class AnswerSequence:
    """One sequence of the answer so far; `new_text` is what the last update added."""

    __slots__ = (
        "_pieces",
        "cumulative_logprob",
        "detokenizer",
        "finish_reason",
        "index",
        "logprobs",
        "new_text",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, index: int, detokenizer: Detokenizer | None, text: str = "") -> None:
        """Without a detokenizer the caller wants token ids only."""
        self.index = index
        self.detokenizer = detokenizer
        self.new_text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._pieces = [text]

    @property
    def text(self) -> str:
        """All text so far. Joined on access: a stream only reads `new_text`."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def add_text(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self.new_text += text


class Answer:
    """Takes updates in order. A stop string ends a sequence here: `take` then says which one to stop."""

    def __init__(
        self,
        request_id: str,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        kept_ids: frozenset[int] = frozenset(),
        clock: Clock = time.monotonic,
    ) -> None:
        """Special tokens with `kept_ids` stay in the text even if `sampling` skips special tokens."""
        self.request_id = request_id
        self.sampling = sampling
        self._clock = clock
        self.arrival = clock()
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.num_cached = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.fault: QuireError | None = None  # why there is no more of it
        self.sequences = [
            AnswerSequence(index, self._detokenizer(tokenizer, kept_ids))
            for index in range(sampling.num_answers)
        ]

    def take(self, update: SequenceUpdate, now: float | None = None) -> bool:
        """Adds an update. True: a stop string appeared, so the engine should stop this sequence.

        `now` is the clock's reading where the caller has one already.
        """
        sequence = self.sequences[update.index]
        sequence.new_text = ""
        if sequence.finish_reason is not None:
            return False  # tokens that were on their way when a stop string matched
        self._note(update, now)
        token_ids = update.token_ids
        if len(token_ids) == 1 and not update.logprobs:  # nearly every update
            if self._push(sequence, token_ids[0], None):
                return update.finish_reason is None
        else:
            for position, token_id in enumerate(token_ids):
                logprobs = update.logprobs[position] if update.logprobs else None
                if self._push(sequence, token_id, logprobs):
                    return update.finish_reason is None
        if update.finish_reason is not None:
            self._end(sequence, update.finish_reason, update.stop_reason)
        return False

    def end(self, finish_reason: str) -> None:
        """Ends the sequences that are still open, from the caller's side."""
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                self._end(sequence, finish_reason, None)

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def best(self) -> list[AnswerSequence]:
        """The `n` sequences to return: with best_of, those with the highest mean logprob. Beams come ranked."""
        if self.sampling.num_answers == self.sampling.n:
            return self.sequences
        ranked = sorted(
            self.sequences, key=lambda s: -(s.cumulative_logprob or 0.0) / max(1, len(s.token_ids))
        )
        return ranked[: self.sampling.n]

    def _detokenizer(self, tokenizer: Tokenizer | None, kept_ids: frozenset[int]) -> Detokenizer | None:
        if tokenizer is None:
            return None
        sampling = self.sampling
        return Detokenizer(
            tokenizer,
            sampling.skip_special_tokens,
            sampling.stop,
            sampling.include_stop_str_in_output,
            sampling.min_tokens,
            kept_ids,
        )

    def _note(self, update: SequenceUpdate, now: float | None) -> None:
        if update.error is not None and update.param is not None:
            self.fault = InvalidRequest(update.error, update.param)
        elif update.error is not None:
            self.fault = QuireError(update.error)
        if update.num_cached > self.num_cached:
            self.num_cached = update.num_cached
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        if update.token_ids:
            self.last_token = self._clock() if now is None else now
            if self.first_token is None:
                self.first_token = self.last_token

    def _push(self, sequence: AnswerSequence, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Adds one token; True if its text completes a stop string."""
        sequence.token_ids.append(token_id)
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob = (sequence.cumulative_logprob or 0.0) + logprobs.logprob
        detokenizer = sequence.detokenizer
        if detokenizer is None:
            return False
        sequence.add_text(detokenizer.push_token(token_id))
        if detokenizer.stopped:
            sequence.finish_reason = "stop"
            sequence.stop_reason = detokenizer.stop_reason
            return True
        return False

    def _end(self, sequence: AnswerSequence, finish_reason: str, stop_reason: int | str | None) -> None:
        if sequence.detokenizer is not None:
            sequence.add_text(sequence.detokenizer.flush())
        sequence.finish_reason = finish_reason
        sequence.stop_reason = stop_reason

"""Answer: a request's sequences as text, made from the engine's updates on the client's side."""

import time
from dataclasses import dataclass, field

from quire.core.clock import Clock
from quire.core.errors import InvalidRequest, QuireError
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate, TokenLogprobs
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True)
class AnswerSequence:
    """One sequence of the answer so far; `new_text` is what the last update added."""

    index: int
    detokenizer: Detokenizer | None  # None: the caller wants token ids only
    text: str = ""
    new_text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


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
        """Special tokens with `kept_ids` stay in the text whatever `sampling` says about them."""
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

    def take(self, update: SequenceUpdate) -> bool:
        """Adds an update. True: a stop string appeared, so the engine should stop this sequence."""
        sequence = self.sequences[update.index]
        sequence.new_text = ""
        if sequence.finish_reason is not None:
            return False  # tokens that were on their way when a stop string was found
        self._note(update)
        for i, token_id in enumerate(update.token_ids):
            logprobs = update.logprobs[i] if update.logprobs else None
            if self._push(sequence, token_id, logprobs):
                return update.finish_reason is None
        if update.finish_reason is not None:
            self._end(sequence, update.finish_reason, update.stop_reason)
        return False

    def end(self, finish_reason: str) -> None:
        """Ends whatever is still open, from the caller's side."""
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                self._end(sequence, finish_reason, None)

    @property
    def finished(self) -> bool:
        return all(s.finish_reason is not None for s in self.sequences)

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

    def _note(self, update: SequenceUpdate) -> None:
        if update.error is not None and update.param is not None:
            self.fault = InvalidRequest(update.error, update.param)
        elif update.error is not None:
            self.fault = QuireError(update.error)
        self.num_cached = max(self.num_cached, update.num_cached)
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        if update.token_ids:
            self.last_token = self._clock()
            self.first_token = self.first_token or self.last_token

    def _push(self, sequence: AnswerSequence, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Adds one token; True if its text completes a stop string."""
        sequence.token_ids.append(token_id)
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob = (sequence.cumulative_logprob or 0.0) + logprobs.logprob
        detokenizer = sequence.detokenizer
        if detokenizer is None:
            return False
        self._add_text(sequence, detokenizer.push([token_id]))
        if detokenizer.stopped:
            sequence.finish_reason = "stop"
            sequence.stop_reason = detokenizer.stop_reason
            return True
        return False

    def _end(self, sequence: AnswerSequence, finish_reason: str, stop_reason: int | str | None) -> None:
        if sequence.detokenizer is not None:
            self._add_text(sequence, sequence.detokenizer.flush())
        sequence.finish_reason = finish_reason
        sequence.stop_reason = stop_reason

    @staticmethod
    def _add_text(sequence: AnswerSequence, text: str) -> None:
        sequence.text += text
        sequence.new_text += text

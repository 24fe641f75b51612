"""Answer: a request's sequences as text, made from the engine's updates on the client's side. A Detokenizer makes
each sequence's text, in pieces that are safe to show, up to a stop string."""

import codecs
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.core.errors import InvalidRequest, QuireError
from quire.core.request import Clock
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate, TokenLogprobs
from quire.text.tokenizer import Tokenizer, is_byte_token


@dataclass(slots=True, eq=False)
class AnswerSequence:
    """One sequence of the answer so far; `new_text` is what the last update added."""

    index: int
    detokenizer: "Detokenizer | None"  # None: the caller wants token ids only
    new_text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _pieces: list[str] = field(default_factory=lambda: [""])

    @property
    def text(self) -> str:
        """All text so far. Joined on access: a stream only reads `new_text`."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def begins_text(self) -> bool:
        """Whether the sequence is a text of its own, not a continuation of the prompt's."""
        return self.detokenizer is not None and self.detokenizer.begins_text

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
        context_id: int | None = None,
    ) -> None:
        """Special tokens with `kept_ids` stay in the text even if `sampling` skips special tokens. The text goes on
        behind the token `context_id`; None: it is a text of its own."""
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
            AnswerSequence(index, self._detokenizer(tokenizer, kept_ids, context_id))
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

    def _detokenizer(
        self, tokenizer: Tokenizer | None, kept_ids: frozenset[int], context_id: int | None
    ) -> "Detokenizer | None":
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
            context_id,
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


# ---------------------------------------------------------------------- detokenizer


_LONGEST_BYTE_RUN = 64  # tokens; see PieceDecoder


class _TextDecoder(Protocol):
    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Detokenizer:
    """All pushes and the flush together are `tokenizer.decode` of all tokens, cut at the first stop string.

    A character that is not complete is held back, and so is text that may turn out to be a stop string. The
    cost of a token does not grow with the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        kept_ids: frozenset[int] = frozenset(),
        context_id: int | None = None,
    ) -> None:
        """Stop strings are not looked for in the text of the first `min_tokens` tokens. Special tokens with
        `kept_ids` are shown in any case. Text behind the token `context_id` keeps its first space."""
        self._decoder: _TextDecoder
        if tokenizer.is_byte_level:
            self._decoder = ByteDecoder(tokenizer, skip_special_tokens, kept_ids)
        else:
            self._decoder = PieceDecoder(tokenizer, skip_special_tokens, kept_ids, context_id)
        self.begins_text = context_id is None  # the first token may be shown without its space
        self._stops = StopStrings(stop, include_stop_str_in_output)
        self._min_tokens = min_tokens
        self.num_tokens = 0  # consumed; with a stop string found, up to and including the token that ended it

    @property
    def stopped(self) -> bool:
        return self._stops.matched is not None

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens make showable; none after a stop string."""
        return "".join([self.push_token(token_id) for token_id in token_ids])

    def push_token(self, token_id: int) -> str:
        """As `push`, for one token. Runs for every streamed token and makes no object but the text."""
        stops = self._stops
        if stops.matched is not None:
            return ""
        self.num_tokens += 1
        text = self._decoder.push(token_id)
        return text if self.num_tokens <= self._min_tokens else stops.feed(text)

    def flush(self) -> str:
        """The text that is held when the sequence ends: broken bytes become U+FFFD, half a stop string is shown."""
        if self.stopped:
            return ""
        return self._stops.feed(self._decoder.flush()) + self._stops.flush()


class ByteDecoder:
    """For byte-level vocabularies: tokens are bytes, and UTF-8 is decoded as it comes.

    The text of a token that holds whole characters is looked up; only split characters go through the decoder.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, kept_ids: frozenset[int] = frozenset()
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._texts = tokenizer.whole_texts
        self._skipped = tokenizer.special_ids - kept_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_character = False  # the decoder holds the first bytes of one

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._in_character:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        data = self._bytes_of(token_id)
        text = self._utf8.decode(data)
        was_whole, self._in_character = not self._in_character, bool(self._utf8.getstate()[0])
        if was_whole and not self._in_character:
            self._texts[token_id] = text
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class PieceDecoder:
    """For other vocabularies: new tokens are decoded behind one token of context.

    Their decoders look at neighbours twice: the start of a text loses its space, and a run of byte tokens
    becomes characters only if the whole run is valid. So one token stays as context, and a run is held until
    it ends, or until it is very long and makes sense so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        kept_ids: frozenset[int] = frozenset(),
        context_id: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._kept = kept_ids if skip_special_tokens else frozenset()
        self._context: list[int] = [] if context_id is None else [context_id]
        self._context_text = tokenizer.decode(self._context, self._skip)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        token = self._tokenizer.token(token_id)
        if token is not None and token_id in self._kept:
            return self.flush() + token
        if token is None or (self._skip and token_id in self._tokenizer.special_ids):
            return ""
        self._pending.append(token_id)
        if is_byte_token(token):
            # A character has at most four bytes, so a valid run is complete within four tries.
            if len(self._pending) < _LONGEST_BYTE_RUN or len(self._pending) % _LONGEST_BYTE_RUN > 3:
                return ""
            text = self._decoded()
            if "\ufffd" in text:
                return ""
            if not self._context:  # what follows is no longer the start of the text
                self._context, self._context_text = list(self._pending), text
            return self._commit(text)
        text = self._decoded()
        self._context = [token_id]
        self._context_text = self._tokenizer.decode(self._context, self._skip)
        return self._commit(text)

    def flush(self) -> str:
        return self._commit(self._decoded()) if self._pending else ""

    def _decoded(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending, self._skip)
        return text[len(self._context_text) :]

    def _commit(self, text: str) -> str:
        self._pending.clear()
        return text


# ---------------------------------------------------------------------- stop strings


class StopStrings:
    """Takes text and returns the part that cannot belong to a stop string any more.

    The stop string that ends first wins; of several that end together, the longest. The result depends on the text
    alone, not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""  # the longest end of the text that a stop string begins with
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """New text that may be shown. After a match `matched` is set and no more text is returned."""
        if not self._stops or self.matched is not None or not text:
            return text if self.matched is None else ""
        text = self._held + text
        end = self._match(text)
        if self.matched is not None:
            self._held = ""
            return text[:end] if self._include else text[: end - len(self.matched)]
        cut = min(_prefix_start(text, stop) for stop in self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The held text, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _match(self, text: str) -> int:
        """Sets `matched` if `text` holds a stop string, and returns where the match ends."""
        first = len(text) + 1
        for stop in self._stops:
            start = text.find(stop)
            end = start + len(stop)
            if start >= 0 and (end < first or (end == first and len(stop) > len(self.matched or ""))):
                first, self.matched = end, stop
        return first


def _prefix_start(text: str, stop: str) -> int:
    """Where the longest end of `text` starts that is a proper prefix of `stop`; the text's length if there is none."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)

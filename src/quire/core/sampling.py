"""SamplingParams: how a request's tokens are chosen, with vLLM's names."""

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import index
from typing import Any

from quire.core.errors import FieldName, InvalidRequest
from quire.core.structured import StructuredOutput

MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5  # a temperature under this means "take the most likely token"
MAX_BEAM_WIDTH = 32
MAX_SEQUENCES = 1024  # n and best_of; an engine runs max_num_seqs of them at once
MAX_STOPS = 64  # strings; each costs time on every token of the answer
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 1024  # before it is tokenized
MAX_BAD_WORD_TOKENS = 64
MAX_BAD_WORDS_TOKENS = 16_384  # of all bad words in both spellings; compared with every row at every step
MAX_LOGIT_BIASES = 4096
MAX_TOKEN_IDS = 1 << 18  # in one list; the largest vocabularies have about as many
_MAX_INTEGER = 2**63 - 1  # of the messages and arrays that carry these numbers
# of a beam search, instead of what a model recommends for sampling
BEAM_SAMPLING: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Immutable and validated: an instance that exists can be served (up to the model's own limits).

    `max_tokens=None` means "as many as the context and the pool allow". `seed=None` takes a fresh seed
    per request. `logprobs=k` returns the chosen token's logprob and the k best; `prompt_logprobs` likewise
    for each prompt token.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # made from bad_words by `text`
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    max_tokens: int | None = 16
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None  # the grammar that the answer must match
    use_beam_search: bool = False  # best_of beams (n where it is left out), of which the n best are returned
    length_penalty: float = 1.0  # a hypothesis scores its logprob over its length to this power
    early_stopping: bool | str = False  # True: as soon as there are enough; "never": when none can be better

    def __post_init__(self) -> None:
        put = object.__setattr__  # frozen, but plain spellings (a lone string, a list, -1) are welcome
        put(self, "stop", _words("stop", self.stop, MAX_STOPS, MAX_STOP_CHARACTERS))
        put(self, "bad_words", _words("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS))
        put(self, "bad_words_token_ids", _bad_word_ids(self.bad_words_token_ids))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put(self, "logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.top_k == -1:
            put(self, "top_k", 0)
        if isinstance(self.structured, Mapping):  # {"json": …}, {"regex": …} and so on
            put(self, "structured", StructuredOutput.of(self.structured))
        elif not isinstance(self.structured, (StructuredOutput, type(None))):
            raise _wrong_type(
                "structured", self.structured, "a StructuredOutput or a mapping such as {'regex': …}"
            )
        if self.use_beam_search:
            _check_beam_params(self)
            put(self, "temperature", 0.0)  # beams are not sampled
        else:
            _check_no_beams(self)
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("top_k", self.top_k, 0)
        _whole("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            _whole("best_of", self.best_of, 1, MAX_SEQUENCES)
        _whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "use_beam_search"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong_type(name, getattr(self, name), "true or false")

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "{param}={least} is larger than {limit}={most}: raise {limit}",
                "min_tokens",
                least=self.min_tokens,
                limit=FieldName("max_tokens"),
                most=self.max_tokens,
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(
                f"best_of={self.best_of} is smaller than n={self.n}: raise best_of", "best_of"
            )
        if self.greedy and self.num_sequences > 1 and not self.use_beam_search:
            raise InvalidRequest(
                f"n={self.num_sequences} with temperature=0 gives the same text {self.num_sequences} times: "
                "raise temperature or set n=1",
                "n",
            )
        if any(not word for word in self.stop):
            raise InvalidRequest(
                "{param} contains an empty string, which would stop everything: remove it", "stop"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty: no token could be chosen", "allowed_token_ids")
        for token_id, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias[{token_id}]={bias} is outside [-100, 100]: choose a value within",
                    "logit_bias",
                )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def num_sequences(self) -> int:
        """Number of sequences that run for the request; `n` of them are returned."""
        return self.best_of or self.n

    @property
    def num_answers(self) -> int:
        """Number of sequences that the engine reports: all that run, but of beams only the n returned."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def changed(self, **values: Any) -> "SamplingParams":
        return replace(self, **values)


def _within(name: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    valid = isinstance(value, (int, float)) and low <= value <= high  # not for NaN
    if not valid or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise InvalidRequest(
            "{param}={value} is outside {bracket}{low:g}, {high:g}]: choose a value within",
            name,
            value=_shown(value),
            bracket=bracket,
            low=low,
            high=high,
        )


def _whole(name: str, value: int, low: int, high: int = _MAX_INTEGER) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        limit = f"from {low} to {high}" if high < _MAX_INTEGER else f"of at least {low}"
        raise InvalidRequest(
            "{param}={value} is not a whole number {limit}", name, value=_shown(value), limit=limit
        )


def _words(name: str, given: Any, most: int, longest: int) -> tuple[str, ...]:
    """A lone string, or up to `most` of up to `longest` characters."""
    words = (given,) if isinstance(given, str) else _listed(name, given, most, "strings")
    for word in words:
        if not isinstance(word, str):
            raise _wrong_type(name, word, "strings")
        if len(word) > longest:
            raise InvalidRequest(
                "{param} holds a string of {length} characters and {longest} are allowed: shorten it",
                name,
                length=len(word),
                longest=longest,
            )
    return words


def _token_ids(name: str, given: Any) -> tuple[int, ...]:
    token_ids = _listed(name, given, MAX_TOKEN_IDS, "token ids")
    if set(map(type, token_ids)) <= {int}:  # nearly always, and quick
        return token_ids
    try:
        return tuple(index(token_id) for token_id in token_ids)
    except TypeError:
        raise InvalidRequest(
            "{param} holds a value that is not a token id: give whole numbers", name
        ) from None


def _listed(name: str, given: Any, most: int, what: str) -> tuple[Any, ...]:
    """Reads no more of `given` than its limit."""
    if given is None:
        return ()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise _wrong_type(name, given, f"a list of {what}")
    listed = given if isinstance(given, tuple) else tuple(islice(given, most + 1))
    if len(listed) > most:
        count = len(given) if isinstance(given, Sized) else f"more than {most}"
        raise InvalidRequest(
            "{param} holds {count} {what} and {most} are allowed: send fewer",
            name,
            count=count,
            what=what,
            most=most,
        )
    return listed


def _bad_word_ids(given: Any) -> tuple[tuple[int, ...], ...]:
    name = "bad_words_token_ids"
    words = tuple(_token_ids(name, word) for word in _listed(name, given, 2 * MAX_BAD_WORDS, "words"))
    if not words:
        return ()
    longest, num_tokens = max(map(len, words)), sum(map(len, words))
    if longest > MAX_BAD_WORD_TOKENS or num_tokens > MAX_BAD_WORDS_TOKENS:
        raise InvalidRequest(
            f"the bad words have {num_tokens} tokens in both spellings, the longest {longest}, and "
            f"{MAX_BAD_WORDS_TOKENS} are allowed, {MAX_BAD_WORD_TOKENS} for each: send fewer or shorter ones",
            "bad_words",
        )
    return words


def _biases(given: Any) -> dict[int, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise _wrong_type("logit_bias", given, "a mapping from token ids to numbers")
    if len(given) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"logit_bias holds {len(given)} token ids and {MAX_LOGIT_BIASES} are allowed: send fewer",
            "logit_bias",
        )
    try:
        return {int(token_id): float(bias) for token_id, bias in given.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"logit_bias maps token ids to numbers ({error})", "logit_bias") from None


def _wrong_type(name: str, value: Any, wanted: str) -> InvalidRequest:
    return InvalidRequest(
        "{param} holds a {kind}: give {wanted}", name, kind=type(value).__name__, wanted=wanted
    )


def _shown(value: Any) -> str:
    """A whole number may have more digits than Python will write."""
    return f"{value:#x}"[:40] if isinstance(value, int) and abs(value) > 1 << 128 else repr(value)[:80]


def _check_no_beams(sampling: SamplingParams) -> None:
    """Without beam search its parameters would be ignored."""
    given = {
        "length_penalty": sampling.length_penalty != 1.0,
        "early_stopping": sampling.early_stopping is not False,
    }
    for name, is_given in given.items():
        if is_given:
            raise InvalidRequest(f"{name} is for beam search: set use_beam_search, or leave it out", name)


def _check_beam_params(sampling: SamplingParams) -> None:
    """Raises InvalidRequest, naming the field, for what beam search cannot do or would ignore."""
    width = sampling.num_sequences
    if isinstance(width, int) and not 1 <= width <= MAX_BEAM_WIDTH:
        param = "n" if sampling.best_of is None else "best_of"
        raise InvalidRequest(
            f"{param}={_shown(width)} asks for a beam width outside 1 to {MAX_BEAM_WIDTH}: choose one within",
            param,
        )
    penalty = sampling.length_penalty
    if not isinstance(penalty, (int, float)) or not -10.0 <= penalty <= 10.0:
        raise InvalidRequest(
            f"length_penalty={_shown(penalty)} is outside [-10, 10]: choose a value within", "length_penalty"
        )
    if sampling.early_stopping not in (True, False, "never"):
        raise InvalidRequest(
            f'early_stopping={_shown(sampling.early_stopping)} is not known: choose true, false or "never"',
            "early_stopping",
        )
    for name, neutral in BEAM_SAMPLING.items():
        value = getattr(sampling, name)
        if value != neutral and not (name == "temperature" and value == 1.0):
            raise InvalidRequest(
                f"{name}={_shown(value)} has no meaning in beam search, which does not sample: leave it out",
                name,
            )
    if sampling.stop:
        raise InvalidRequest(
            "beams have no text before the end, so stop strings cannot end them: use stop_token_ids", "stop"
        )

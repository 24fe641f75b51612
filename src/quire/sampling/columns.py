"""SamplingColumns: every row's sampling parameters as arrays, on the host and on the device, and its random numbers.

Random numbers are counter-based, a function of (seed, sample index, position, purpose) alone. Nothing is stored between
steps, so batching, preemption, chunking and speculation cannot move a request's random numbers. The function, all on
unsigned 64-bit integers that wrap:

    mix(x): x ^= x >> 30;  x *= BF58476D1CE4E5B9h;  x ^= x >> 27;  x *= 94D049BB133111EBh;  x ^= x >> 31
    key     = mix(mix(mix(seed + G) + G * (sample index + 1)) + G * (purpose + 1))
    bits    = mix(key + G * (position + 1))          with G = 9E3779B97F4A7C15h
    uniform = (bits >> 11) / 2^53

`mix` is splitmix64's finaliser and the last line is splitmix64 itself, seeded with `key` and jumped to `position`: one
stream per (seed, sample index, purpose). Integers only until the last, exact division, so each platform gets the same
value. `kernels/sample` computes the same on devices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from quire.core.sampling import SamplingParams
from quire.kernels.sample.columns import WORDS, Word

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ALL_BITS = 0xFFFFFFFFFFFFFFFF
_UNIT = 2.0**-53


class Purpose(IntEnum):
    """What a random number decides. Numbers are part of the function: append, never renumber."""

    TOKEN = 0  # which token the target distribution yields
    DRAFT = 1  # which token a draft proposes
    ACCEPT = 2  # whether a proposed token is accepted
    RESAMPLE = 3  # which token replaces a rejected one


def stream_key(seed: int, sample_index: int, purpose: Purpose) -> int:
    """The key of one stream, computed once per row. A negative seed counts as its two's complement."""
    state = _mix_integer((seed + _GOLDEN) & _ALL_BITS)
    state = _mix_integer((state + _GOLDEN * (sample_index + 1)) & _ALL_BITS)
    return _mix_integer((state + _GOLDEN * (int(purpose) + 1)) & _ALL_BITS)


def uniforms(
    keys: np.ndarray,  # [S] uint64
    positions: np.ndarray,  # [S] int64, not negative
) -> np.ndarray:  # [S] float64 in [0, 1)
    """The number at `positions` of each stream."""
    counters = positions.astype(np.uint64) + np.uint64(1)
    bits = keys + np.uint64(_GOLDEN) * counters
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_SECOND)
    bits = bits ^ (bits >> np.uint64(31))
    return (bits >> np.uint64(11)).astype(np.float64) * _UNIT


def _mix_integer(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _ALL_BITS
    value = ((value ^ (value >> 27)) * _SECOND) & _ALL_BITS
    return value ^ (value >> 31)


NO_LOGPROBS = -1


class RowFlag:
    """The stages that a row needs. A step gathers these first and skips stages that no row needs.

    Plain integers: an array and a member of an enumeration take NumPy several times as long, a few times every step.
    """

    SAMPLED = 1  # temperature above zero
    PENALISED = 2
    EDITED = 4  # logit bias or a one-token bad word: the same edit at every position
    BAD_SEQUENCES = 8
    ALLOWED = 16
    MIN_TOKENS = 32
    LOGPROBS = 64


# Stages that change logits before sampling; a row without any is never copied for its raw logprobs.
CHANGING = RowFlag.PENALISED | RowFlag.EDITED | RowFlag.BAD_SEQUENCES | RowFlag.ALLOWED | RowFlag.MIN_TOKENS


@dataclass(frozen=True, slots=True)
class BadSequences:
    """A row's bad words of P + 1 tokens each."""

    last_ids: np.ndarray  # [W] int64, the last token of each word
    prefixes: np.ndarray  # [W, P] int32, the tokens before it


@dataclass(frozen=True, slots=True)
class RowEdits:
    """A row's token lists, on the host: they are short, and few rows have any."""

    bias_ids: np.ndarray  # [B] int64
    bias_values: np.ndarray  # [B] float32, minus infinity for a one-token bad word
    stop_ids: np.ndarray  # [E] int64, banned until min_tokens is reached
    bad_sequences: tuple[BadSequences, ...]  # bad words of several tokens, grouped by their length
    allowed_bits: np.ndarray  # [ceil(V / 32)] uint32; empty when every token is allowed


class SamplingColumns:
    """One entry per row in every array; an entry is valid from `start_row` until the row starts again.

    Nothing here changes as a row generates, so a preempted row that starts again is exactly as before.
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.temperature = np.zeros(max_rows, np.float32)  # [max_rows]; 0 means greedy
        self.top_k = np.zeros(max_rows, np.int32)  # [max_rows]; 0 is off
        self.top_p = np.ones(max_rows, np.float32)  # [max_rows]; 1 is off
        self.min_p = np.zeros(max_rows, np.float32)  # [max_rows]; 0 is off
        self.repetition = np.ones(max_rows, np.float32)  # [max_rows]; 1 is off
        self.presence = np.zeros(max_rows, np.float32)  # [max_rows]; 0 is off
        self.frequency = np.zeros(max_rows, np.float32)  # [max_rows]; 0 is off
        self.seed = np.zeros(max_rows, np.uint64)  # [max_rows]
        self.sample_index = np.zeros(max_rows, np.int64)  # [max_rows]
        self.token_key = np.zeros(max_rows, np.uint64)  # [max_rows], of the row's Purpose.TOKEN stream
        self.num_prompt_tokens = np.zeros(max_rows, np.int64)  # [max_rows]
        self.min_tokens = np.zeros(max_rows, np.int64)  # [max_rows]
        self.num_logprobs = np.full(max_rows, NO_LOGPROBS, np.int64)  # [max_rows]
        self.flags = np.zeros(max_rows, np.uint8)  # [max_rows] RowFlag
        self.edits: list[RowEdits | None] = [None] * max_rows
        # of the row that started last: the sequences of a request share theirs
        self._latest: tuple[SamplingParams, Iterable[int], RowEdits | None] | None = None

    def start_row(
        self,
        row: int,
        sampling: SamplingParams,
        seed: int,
        sample_index: int,
        num_prompt_tokens: int,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        """Assigns the row to a request's sample. `stop_token_ids`: all that end it."""
        self.temperature[row] = 0.0 if sampling.greedy else sampling.temperature
        self.top_k[row] = 0 if sampling.top_k >= self.vocab_size else sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        # a penalty that rounds to zero would turn minus infinity, a ban, into a NaN
        self.repetition[row] = max(sampling.repetition_penalty, 1e-30)
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        self.seed[row] = seed & 0xFFFFFFFFFFFFFFFF
        self.sample_index[row] = sample_index
        self.token_key[row] = stream_key(seed, sample_index, Purpose.TOKEN)
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.min_tokens[row] = sampling.min_tokens
        self.num_logprobs[row] = NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs
        latest = self._latest
        if latest is None or latest[0] is not sampling or latest[1] is not stop_token_ids:
            edits = _row_edits(sampling, stop_token_ids, self.vocab_size)
            latest = self._latest = sampling, stop_token_ids, edits
        self.edits[row] = latest[2]
        self.flags[row] = _row_flags(sampling, latest[2])

    def ban_row(self, row: int) -> None:
        """For a row that could not be started: no token is allowed, so its request ends with an error."""
        self.start_row(row, SamplingParams(temperature=0.0), 0, 0, 0)
        self.edits[row] = _row_edits(SamplingParams(allowed_token_ids=(-1,)), (), self.vocab_size)
        self.flags[row] = RowFlag.ALLOWED


def _row_flags(sampling: SamplingParams, edits: RowEdits | None) -> int:
    flags = 0
    if not sampling.greedy:
        flags |= RowFlag.SAMPLED
    if sampling.penalised:
        flags |= RowFlag.PENALISED
    # A beam candidate's own comes anyway.
    if sampling.logprobs or (sampling.logprobs == 0 and not sampling.use_beam_search):
        flags |= RowFlag.LOGPROBS
    if edits is not None:
        if len(edits.bias_ids):
            flags |= RowFlag.EDITED
        if edits.bad_sequences:
            flags |= RowFlag.BAD_SEQUENCES
        if len(edits.allowed_bits):
            flags |= RowFlag.ALLOWED
        if len(edits.stop_ids):
            flags |= RowFlag.MIN_TOKENS
    return flags


def _row_edits(sampling: SamplingParams, stop_token_ids: Iterable[int], vocab_size: int) -> RowEdits | None:
    has_bans = sampling.bad_words_token_ids or sampling.allowed_token_ids is not None or sampling.min_tokens
    if not sampling.logit_bias and not has_bans:
        return None
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for word in sampling.bad_words_token_ids:
        if word and all(0 <= token_id < vocab_size for token_id in word):
            by_length.setdefault(len(word), []).append(word)
    single = [word[0] for word in by_length.pop(1, ())]
    bias = {key: value for key, value in sampling.logit_bias.items() if 0 <= key < vocab_size}
    bias.update(dict.fromkeys(single, -np.inf))
    stop_ids = (
        token_array(frozenset(stop_token_ids), vocab_size) if sampling.min_tokens else np.zeros(0, np.int64)
    )
    return RowEdits(
        bias_ids=np.array(list(bias), np.int64),
        bias_values=np.array(list(bias.values()), np.float32),
        stop_ids=stop_ids,
        bad_sequences=tuple(_bad_sequences(words) for words in by_length.values()),
        allowed_bits=_bits_of(sampling.allowed_token_ids, vocab_size),
    )


@lru_cache(maxsize=16)  # of beams, each new branch starts a row with the same ones
def token_array(token_ids: frozenset[int], vocab_size: int) -> np.ndarray:
    """[E] int64, sorted, without ids outside the vocabulary."""
    return _known(sorted(token_ids), vocab_size)


def _bad_sequences(words: Sequence[tuple[int, ...]]) -> BadSequences:
    table = np.array(words, np.int32)
    return BadSequences(table[:, -1].astype(np.int64), np.ascontiguousarray(table[:, :-1]))


def _known(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Admission refuses unknown ids; here they are skipped: one bad index would fail the whole batch."""
    known = np.array(token_ids, np.int64)
    return known[(known >= 0) & (known < vocab_size)]


def _bits_of(token_ids: tuple[int, ...] | None, vocab_size: int) -> np.ndarray:
    """[ceil(V / 32)] uint32 with the tokens' bits set; empty for None."""
    if token_ids is None:
        return np.zeros(0, np.uint32)
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    known = _known(token_ids, vocab_size)
    np.bitwise_or.at(bits, known // 32, np.uint32(1) << (known % 32).astype(np.uint32))
    return bits


class DeviceColumns:
    """A mirror of some of the columns. A row is current as of its last `update`."""

    def __init__(self, columns: SamplingColumns, device: torch.device | str) -> None:
        self._columns = columns
        self._device = torch.device(device)
        # [max_rows, WORDS], see `Word`
        self.packed: Tensor = torch.zeros((columns.max_rows, WORDS), dtype=torch.int32, device=self._device)

    def update(self, row_ids: np.ndarray) -> None:
        """Copies these rows to the device, in stream order, without waiting.

        Called once per step, after `start_row` of the step's new rows and before it samples.
        """
        if not len(row_ids):
            return
        is_cuda = self._device.type == "cuda"
        # pinned memory comes from torch's cache, which reuses a piece only after its copy is done
        staged = torch.zeros((len(row_ids), WORDS), dtype=torch.int32, pin_memory=is_cuda)
        _fill(staged.numpy(), self._columns, row_ids)
        sent = staged.to(self._device, non_blocking=True)
        self.packed.index_copy_(0, sent[:, Word.ROW].long(), sent)


def _fill(words: np.ndarray, columns: SamplingColumns, row_ids: np.ndarray) -> None:
    keys = columns.token_key[row_ids]
    words[:, Word.TEMPERATURE] = columns.temperature[row_ids].view(np.int32)
    words[:, Word.TOP_K] = columns.top_k[row_ids]
    words[:, Word.TOP_P] = columns.top_p[row_ids].view(np.int32)
    words[:, Word.MIN_P] = columns.min_p[row_ids].view(np.int32)
    words[:, Word.KEY_LOW] = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    words[:, Word.KEY_HIGH] = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
    words[:, Word.ROW] = row_ids
    words[:, Word.REPETITION] = columns.repetition[row_ids].view(np.int32)
    words[:, Word.PRESENCE] = columns.presence[row_ids].view(np.int32)
    words[:, Word.FREQUENCY] = columns.frequency[row_ids].view(np.int32)
    words[:, Word.PROMPT] = columns.num_prompt_tokens[row_ids]

"""Sampling in Triton, without a sort. Promises are those of the reference.

`sample_rows` is for a whole step: it takes each row's parameters from columns on the device, counts its random
number, samples, and writes the token where the next step reads it. Four launches: three survey the rows
(`triton_survey.py`), the last samples.

`penalise_rows` is one launch for a step with histories of any length. A program takes rows one after another and counts
each history's tokens in a buffer of zeros as wide as the vocabulary. Then each position of the history exchanges its
token's count for zero: the first to do so changes the logit, and the buffer is all zeros again for the next row.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sample.columns import WORDS, Word
from quire.kernels.sample.triton_draw import best_token, draw_token
from quire.kernels.sample.triton_passes import INFINITY, best_pass, peak_pass
from quire.kernels.sample.triton_survey import (
    GREEDY_ROW,
    KIND,
    SKIPPED,
    STATUS,
    UNUSABLE,
    collect_kernel,
    plan_kernel,
    record_of,
    record_words,
    weigh_kernel,
)

_WORDS = tl.constexpr(WORDS)
_KEY_LOW, _KEY_HIGH = tl.constexpr(int(Word.KEY_LOW)), tl.constexpr(int(Word.KEY_HIGH))
_REPETITION, _PRESENCE = tl.constexpr(int(Word.REPETITION)), tl.constexpr(int(Word.PRESENCE))
_FREQUENCY, _PROMPT = tl.constexpr(int(Word.FREQUENCY)), tl.constexpr(int(Word.PROMPT))
_SEEN = tl.constexpr(1 << 30)  # of a tally: in the prompt; below it, how often the token was said
HISTORY_CHUNK = 1024  # positions of a history at once
PENALTY_WARPS = 8


@dataclass(frozen=True, slots=True)
class SampleTuning:
    """Sizes that change speed and never results, but for the last bits. Powers of two."""

    piece: int = 8192  # logits of a row that one program surveys
    tile: int = 4096  # logits per iteration of a pass
    stages: int = 3
    warps: int = 8
    draw_warps: int = 8  # of the draw, whose programs have a whole row
    sample: int = 4096  # logits that guess the first thresholds
    listed: int = 4096  # tokens that the list holds
    wide: int = 4096  # logits per step of a draw from the row
    narrow: int = 2048  # and in its last step
    registers: int = 128  # per thread of a draw, so that two programs share a multiprocessor
    list_registers: int = 80  # and of listing: three


TUNING = SampleTuning()


class RowColumns(Protocol):
    """Each row's parameters, on the device."""

    packed: Tensor  # [max_rows, WORDS] int32, see `columns.Word`


@triton.jit
def _uniform(key_low, key_high, position):
    """The number at `position` of a stream, fp64 in [0, 1): splitmix64, as the sampling room counts it."""
    key = (key_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | key_low.to(tl.uint32, bitcast=True)
    bits = key + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["has_usable"])  # compiling it takes seconds, reading a flag nothing
def _draw_kernel(
    logits, stride, vocab, uniforms, columns, rows, positions, usable, token_ids, token_stride, out_tokens, out_finite,
    scratch, num_pieces, has_usable,
    FUSED: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, LIST: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """A program per row. FUSED: counted numbers and a place for the token by row id; else numbers by index."""
    index = tl.program_id(0).to(tl.int64)
    record, values, ids = record_of(scratch, index, LIST, PIECES)
    kind = tl.load(record + KIND)
    if kind != SKIPPED:
        row_id = index
        if FUSED:
            row_id = tl.load(rows + index).to(tl.int64)
        token = vocab * 0 - 1
        if kind == GREEDY_ROW:
            token = best_token(record, num_pieces, PIECES)
        else:
            if tl.load(record + STATUS) != UNUSABLE:
                if FUSED:
                    words = columns + row_id * _WORDS
                    position = tl.load(positions + index).to(tl.int64)
                    uniform = _uniform(tl.load(words + _KEY_LOW), tl.load(words + _KEY_HIGH), position)
                else:
                    uniform = tl.load(uniforms + index)
                token = draw_token(
                    logits + index * stride, vocab, num_pieces, record, values, ids, uniform,
                    PIECE, PIECES, TILE, STAGES, LIST, WIDE, NARROW,
                )  # fmt: skip
        finite = token >= 0
        if has_usable:
            finite = finite & (tl.load(usable + index) != 0)
        token = tl.where(finite, token, 0)
        tl.store(out_tokens + index, token.to(out_tokens.dtype.element_ty))
        if FUSED:
            tl.store(out_finite + index, finite.to(out_finite.dtype.element_ty))
            target = token_ids + row_id * token_stride + tl.load(positions + index).to(tl.int64)
            tl.store(target, token.to(token_ids.dtype.element_ty))


@triton.jit
def _argmax_kernel(logits, stride, vocab, out, TILE: tl.constexpr, STAGES: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    _, token, broken = best_pass(logits + index * stride, vocab, TILE, STAGES)
    tl.store(out + index, tl.where(broken != 0, vocab, token).to(tl.int64))


@triton.jit
def _peaks_kernel(logits, stride, vocab, out, TILE: tl.constexpr, STAGES: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    peak, _, broken = best_pass(logits + index * stride, vocab, TILE, STAGES)
    tl.store(out + index, tl.where(broken != 0, float("nan"), peak))


@triton.jit
def _log_softmax_kernel(logits, stride, vocab, token_ids, out, TILE: tl.constexpr, STAGES: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    chosen = tl.load(row + tl.load(token_ids + index).to(tl.int64)).to(tl.float32)
    peak = peak_pass(row, vocab, TILE, STAGES)
    lanes = tl.arange(0, TILE)
    sums = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        x = tl.load(row + start + lanes, mask=start + lanes < vocab, other=-INFINITY).to(tl.float32)
        sums += tl.exp(x - peak)
    tl.store(out + index, (chosen - peak) - tl.log(tl.sum(sums, axis=0)))


@triton.jit
def _ranks_kernel(logits, stride, vocab, token_ids, out, TILE: tl.constexpr, STAGES: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    chosen = tl.load(row + tl.load(token_ids + index).to(tl.int64)).to(tl.float32)
    lanes = tl.arange(0, TILE)
    above = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        x = tl.load(row + start + lanes, mask=start + lanes < vocab, other=-INFINITY).to(tl.float32)
        above += (x > chosen).to(tl.int32)
    tl.store(out + index, (tl.sum(above, axis=0) + 1).to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    """logits [S, V] -> int64 [S]; ties go to the lowest id."""
    return _per_row(_argmax_kernel, logits, torch.int64)


def peaks(logits: Tensor) -> Tensor:
    """logits [S, V] -> fp32 [S], each row's largest; NaN where the row has one."""
    return _per_row(_peaks_kernel, logits, torch.float32)


def log_softmax_gather(logits: Tensor, token_ids: Tensor) -> Tensor:
    """logits [S, V], token_ids [S] int64 -> fp32 [S], the log probability of each token."""
    return _per_row(_log_softmax_kernel, logits, torch.float32, token_ids)


def token_ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """int64 [S]: 1 + how many tokens of the row have a strictly larger logit."""
    return _per_row(_ranks_kernel, logits, torch.int64, token_ids)


def sample_filtered(
    logits: Tensor,  # [S, V] fp32, bf16 or fp16
    temperature: Tensor,  # [S] fp32; 0 means greedy
    top_k: Tensor,  # [S] int32; 0 is off
    top_p: Tensor,  # [S] fp32; 1 is off
    min_p: Tensor,  # [S] fp32; 0 is off
    uniforms: Tensor,  # [S] fp64 in [0, 1)
) -> Tensor:  # [S] int64
    """Draws a token per row: temperature, then min-p, then top-k, then top-p, then inverse CDF by token id.

    Ties are kept lowest id first. A row that cannot be sampled gets 0.
    """
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if len(out):
        scratch = _survey(logits, len(out), (temperature, top_k, top_p, min_p, out, out), False)
        _draw(logits, len(out), (uniforms, out, out, out, out, out, 0, out, out), scratch, False, False)
    return out


def sample_rows(
    logits: Tensor,  # [S, V] fp32, bf16 or fp16
    rows: Tensor,  # [S] int32 or int64; negative: nothing is done for this entry
    positions: Tensor,  # [S] int32 or int64, of the token being chosen
    columns: RowColumns,
    token_ids: Tensor,  # [max_rows, max_len] int32; the token is written to [row, position]
    out_tokens: Tensor,  # [S] int32 or int64
    out_finite: Tensor,  # [S] bool or int8
    num: int | None = None,  # how many of the S entries count; None: all
    usable: Tensor | None = None,  # [S] bool; False: the row has failed already
) -> None:
    """A token per entry by its row's parameters, without a word from the host.

    As the sampler's promise: a row whose logits are not finite, or with every token banned, gets token 0 and False.
    """
    count = logits.shape[0] if num is None else num
    if count:
        packed = columns.packed
        failed = out_finite if usable is None else usable
        scratch = _survey(logits, count, (packed, packed, packed, packed, packed, rows), True)
        outputs = (failed, token_ids, token_ids.stride(0), out_tokens, out_finite)
        _draw(logits, count, (packed, packed, rows, positions, *outputs), scratch, True, usable is not None)


def _pieces(vocabulary: int) -> tuple[int, int]:
    """How many pieces a row has, and the power of two at or above that."""
    pieces = -(-vocabulary // TUNING.piece)
    return pieces, 1 << (pieces - 1).bit_length()


def _survey(logits: Tensor, count: int, parameters: tuple[Tensor, ...], fused: bool) -> Tensor:
    """The records of all rows, which the last launch reads."""
    tuning, stride, vocabulary = TUNING, logits.stride(0), logits.shape[1]
    num_pieces, pieces = _pieces(vocabulary)
    words = record_words(tuning.listed, pieces)
    scratch = torch.empty((count, words), dtype=torch.float32, device=logits.device)
    plan_kernel[(count, 1, 1)](
        logits, stride, vocabulary, *parameters, scratch, fused,
        tuning.tile, tuning.stages, tuning.sample, tuning.listed, pieces, num_warps=tuning.warps,
    )  # fmt: skip
    weigh_kernel[(count, num_pieces, 1)](
        logits, stride, vocabulary, scratch,
        tuning.piece, tuning.tile, tuning.stages, tuning.listed, pieces, num_warps=tuning.warps,
    )  # fmt: skip
    collect_kernel[(count, num_pieces, 1)](
        logits, stride, vocabulary, scratch,
        tuning.piece, tuning.tile, tuning.listed, pieces,
        num_warps=tuning.warps, maxnreg=tuning.list_registers,
    )  # fmt: skip
    return scratch


def _draw(
    logits: Tensor, count: int, rest: tuple[Tensor | int, ...], scratch: Tensor, fused: bool, has_usable: bool
) -> None:
    tuning = TUNING
    num_pieces, pieces = _pieces(logits.shape[1])
    _draw_kernel[(count, 1, 1)](
        logits, logits.stride(0), logits.shape[1], *rest, scratch, num_pieces, int(has_usable), fused,
        tuning.piece, pieces, tuning.tile, tuning.stages, tuning.listed, tuning.wide, tuning.narrow,
        num_warps=tuning.draw_warps, maxnreg=tuning.registers,
    )  # fmt: skip


def _per_row(
    kernel: triton.JITFunction, logits: Tensor, dtype: torch.dtype, token_ids: Tensor | None = None
) -> Tensor:
    out = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
    if len(out):
        extra = () if token_ids is None else (token_ids,)
        kernel[(len(out), 1, 1)](
            logits, logits.stride(0), logits.shape[1], *extra, out, TUNING.tile, TUNING.stages,
            num_warps=TUNING.warps,
        )  # fmt: skip
    return out


@triton.jit
def _amount(words, WORD: tl.constexpr):
    return tl.load(words + WORD).to(tl.float32, bitcast=True)


@triton.jit
def _ids_at(history, history_positions, end, vocab):
    """Tokens of a history, and which of them count."""
    ids = tl.load(history + history_positions, mask=history_positions < end, other=-1)
    return ids, (ids >= 0) & (ids < vocab)


@triton.jit(do_not_specialize=["count"])  # how many rows a step has is no reason to compile again
def _penalise_kernel(
    logits, stride, vocab, count, columns, rows, positions, token_ids, token_stride, tallies, CHUNK: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)  # and so is `index`: offsets may pass 2^31
    mine = tallies + slot * vocab
    lanes = tl.arange(0, CHUNK)
    for index in range(slot, count, tl.num_programs(0)):
        row = tl.load(rows + index).to(tl.int64)
        words = columns + tl.maximum(row, 0) * _WORDS
        repetition, presence = _amount(words, _REPETITION), _amount(words, _PRESENCE)
        frequency = _amount(words, _FREQUENCY)
        if (row >= 0) & ((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)):
            prompt, end = tl.load(words + _PROMPT), tl.load(positions + index).to(tl.int32)
            start = tl.where(repetition != 1.0, 0, tl.minimum(prompt, end))
            history = token_ids + row * token_stride
            for at in range(start, end, CHUNK):
                ids, known = _ids_at(history, at + lanes, end, vocab)
                said = at + lanes >= prompt
                tl.atomic_or(mine + ids, _SEEN, mask=known & ~said, sem="relaxed")
                tl.atomic_add(mine + ids, 1, mask=known & said, sem="relaxed")
            tl.debug_barrier()  # all tallies are complete before one is taken away
            row_logits = logits + index * stride
            for at in range(start, end, CHUNK):
                ids, known = _ids_at(history, at + lanes, end, vocab)
                tally = tl.atomic_xchg(mine + ids, 0, mask=known, sem="relaxed")
                first = known & (tally != 0)
                value = tl.load(row_logits + ids, mask=first, other=0.0).to(tl.float32)
                value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
                times = (tally & (_SEEN - 1)).to(tl.float32)
                value = value - frequency * times
                value = value - tl.where(times > 0, presence, 0.0)
                tl.store(row_logits + ids, value.to(logits.dtype.element_ty), mask=first)
            tl.debug_barrier()  # and all are zeros again before the next row's


def penalise_rows(
    logits: Tensor,  # [S, V], changed in place
    rows: Tensor,  # [S] int32 or int64; negative: padding
    positions: Tensor,  # [S] int32 or int64: as many tokens of the row count
    packed: Tensor,  # [max_rows, WORDS] int32, see `columns.Word`
    token_ids: Tensor,  # [max_rows, max_len] int32
    tallies: Tensor,  # [N, V] int32 zeros, and zeros afterwards; N rows are worked on at once
) -> None:
    """By every row's own amounts; rows without any are left as they are."""
    count, vocabulary = logits.shape
    if count:
        _penalise_kernel[(min(count, len(tallies)), 1, 1)](
            logits, logits.stride(0), vocabulary, count, packed, rows, positions,
            token_ids, token_ids.stride(0), tallies, HISTORY_CHUNK,
            num_warps=PENALTY_WARPS, enable_fp_fusion=False,
        )  # fmt: skip

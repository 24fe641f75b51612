"""Repetition, presence and frequency penalties in Triton: one launch for a step with histories of any length.

A program takes rows one after another and counts each history's tokens in a buffer of zeros as wide as the vocabulary.
Then each position of the history exchanges its token's count for zero: the first to do so changes the logit, and the
buffer is all zeros again for the next row.
"""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.sample.columns import WORDS, Word

CHUNK = 1024  # history_positions of a history at once
WARPS = 8
_SEEN = tl.constexpr(1 << 30)  # of a tally: in the prompt; below it, how often the token was said
_WORDS = tl.constexpr(WORDS)
_REPETITION, _PRESENCE = tl.constexpr(int(Word.REPETITION)), tl.constexpr(int(Word.PRESENCE))
_FREQUENCY, _PROMPT = tl.constexpr(int(Word.FREQUENCY)), tl.constexpr(int(Word.PROMPT))


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
            token_ids, token_ids.stride(0), tallies, CHUNK,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip

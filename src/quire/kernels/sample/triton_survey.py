"""What is learnt of a step's rows before tokens are drawn, in three launches: plan, weigh, collect.

`plan_kernel` reads each row's parameters and guesses thresholds from a sample. `weigh_kernel` weighs them, a program
per piece of a row, so that one row keeps many multiprocessors busy. `collect_kernel` sums the pieces, decides in
which interval the threshold lies, and lists the tokens inside it. What one launch writes only later ones read.

Pieces have one size whatever the number of rows, so a row's sums are the same in any company.
"""

import triton
import triton.language as tl

from quire.kernels.sample.columns import WORDS, Word
from quire.kernels.sample.reference import GREEDY
from quire.kernels.sample.triton_bracket import begin, guess, load_sample, tighten
from quire.kernels.sample.triton_passes import (
    INFINITY,
    LOWEST,
    best_pass,
    collect_pass,
    measure_pass,
    peak_pass,
    sum_places,
    weigh_pass,
)

_GREEDY = tl.constexpr(GREEDY)
_WORDS = tl.constexpr(WORDS)
_TEMPERATURE, _TOP_K = tl.constexpr(int(Word.TEMPERATURE)), tl.constexpr(int(Word.TOP_K))
_TOP_P, _MIN_P = tl.constexpr(int(Word.TOP_P)), tl.constexpr(int(Word.MIN_P))
LOG2E = tl.constexpr(1.4426950408889634)
HEADROOM = tl.constexpr(60.0)  # log2 by which weights may exceed one before they are measured anew

# A row's record in the scratch, in fp32 words: the plan, what was decided, a part per piece, then the list.
KIND, REFERENCE, FLOOR, SCALE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TOP_K, TOP_P, THRESHOLDS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(8)
STATUS, LOW, LOW_MASS, LOW_NUMBER = tl.constexpr(16), tl.constexpr(17), tl.constexpr(18), tl.constexpr(19)
HIGH, HIGH_MASS, HIGH_NUMBER = tl.constexpr(20), tl.constexpr(21), tl.constexpr(22)
ROW_PEAK, ROW_MASS = tl.constexpr(23), tl.constexpr(24)
GOAL, BY_COUNT = tl.constexpr(25), tl.constexpr(26)
PARTS = tl.constexpr(32)

# a part
PART_WORDS = tl.constexpr(16)
PEAK, MASS, NUMBER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BASE = tl.constexpr(3)  # the kept weight that is not in the list
SUMS = tl.constexpr(8)  # of the four thresholds: weights, then numbers
BEST, BROKEN = tl.constexpr(4), tl.constexpr(5)

# KIND
SKIPPED, CHOSEN = tl.constexpr(0.0), tl.constexpr(1.0)  # nothing is done; the largest is taken
DRAWN, FILTERED = tl.constexpr(2.0), tl.constexpr(3.0)  # from all, but for min-p; by top-k or top-p as well

# STATUS
UNUSABLE, OVERFLOWED = tl.constexpr(0.0), tl.constexpr(1.0)  # cannot be sampled; the sample missed by far
OPEN, COLLECTED = tl.constexpr(2.0), tl.constexpr(3.0)  # the interval holds too many; it is listed
WHOLE = tl.constexpr(4.0)  # nothing is filtered


def record_words(listed: int, pieces: int) -> int:
    """How many words a row has in the scratch."""
    return int(PARTS.value) + int(PART_WORDS.value) * pieces + 2 * listed


@triton.jit
def record_of(scratch, index, LIST: tl.constexpr, PIECES: tl.constexpr):
    """A row's record, and in it the list's logits and ids."""
    record = scratch + index * (PARTS + PART_WORDS * PIECES + 2 * LIST)
    values = record + (PARTS + PART_WORDS * PIECES)
    return record, values, (values + LIST).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def plan_kernel(
    logits, stride, vocab, temperature, top_k, top_p, min_p, columns, rows, scratch,
    FUSED: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, SAMPLE: tl.constexpr,
    LIST: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A program per row. FUSED: parameters by row id, else by index."""
    index = tl.program_id(0).to(tl.int64)
    record, _, _ = record_of(scratch, index, LIST, PIECES)
    row = logits + index * stride
    row_id = index
    if FUSED:
        row_id = tl.load(rows + index).to(tl.int64)
    kind = index.to(tl.float32) * 0.0  # SKIPPED
    if row_id >= 0:
        if FUSED:
            words = columns + row_id * _WORDS
            heat = tl.load(words + _TEMPERATURE).to(tl.float32, bitcast=True)
            k = tl.load(words + _TOP_K)
            p = tl.load(words + _TOP_P).to(tl.float32, bitcast=True)
            least = tl.load(words + _MIN_P).to(tl.float32, bitcast=True)
        else:
            heat = tl.load(temperature + index)
            k = tl.load(top_k + index)
            p = tl.load(top_p + index)
            least = tl.load(min_p + index)
        kind = heat * 0.0 + CHOSEN
        if heat >= _GREEDY:
            scale = LOG2E / heat
            floor = heat * 0.0 + LOWEST
            sample = load_sample(row, vocab, SAMPLE)
            reference = tl.maximum(tl.max(sample, axis=0), LOWEST)
            if least > 0:
                reference = tl.maximum(peak_pass(row, vocab, TILE, STAGES), LOWEST)
                floor = tl.maximum(reference + tl.log2(least) / scale, LOWEST)
            by_count = (k > 0) & (k < vocab)
            kind = tl.where(by_count | (p < 1.0), FILTERED, DRAWN)
            most = tl.where(by_count, k, 0).to(tl.float32)
            if by_count | (p < 1.0):
                thresholds = guess(
                    sample, vocab, reference, scale, floor, by_count, most, p, SAMPLE, LIST
                )  # fmt: skip
                tl.store(record + THRESHOLDS + tl.arange(0, 4), thresholds)
            tl.store(record + REFERENCE, reference)
            tl.store(record + FLOOR, floor)
            tl.store(record + SCALE, scale)
            tl.store(record + TOP_K, most)
            tl.store(record + TOP_P, p)
    tl.store(record + KIND, kind)


@triton.jit
def weigh_kernel(
    logits, stride, vocab, scratch,
    PIECE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, LIST: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A program per row and piece."""
    index, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record, _, _ = record_of(scratch, index, LIST, PIECES)
    part = record + PARTS + piece * PART_WORDS
    first = piece * PIECE
    row = logits + index * stride + first
    count = tl.minimum(vocab - first, PIECE)
    kind = tl.load(record + KIND)
    if kind == CHOSEN:
        peak, best, broken = best_pass(row, count, TILE, STAGES)
        tl.store(part + PEAK, peak)
        tl.store(part + BEST, (first + best).to(tl.float32))
        tl.store(part + BROKEN, broken.to(tl.float32))
    if kind >= DRAWN:
        reference, scale, floor = (
            tl.load(record + REFERENCE),
            tl.load(record + SCALE),
            tl.load(record + FLOOR),
        )
        peak, mass, number = reference, reference, reference
        if kind == DRAWN:
            peak, mass, number = weigh_pass(row, count, reference, scale, floor, TILE, STAGES)
        else:
            t0, t1 = tl.load(record + THRESHOLDS), tl.load(record + THRESHOLDS + 1)
            t2, t3 = tl.load(record + THRESHOLDS + 2), tl.load(record + THRESHOLDS + 3)
            peak, mass, number, sums = measure_pass(
                row, count, reference, scale, floor, t0, t1, t2, t3, TILE, STAGES
            )
            tl.store(part + SUMS + sum_places(), sums)
        tl.store(part + PEAK, peak)
        tl.store(part + MASS, mass)
        tl.store(part + NUMBER, number)


@triton.jit
def collect_kernel(
    logits, stride, vocab, scratch,
    PIECE: tl.constexpr, TILE: tl.constexpr, LIST: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """A program per row and piece. All of a row decide alike; the first writes it down."""
    index, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record, values, ids = record_of(scratch, index, LIST, PIECES)
    kind = tl.load(record + KIND)
    if kind >= DRAWN:
        pieces = tl.arange(0, PIECES)
        is_piece = pieces < tl.num_programs(1)
        parts = record + PARTS + pieces * PART_WORDS
        peak = tl.max(tl.load(parts + PEAK, mask=is_piece, other=-INFINITY), axis=0)
        base = tl.load(parts + MASS, mask=is_piece, other=0.0)
        numbers = tl.load(parts + NUMBER, mask=is_piece, other=0.0)
        mass, number = tl.sum(base, axis=0), tl.sum(numbers, axis=0)
        reference, scale, floor = (
            tl.load(record + REFERENCE),
            tl.load(record + SCALE),
            tl.load(record + FLOOR),
        )
        overflows = ((peak - reference) * scale > HEADROOM) | (mass == INFINITY)
        is_usable = (peak > -INFINITY) & (peak < INFINITY) & (mass == mass)
        status = tl.where(is_usable, tl.where(overflows, OVERFLOWED, WHOLE), UNUSABLE)
        if (status == WHOLE) & (kind == FILTERED):
            top_k, top_p = tl.load(record + TOP_K), tl.load(record + TOP_P)
            low, low_mass, low_number, high, high_mass, high_number, by_count, goal = begin(
                peak, mass, number, floor, top_k, top_p
            )
            for i in tl.static_range(4):
                t = tl.load(record + THRESHOLDS + i)
                t_mass = tl.sum(tl.load(parts + SUMS + i, mask=is_piece, other=0.0), axis=0)
                t_number = tl.sum(tl.load(parts + SUMS + 4 + i, mask=is_piece, other=0.0), axis=0)
                low, low_mass, low_number, high, high_mass, high_number = tighten(
                    low, low_mass, low_number, high, high_mass, high_number, t, t_mass, t_number, by_count, goal
                )  # fmt: skip
            is_listed = low_number <= LIST
            fits = is_listed | (low_number - high_number <= LIST)
            if by_count | (top_p < 1.0):
                status = tl.where(fits, COLLECTED, OPEN)
                above = tl.zeros([PIECES], tl.float32)
                base = tl.zeros([PIECES], tl.float32)
                for i in tl.static_range(4):
                    t = tl.load(record + THRESHOLDS + i)
                    t_numbers = tl.load(parts + SUMS + 4 + i, mask=is_piece, other=0.0)
                    is_high = (t == high) & (is_listed == 0)
                    numbers = tl.where(t == low, t_numbers, numbers)
                    above = tl.where(is_high, t_numbers, above)
                    base = tl.where(is_high, tl.load(parts + SUMS + i, mask=is_piece, other=0.0), base)
                numbers -= above
                before = tl.sum(tl.where(pieces < piece, numbers, 0.0), axis=0).to(tl.int32)
                if fits & (tl.sum(tl.where(pieces == piece, numbers, 0.0), axis=0) > 0):
                    first = piece * PIECE
                    end = tl.where(is_listed, INFINITY, high)
                    row = logits + index * stride + first
                    count = tl.minimum(vocab - first, PIECE)
                    collect_pass(row, count, first, low, end, values, ids, before, TILE, LIST)
            if piece == 0:
                tl.store(record + LOW, low)
                tl.store(record + LOW_MASS, low_mass)
                tl.store(record + LOW_NUMBER, low_number)
                tl.store(record + HIGH, high)
                tl.store(record + HIGH_MASS, high_mass)
                tl.store(record + HIGH_NUMBER, high_number)
                tl.store(record + GOAL, goal)
                tl.store(record + BY_COUNT, by_count.to(tl.float32))
        tl.store(
            record + PARTS + piece * PART_WORDS + BASE, tl.sum(tl.where(pieces == piece, base, 0.0), axis=0)
        )
        if piece == 0:
            tl.store(record + STATUS, status)
            tl.store(record + ROW_PEAK, peak)
            tl.store(record + ROW_MASS, mass)

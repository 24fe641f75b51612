"""The survey of a step's rows before tokens are sampled, in three launches: plan, weigh, collect.

`plan_kernel` reads each row's parameters and guesses thresholds from a sample of its logits. `weigh_kernel` weighs
them, a program per piece of a row, so that one row keeps many multiprocessors busy. `collect_kernel` sums the pieces,
brackets the filter's threshold and lists the tokens inside the bracket. What one launch writes only later ones read.

A bracket is an interval [low, high) that narrows. Its ends carry the weight and number of the tokens at or above them;
`low` reaches the goal, `high` does not. Pieces have one size, so a row's sums do not depend on the batch.
"""

import triton
import triton.language as tl

from quire.kernels.sample.columns import WORDS, Word
from quire.kernels.sample.reference import GREEDY
from quire.kernels.sample.triton_passes import (
    INFINITY,
    LOWEST,
    best_pass,
    collect_pass,
    from_key,
    measure_pass,
    order_key,
    peak_pass,
    sum_places,
    weigh_pass,
)

_GREEDY = tl.constexpr(GREEDY)
_WORDS = tl.constexpr(WORDS)
_TEMPERATURE, _TOP_K = tl.constexpr(int(Word.TEMPERATURE)), tl.constexpr(int(Word.TOP_K))
_TOP_P, _MIN_P = tl.constexpr(int(Word.TOP_P)), tl.constexpr(int(Word.MIN_P))
LOG2E = tl.constexpr(1.4426950408889634)
HEADROOM = tl.constexpr(60.0)  # log2 by which weights may exceed one before the row is measured again

# A row's record in the scratch, in fp32 words: the plan, the decision, a part per piece, then the list.
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
SKIPPED, GREEDY_ROW = tl.constexpr(0.0), tl.constexpr(1.0)  # padding; the largest logit is taken
SAMPLED, FILTERED = (
    tl.constexpr(2.0),
    tl.constexpr(3.0),
)  # from all tokens but for min-p; by top-k or top-p as well

# STATUS
UNUSABLE, OVERFLOWED = tl.constexpr(0.0), tl.constexpr(1.0)  # cannot be sampled; the sample missed by far
OPEN, COLLECTED = tl.constexpr(2.0), tl.constexpr(3.0)  # the interval holds too many; it is listed
WHOLE = tl.constexpr(4.0)  # nothing is filtered

SEARCHED = tl.constexpr(64.0)  # range below the largest weight, in log2, that a sample is searched in
SEARCH_STEPS = tl.constexpr(12)


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
def load_sample(row, vocab, SAMPLE: tl.constexpr):
    """A sample of the row's logits, in groups of 32; -inf past its end."""
    index = tl.arange(0, SAMPLE)
    spread = (index // 32) * (vocab // (SAMPLE // 32)) + index % 32
    offsets = tl.where(vocab >= SAMPLE, spread, index)
    return tl.load(row + offsets, mask=offsets < vocab, other=-INFINITY).to(tl.float32)


@triton.jit
def guess(
    x, vocab, reference, scale, floor, by_count, top_k, top_p, SAMPLE: tl.constexpr, LIST: tl.constexpr
):
    """Four thresholds, [4]: the first with about half a list of tokens above it, three around the goal."""
    share = tl.minimum(vocab, SAMPLE).to(tl.float32) / vocab
    x = tl.where(x >= floor, x, -INFINITY)
    weight = tl.exp2((x - reference) * scale)
    is_allowed = (x > -INFINITY).to(tl.float32)
    amount = tl.where(by_count, is_allowed, weight)
    total = tl.sum(weight, axis=0)
    squares = tl.sum(weight * weight, axis=0)
    goal = tl.where(by_count, top_k * share, top_p * total)
    deviation = tl.where(by_count, tl.sqrt(goal) + 1.0, tl.sqrt(top_p * (1.0 - top_p) * squares))
    index = tl.arange(0, 4)
    goals = tl.where(index == 0, (LIST // 2) * share, goal + (index - 2).to(tl.float32) * (2.5 * deviation))
    amounts = tl.where(index[:, None] == 0, is_allowed[None, :], amount[None, :])
    low = tl.zeros([4], tl.float32) + tl.maximum(floor, reference - SEARCHED / scale)
    high = tl.zeros([4], tl.float32) + reference
    for _ in range(SEARCH_STEPS):
        middle = 0.5 * (low + high)
        reached = tl.sum(tl.where(x[None, :] >= middle[:, None], amounts, 0.0), axis=1) >= goals
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def begin(peak, mass, number, floor, top_k, top_p):
    """The first bracket, over all tokens that are not banned: both ends with weight and number, by_count, goal."""
    by_count = (top_k > 0) & (top_k < number)
    goal = tl.where(by_count, top_k, tl.maximum(top_p * mass, 1e-37))
    high = from_key(order_key(peak) + 1)
    return floor, mass, number, high, mass * 0.0, number * 0.0, by_count, goal


@triton.jit
def tighten(low, low_mass, low_number, high, high_mass, high_number, t, mass, number, by_count, goal):
    """Moves one end of [low, high) to the threshold t, if that lies inside."""
    reached = tl.where(by_count, number, mass) >= goal
    is_inside = (t > low) & (t < high)
    raises = reached & is_inside
    lowers = (reached == 0) & is_inside
    return (
        tl.where(raises, t, low), tl.where(raises, mass, low_mass), tl.where(raises, number, low_number),
        tl.where(lowers, t, high), tl.where(lowers, mass, high_mass), tl.where(lowers, number, high_number),
    )  # fmt: skip


@triton.jit
def between(low, low_mass, low_number, high, high_mass, high_number, by_count, goal):
    """Four thresholds in [low, high]: the middle integer for safety, and three where a straight line points."""
    low_key = order_key(low)
    middle = from_key(low_key + ((order_key(high) - low_key) >> 1))
    most = tl.where(by_count, low_number, low_mass)
    least = tl.where(by_count, high_number, high_mass)
    part = tl.minimum(tl.maximum((most - goal) / tl.maximum(most - least, 1e-37), 0.0), 1.0)
    width = high - low
    point = low + width * part
    return middle, point - 0.04 * width, point, point + 0.04 * width


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
        kind = heat * 0.0 + GREEDY_ROW
        if heat >= _GREEDY:
            scale = LOG2E / heat
            floor = heat * 0.0 + LOWEST
            sample = load_sample(row, vocab, SAMPLE)
            reference = tl.maximum(tl.max(sample, axis=0), LOWEST)
            if least > 0:
                reference = tl.maximum(peak_pass(row, vocab, TILE, STAGES), LOWEST)
                floor = tl.maximum(reference + tl.log2(least) / scale, LOWEST)
            by_count = (k > 0) & (k < vocab)
            kind = tl.where(by_count | (p < 1.0), FILTERED, SAMPLED)
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
    if kind == GREEDY_ROW:
        peak, best, broken = best_pass(row, count, TILE, STAGES)
        tl.store(part + PEAK, peak)
        tl.store(part + BEST, (first + best).to(tl.float32))
        tl.store(part + BROKEN, broken.to(tl.float32))
    if kind >= SAMPLED:
        reference, scale, floor = (
            tl.load(record + REFERENCE),
            tl.load(record + SCALE),
            tl.load(record + FLOOR),
        )
        peak, mass, number = reference, reference, reference
        if kind == SAMPLED:
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
    """A program per row and piece. All programs of a row decide alike; the first stores the decision."""
    index, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record, values, ids = record_of(scratch, index, LIST, PIECES)
    kind = tl.load(record + KIND)
    if kind >= SAMPLED:
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

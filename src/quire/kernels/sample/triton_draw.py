"""One row's token by its own temperature and filters, without a sort.

Usually the survey has listed the tokens among which the threshold lies: the list is searched to the last bit, and the
draw is from the list, or, where the kept tokens are too many for it, from the piece of the row in which it falls.
Else this narrows the interval itself, a pass at a time, until the list holds it.
"""

import triton
import triton.language as tl

from quire.kernels.sample.triton_bracket import begin, between, tighten
from quire.kernels.sample.triton_list import draw_from_list, find_piece, level_room, search_list
from quire.kernels.sample.triton_passes import (
    INFINITY,
    collect_pass,
    draw_from_row,
    from_key,
    measure_pass,
    order_key,
    sum_at,
    weigh_pass,
)
from quire.kernels.sample.triton_survey import (
    BASE,
    BEST,
    BROKEN,
    BY_COUNT,
    COLLECTED,
    FLOOR,
    GOAL,
    HIGH,
    HIGH_MASS,
    HIGH_NUMBER,
    LOW,
    LOW_MASS,
    LOW_NUMBER,
    OVERFLOWED,
    PART_WORDS,
    PARTS,
    PEAK,
    REFERENCE,
    ROW_MASS,
    ROW_PEAK,
    SCALE,
    STATUS,
    TOP_K,
    TOP_P,
    WHOLE,
)

MOST_PASSES = tl.constexpr(40)  # a pass halves the integers between two thresholds at least: 32 would do


@triton.jit
def best_token(record, num_pieces, PIECES: tl.constexpr):
    """The id of the largest logit, the lowest of equals; -1 where logits are not finite or every token is banned."""
    pieces = tl.arange(0, PIECES)
    is_piece = pieces < num_pieces
    parts = record + PARTS + pieces * PART_WORDS
    peaks = tl.load(parts + PEAK, mask=is_piece, other=-INFINITY)
    peak = tl.max(peaks, axis=0)
    best = tl.load(parts + BEST, mask=is_piece & (peaks == peak), other=INFINITY)
    broken = tl.sum(tl.load(parts + BROKEN, mask=is_piece, other=0.0), axis=0)
    is_usable = (peak > -INFINITY) & (peak < INFINITY) & (broken == 0)
    return tl.where(is_usable, tl.min(best, axis=0), -1.0).to(tl.int32)


@triton.jit
def _narrow(
    row, vocab, reference, scale, floor, low, low_mass, low_number, high, high_mass, high_number, by_count, goal,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The interval after a pass over the row."""
    t0, t1, t2, t3 = between(low, low_mass, low_number, high, high_mass, high_number, by_count, goal)
    _, _, _, sums = measure_pass(row, vocab, reference, scale, floor, t0, t1, t2, t3, TILE, STAGES)
    low, low_mass, low_number, high, high_mass, high_number = tighten(
        low, low_mass, low_number, high, high_mass, high_number,
        t0, sum_at(sums, 0), sum_at(sums, 4), by_count, goal,
    )  # fmt: skip
    low, low_mass, low_number, high, high_mass, high_number = tighten(
        low, low_mass, low_number, high, high_mass, high_number,
        t1, sum_at(sums, 1), sum_at(sums, 5), by_count, goal,
    )  # fmt: skip
    low, low_mass, low_number, high, high_mass, high_number = tighten(
        low, low_mass, low_number, high, high_mass, high_number,
        t2, sum_at(sums, 2), sum_at(sums, 6), by_count, goal,
    )  # fmt: skip
    return tighten(
        low, low_mass, low_number, high, high_mass, high_number,
        t3, sum_at(sums, 3), sum_at(sums, 7), by_count, goal,
    )  # fmt: skip


@triton.jit
def _settle(
    values, listed, is_ready, is_listed, reference, scale, low, high, low_number, high_mass, high_number,
    top, by_count, goal, top_p, LIST: tl.constexpr,
):  # fmt: skip
    """(threshold, room, kept weight, number at or above, whether top-p is still to be done). `top` is above all."""
    is_open = by_count & (top_p < 1.0)
    # where there is no list, one value, or as good as one, is left: its tokens are too many for it
    level = low_number - high_number
    level_weight = tl.exp2((low - reference) * scale)
    threshold = low + 0.0
    room = level_room(by_count, goal, high_mass, high_number, level, level_weight)
    kept_mass = high_mass + room.to(tl.float32) * level_weight
    if is_ready:
        above_mass = tl.where(is_listed, 0.0, high_mass)
        above_number = tl.where(is_listed, 0.0, high_number)
        threshold, room, kept_mass, low_number = search_list(
            values, listed, reference, scale, low, high, by_count, goal, above_mass, above_number, LIST
        )
        if is_listed & is_open:
            goal = tl.maximum(top_p * kept_mass, 1e-37)
            nothing = goal * 0.0
            threshold, room, kept_mass, low_number = search_list(
                values, listed, reference, scale, threshold, top, nothing != 0, goal, nothing, nothing, LIST
            )
    return threshold, room, kept_mass, low_number, is_open & ((is_ready & is_listed) == 0)


@triton.jit
def draw_token(
    row, vocab, num_pieces, record, values, ids, uniform,
    PIECE: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, LIST: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """A token id, for a row that can be sampled."""
    status, peak = tl.load(record + STATUS), tl.load(record + ROW_PEAK)
    floor, scale = tl.load(record + FLOOR), tl.load(record + SCALE)
    top_k, top_p = tl.load(record + TOP_K), tl.load(record + TOP_P)
    reference = tl.where(status == OVERFLOWED, peak, tl.load(record + REFERENCE))
    kept_mass, low, high = tl.load(record + ROW_MASS), tl.load(record + LOW), tl.load(record + HIGH)
    low_mass, low_number = tl.load(record + LOW_MASS), tl.load(record + LOW_NUMBER)
    high_mass, high_number = tl.load(record + HIGH_MASS), tl.load(record + HIGH_NUMBER)
    goal, by_count = tl.load(record + GOAL), tl.load(record + BY_COUNT) != 0
    is_open = status != WHOLE
    if status == OVERFLOWED:
        _, kept_mass, number = weigh_pass(row, vocab, reference, scale, floor, TILE, STAGES)
        low, low_mass, low_number, high, high_mass, high_number, by_count, goal = begin(
            peak, kept_mass, number, floor, top_k, top_p
        )
        is_open = by_count | (top_p < 1.0)
    threshold, room = floor + 0.0, vocab + 0
    is_ready = status == COLLECTED  # the list holds [low, high), or all from low on
    is_known = (status == COLLECTED) | (status == WHOLE)  # the pieces' bases complete the list
    is_listed = (status == COLLECTED) & (low_number <= LIST)  # the list holds all kept tokens
    listed = tl.where(is_listed, low_number, low_number - high_number)
    listed = tl.where(is_ready, listed, 0.0).to(tl.int32)
    top = from_key(order_key(peak) + 1)
    passes = vocab * 0
    while is_open:
        if is_ready == 0:
            low, low_mass, low_number, high, high_mass, high_number = _narrow(
                row, vocab, reference, scale, floor, low, low_mass, low_number, high, high_mass, high_number,
                by_count, goal, TILE, STAGES,
            )  # fmt: skip
            passes += 1
            is_known = passes < 0
            is_listed = low_number <= LIST
            is_ready = is_listed | (low_number - high_number <= LIST)
            if is_ready:
                end = tl.where(is_listed, INFINITY, high)
                listed = collect_pass(row, vocab, 0, low, end, values, ids, vocab * 0, TILE, LIST)
        if is_ready | (order_key(high) - order_key(low) <= 1) | (passes >= MOST_PASSES):
            threshold, room, kept_mass, low_number, is_open = _settle(
                values, listed, is_ready, is_listed, reference, scale, low, high, low_number, high_mass,
                high_number, top, by_count, goal, top_p, LIST,
            )  # fmt: skip
            # if still open: top-k's threshold is found, top-p's lies at it or above
            low, low_mass = threshold + 0.0, kept_mass + 0.0
            high, high_mass, high_number = top + 0.0, high_mass * 0.0, high_number * 0.0
            goal = tl.maximum(top_p * kept_mass, 1e-37)
            by_count = passes < 0
            is_ready = passes < 0
    if is_listed:
        token = draw_from_list(values, ids, listed, reference, scale, threshold, room, uniform, LIST)
    else:
        start, running, passed = vocab * 0, uniform * 0.0, vocab * 0
        goal_mass = uniform * kept_mass.to(tl.float64)
        if is_known:
            start, running, passed, goal_mass = find_piece(
                record + PARTS + BASE, num_pieces, values, ids, listed, reference, scale, threshold, room,
                uniform, PART_WORDS, PIECE, PIECES, LIST,
            )  # fmt: skip
        token = draw_from_row(
            row, vocab, start, running, passed, reference, scale, threshold, room, goal_mass, WIDE, NARROW
        )
    return token

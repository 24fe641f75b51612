"""Samples one row's token by its own temperature and filters, without a sort.

Usually the survey has listed the tokens of the threshold's bracket, up to LIST logits and ids by rising id: the list is
searched for the exact threshold, and the token is sampled from the list, or, where it does not hold all kept tokens,
from the piece of the row that the random number falls into. Otherwise passes over the row narrow the bracket until the
list holds it.
"""

import triton
import triton.language as tl

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
    begin,
    between,
    tighten,
)

MOST_PASSES = tl.constexpr(40)  # each pass at least halves the fp32 values in the bracket: 32 suffice


@triton.jit
def load_values(values, listed, LIST: tl.constexpr):
    """The listed logits, -inf after the last."""
    slots = tl.arange(0, LIST)
    return tl.load(values + slots, mask=slots < listed, other=-INFINITY)


@triton.jit
def search_list(
    values,
    listed,
    reference,
    scale,
    low,
    high,
    by_count,
    goal,
    mass_before,
    number_before,
    LIST: tl.constexpr,
):
    """The threshold in [low, high) at which the list, with the tokens above it, reaches `goal`.

    Returns (threshold; how many tokens equal to it are kept, lowest id first; the kept weight; the number at or above
    it). `goal` is a number of tokens or a weight; `low` counts as reaching it.
    """
    x = load_values(values, listed, LIST)
    weight = tl.exp2((x - reference) * scale)
    amount = tl.where(by_count, 1.0, weight)
    before = tl.where(by_count, number_before, mass_before)
    low_key = order_key(low)
    high_key = order_key(high)
    while high_key - low_key > 1:
        middle = low_key + ((high_key - low_key) >> 1)
        reached = before + tl.sum(tl.where(x >= from_key(middle), amount, 0.0), axis=0) >= goal
        low_key = tl.where(reached, middle, low_key)
        high_key = tl.where(reached, high_key, middle)
    threshold = from_key(low_key)
    mass = mass_before + tl.sum(tl.where(x > threshold, weight, 0.0), axis=0)
    number = number_before + tl.sum((x > threshold).to(tl.float32), axis=0)
    level = tl.sum((x == threshold).to(tl.float32), axis=0)
    level_weight = tl.exp2((threshold - reference) * scale)
    room = level_room(by_count, goal, mass, number, level, level_weight)
    return threshold, room, mass + room.to(tl.float32) * level_weight, number + level


@triton.jit
def level_room(by_count, goal, mass, number, level, level_weight):
    """How many of `level` equal tokens are kept when `mass` and `number` are above them."""
    missing = tl.where(by_count, goal - number, (goal - mass) / tl.maximum(level_weight, 1e-37))
    return tl.minimum(tl.maximum(tl.ceil(missing), 1.0), level).to(tl.int32)


@triton.jit
def _kept_weights(values, ids, listed, reference, scale, threshold, room, LIST: tl.constexpr):
    """(fp64 weights, 0 where not kept; ids; whether equal to the threshold) of the list."""
    x = load_values(values, listed, LIST)
    slots = tl.arange(0, LIST)
    token = tl.load(ids + slots, mask=slots < listed, other=0x7FFFFFFF)
    level = x == threshold
    kept = (x > threshold) | (level & (tl.cumsum(level.to(tl.int32), axis=0) <= room))
    return tl.where(kept, tl.exp2((x - reference) * scale), 0.0).to(tl.float64), token, level


@triton.jit
def draw_from_list(values, ids, listed, reference, scale, threshold, room, uniform, LIST: tl.constexpr):
    """The id at which the kept weights of the list, summed by rising id, exceed uniform times their sum."""
    weight, token, _ = _kept_weights(values, ids, listed, reference, scale, threshold, room, LIST)
    goal = uniform * tl.sum(weight, axis=0)
    hit = (weight > 0) & (tl.cumsum(weight, axis=0) > goal)
    first = tl.min(tl.where(hit, token, 0x7FFFFFFF), axis=0)
    last = tl.max(tl.where(weight > 0, token, -1), axis=0)
    return tl.where(first < 0x7FFFFFFF, first, last)


@triton.jit
def find_piece(
    bases, num_pieces, values, ids, listed, reference, scale, threshold, room, uniform,
    STRIDE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """The piece of the row that the random number falls into, from the pieces' base weights and the list.

    Returns (its first id; the kept weight before it; tokens equal to the threshold before it; the goal: uniform times
    all weight). The piece has kept tokens itself.
    """
    pieces = tl.arange(0, PIECES)
    base = tl.load(bases + pieces * STRIDE, mask=pieces < num_pieces, other=0.0).to(tl.float64)
    weight, token, level = _kept_weights(values, ids, listed, reference, scale, threshold, room, LIST)
    total = tl.sum(base, axis=0) + tl.sum(weight, axis=0)
    goal = uniform * total
    low = num_pieces * 0
    high = num_pieces + 0
    running = goal * 0.0
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        listed_before = tl.sum(tl.where(token < middle * PIECE, weight, 0.0), axis=0)
        before = tl.sum(tl.where(pieces < middle, base, 0.0), axis=0) + listed_before
        is_before = (before <= goal) & (before < total)
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
        running = tl.where(is_before, before, running)
    first = low * PIECE
    passed = tl.sum((level & (token < first)).to(tl.int32), axis=0)
    return first, running, passed, goal


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

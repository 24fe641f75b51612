"""Passes over one row of logits, and over a short list taken from one. What `triton_draw.py` is made of.

Weights are 2 ** ((x - reference) * scale), with scale = log2(e) / temperature. Thresholds are logits: a threshold t
stands for the tokens with x >= t. Minus infinity is a ban and never at or above a threshold. Sums are taken lane by
lane and then in a fixed order, so a row's result depends on nothing but the row.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def order_key(x):
    """fp32 as an integer (in int64) of the same order: neighbours differ by one."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def from_key(key):
    """The inverse of `order_key`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _vectors(row, TILE: tl.constexpr):
    """[lanes, elements in 16 bytes]: a thread sums its own elements before it meets the others."""
    VECTOR: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    return tl.arange(0, TILE // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]


@triton.jit
def best_pass(row, vocab, TILE: tl.constexpr, STAGES: tl.constexpr):
    """(the largest logit, its lowest id, whether there is a NaN). Without any logit above -inf the id is 0."""
    LANES: tl.constexpr = TILE // (128 // row.dtype.element_ty.primitive_bitwidth)
    offsets = _vectors(row, TILE)
    best = tl.full([LANES], -INFINITY, tl.float32)
    best_start = tl.zeros([LANES], tl.int32)
    broken = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        x = tl.load(row + start + offsets, mask=start + offsets < vocab, other=-INFINITY).to(tl.float32)
        lane_best = tl.max(x, axis=1)
        best_start = tl.where(lane_best > best, start, best_start)
        best = tl.maximum(best, lane_best)
        broken += tl.sum((x != x).to(tl.int32), axis=1)
    peak = tl.max(best, axis=0)
    # each lane looks once more where it found its best: that gives the id
    places = best_start[:, None] + offsets
    x = tl.load(row + places, mask=(places < vocab) & (best == peak)[:, None], other=-INFINITY).to(tl.float32)
    token = tl.min(tl.min(tl.where(x == peak, places, vocab), axis=1), axis=0)
    return peak, tl.where(peak > -INFINITY, token, 0), tl.sum(broken, axis=0)


@triton.jit
def peak_pass(row, vocab, TILE: tl.constexpr, STAGES: tl.constexpr):
    """The largest logit; a NaN is passed over."""
    LANES: tl.constexpr = TILE // (128 // row.dtype.element_ty.primitive_bitwidth)
    offsets = _vectors(row, TILE)
    best = tl.full([LANES], -INFINITY, tl.float32)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        x = tl.load(row + start + offsets, mask=start + offsets < vocab, other=-INFINITY).to(tl.float32)
        best = tl.maximum(best, tl.max(x, axis=1))
    return tl.max(best, axis=0)


@triton.jit
def measure_pass(
    row, vocab, reference, scale, floor, t0, t1, t2, t3, TILE: tl.constexpr, STAGES: tl.constexpr
):
    """The peak, weight and number of the tokens at or above `floor`, and of those also at or above each threshold.

    The whole weight is NaN if any logit is, so that no other pass need look for it.
    """
    LANES: tl.constexpr = TILE // (128 // row.dtype.element_ty.primitive_bitwidth)
    offsets = _vectors(row, TILE)
    peak = tl.full([LANES], -INFINITY, tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    mass0 = tl.zeros([LANES], tl.float32)
    mass1 = tl.zeros([LANES], tl.float32)
    mass2 = tl.zeros([LANES], tl.float32)
    mass3 = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.int32)
    number0 = tl.zeros([LANES], tl.int32)
    number1 = tl.zeros([LANES], tl.int32)
    number2 = tl.zeros([LANES], tl.int32)
    number3 = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        x = tl.load(row + start + offsets, mask=start + offsets < vocab, other=-INFINITY).to(tl.float32)
        weight = tl.where(x < floor, 0.0, tl.exp2((x - reference) * scale))
        peak = tl.maximum(peak, tl.max(x, axis=1))
        mass += tl.sum(weight, axis=1)
        mass0 += tl.sum(tl.where(x >= t0, weight, 0.0), axis=1)
        mass1 += tl.sum(tl.where(x >= t1, weight, 0.0), axis=1)
        mass2 += tl.sum(tl.where(x >= t2, weight, 0.0), axis=1)
        mass3 += tl.sum(tl.where(x >= t3, weight, 0.0), axis=1)
        number += tl.sum((x >= floor).to(tl.int32), axis=1)
        number0 += tl.sum((x >= t0).to(tl.int32), axis=1)
        number1 += tl.sum((x >= t1).to(tl.int32), axis=1)
        number2 += tl.sum((x >= t2).to(tl.int32), axis=1)
        number3 += tl.sum((x >= t3).to(tl.int32), axis=1)
    return (
        tl.max(peak, axis=0), tl.sum(mass, axis=0), tl.sum(number, axis=0),
        tl.sum(mass0, axis=0), tl.sum(mass1, axis=0), tl.sum(mass2, axis=0), tl.sum(mass3, axis=0),
        tl.sum(number0, axis=0), tl.sum(number1, axis=0), tl.sum(number2, axis=0), tl.sum(number3, axis=0),
    )  # fmt: skip


@triton.jit
def collect_pass(row, vocab, low, high, values, ids, TILE: tl.constexpr, LIST: tl.constexpr):
    """Writes the logits in [low, high) and their ids to a list, by rising id, -inf after the last."""
    lanes = tl.arange(0, TILE)
    filled = vocab * 0
    for start in tl.range(0, vocab, TILE, num_stages=2):
        x = tl.load(row + start + lanes, mask=start + lanes < vocab, other=-INFINITY).to(tl.float32)
        wanted = (x >= low) & (x < high)
        places = tl.cumsum(wanted.to(tl.int32), axis=0) + (filled - 1)
        tl.store(values + places, x, mask=wanted & (places < LIST))
        tl.store(ids + places, start + lanes, mask=wanted & (places < LIST))
        filled += tl.sum(wanted.to(tl.int32), axis=0)
    slots = tl.arange(0, LIST)
    tl.store(values + slots, tl.full([LIST], -INFINITY, tl.float32), mask=slots >= filled)
    tl.debug_barrier()  # other threads read what these wrote


@triton.jit
def search_list(
    values, reference, scale, low, high, by_count, goal, mass_before, number_before, LIST: tl.constexpr
):
    """The threshold in [low, high) at which the list, with what lies above it, reaches `goal`.

    (threshold; how many of its equals are kept, lowest id first; the kept weight; the number at or above it). `goal`
    is a number of tokens or a weight; `low` counts as reaching it.
    """
    x = tl.load(values + tl.arange(0, LIST))
    weight = tl.exp2((x - reference) * scale)
    amount = tl.where(by_count, 1.0, weight)
    before = tl.where(by_count, number_before.to(tl.float32), mass_before)
    low_key = order_key(low)
    high_key = order_key(high)
    while high_key - low_key > 1:
        middle = low_key + ((high_key - low_key) >> 1)
        reached = before + tl.sum(tl.where(x >= from_key(middle), amount, 0.0), axis=0) >= goal
        low_key = tl.where(reached, middle, low_key)
        high_key = tl.where(reached, high_key, middle)
    threshold = from_key(low_key)
    mass = mass_before + tl.sum(tl.where(x > threshold, weight, 0.0), axis=0)
    number = number_before + tl.sum((x > threshold).to(tl.int32), axis=0)
    level = tl.sum((x == threshold).to(tl.int32), axis=0)
    level_weight = tl.exp2((threshold - reference) * scale)
    room = level_room(by_count, goal, mass, number, level, level_weight)
    return threshold, room, mass + room.to(tl.float32) * level_weight, number + level


@triton.jit
def level_room(by_count, goal, mass, number, level, level_weight):
    """How many of `level` equal tokens are kept when `mass` and `number` are above them."""
    missing = tl.where(
        by_count, goal - number.to(tl.float32), (goal - mass) / tl.maximum(level_weight, 1e-37)
    )
    most = level.to(tl.float32)
    return tl.minimum(tl.maximum(tl.ceil(missing), 1.0), most).to(tl.int32)


@triton.jit
def draw_from_list(values, ids, reference, scale, threshold, room, uniform, LIST: tl.constexpr):
    """The id at which the kept weights of the list, summed by rising id, exceed uniform times their sum."""
    slots = tl.arange(0, LIST)
    x = tl.load(values + slots)
    token = tl.load(ids + slots, mask=x > -INFINITY, other=0)
    level = x == threshold
    kept = (x > threshold) | (level & (tl.cumsum(level.to(tl.int32), axis=0) <= room))
    weight = tl.where(kept, tl.exp2((x - reference) * scale), 0.0).to(tl.float64)
    goal = uniform * tl.sum(weight, axis=0)
    hit = (weight > 0) & (tl.cumsum(weight, axis=0) > goal)
    first = tl.min(tl.where(hit, token, 0x7FFFFFFF), axis=0)
    last = tl.max(tl.where(weight > 0, token, -1), axis=0)
    return tl.where(first < 0x7FFFFFFF, first, last)


@triton.jit
def draw_from_row(
    row, vocab, reference, scale, threshold, room, goal, WIDE: tl.constexpr, NARROW: tl.constexpr
):
    """As `draw_from_list`, of a whole row, for a goal in fp64. Stops where it is reached.

    Wide steps find the stretch; narrow ones inside it the token. When roundings keep the goal out of reach, the last
    stretch with a kept token gives its last one.
    """
    level_weight = tl.exp2((threshold - reference) * scale)
    lanes = tl.arange(0, WIDE)
    running = goal * 0.0
    start = vocab * 0
    passed = start  # equals of the threshold so far
    found_at, found_running, found_passed = start, running, start
    while start < vocab:
        x = tl.load(row + start + lanes, mask=start + lanes < vocab, other=-INFINITY).to(tl.float32)
        weight = tl.where(x > threshold, tl.exp2((x - reference) * scale), 0.0)
        level = tl.sum((x == threshold).to(tl.int32), axis=0)
        kept_level = tl.minimum(tl.maximum(room - passed, 0), level)
        mass = tl.sum(weight, axis=0) + kept_level.to(tl.float32) * level_weight
        if mass > 0:
            found_at, found_running, found_passed = start, running, passed
        running += mass.to(tl.float64)
        passed += level
        start = tl.where(running > goal, vocab, start + WIDE)
    offsets = tl.arange(0, NARROW)
    running = found_running
    passed = found_passed
    found = vocab * 0 - 1
    last = found
    start = found_at
    end = tl.minimum(found_at + WIDE, vocab)
    while start < end:
        x = tl.load(row + start + offsets, mask=start + offsets < end, other=-INFINITY).to(tl.float32)
        level = x == threshold
        kept = (x > threshold) | (level & (tl.cumsum(level.to(tl.int32), axis=0) + passed <= room))
        weight = tl.where(kept, tl.exp2((x - reference) * scale), 0.0).to(tl.float64)
        hit = (weight > 0) & (running + tl.cumsum(weight, axis=0) > goal)
        first = tl.min(tl.where(hit, start + offsets, 0x7FFFFFFF), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, start + offsets, -1), axis=0))
        found = tl.where(first < 0x7FFFFFFF, first, found)
        running += tl.sum(weight, axis=0)
        passed += tl.sum(level.to(tl.int32), axis=0)
        start = tl.where(found >= 0, end, start + NARROW)
    return tl.where(found >= 0, found, last)

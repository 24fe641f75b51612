"""Passes over one row of logits, or over a piece of one.

Weights are 2 ** ((x - reference) * scale), with scale = log2(e) / temperature. Thresholds are logits: a threshold t
stands for the tokens with x >= t. Minus infinity is a ban and never at or above a threshold. Sums are taken lane by
lane and then in a fixed order, so a row's result depends on nothing but the row. Numbers of tokens are fp32: exact
below 2 ** 24.

Triton carries a variable around a loop only if a trial run of the body gives it a new value; a copy of another variable
that began as the same value does not count: the variable then silently keeps its first value, and the interpreter does
not show it. So loops here select with `tl.where`, not with copies in an `if`.
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
def best_pass(row, count, TILE: tl.constexpr, STAGES: tl.constexpr):
    """(the largest logit, its lowest id, whether there is a NaN). Without any logit above -inf the id is 0."""
    LANES: tl.constexpr = TILE // (128 // row.dtype.element_ty.primitive_bitwidth)
    offsets = _vectors(row, TILE)
    best = tl.full([LANES], -INFINITY, tl.float32)
    best_start = tl.zeros([LANES], tl.int32)
    broken = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, count, TILE, num_stages=STAGES):
        x = tl.load(row + start + offsets, mask=start + offsets < count, other=-INFINITY).to(tl.float32)
        lane_best = tl.max(x, axis=1)
        best_start = tl.where(lane_best > best, start, best_start)
        best = tl.maximum(best, lane_best)
        broken += tl.sum((x != x).to(tl.int32), axis=1)
    peak = tl.max(best, axis=0)
    # each lane looks once more where it found its best: that gives the id
    places = best_start[:, None] + offsets
    x = tl.load(row + places, mask=(places < count) & (best == peak)[:, None], other=-INFINITY).to(tl.float32)
    token = tl.min(tl.min(tl.where(x == peak, places, count), axis=1), axis=0)
    return peak, tl.where(peak > -INFINITY, token, 0), tl.sum(broken, axis=0)


@triton.jit
def peak_pass(row, count, TILE: tl.constexpr, STAGES: tl.constexpr):
    """The largest logit; NaNs are ignored."""
    LANES: tl.constexpr = TILE // (128 // row.dtype.element_ty.primitive_bitwidth)
    offsets = _vectors(row, TILE)
    best = tl.full([LANES], -INFINITY, tl.float32)
    for start in tl.range(0, count, TILE, num_stages=STAGES):
        x = tl.load(row + start + offsets, mask=start + offsets < count, other=-INFINITY).to(tl.float32)
        best = tl.maximum(best, tl.max(x, axis=1))
    return tl.max(best, axis=0)


@triton.jit
def weigh_pass(row, count, reference, scale, floor, TILE: tl.constexpr, STAGES: tl.constexpr):
    """The peak, weight and number of the tokens at or above `floor`. The weight is NaN if any logit is."""
    LANES: tl.constexpr = TILE // (128 // row.dtype.element_ty.primitive_bitwidth)
    offsets = _vectors(row, TILE)
    peak = tl.full([LANES], -INFINITY, tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, count, TILE, num_stages=STAGES):
        x = tl.load(row + start + offsets, mask=start + offsets < count, other=-INFINITY).to(tl.float32)
        peak = tl.maximum(peak, tl.max(x, axis=1))
        mass += tl.sum(tl.where(x < floor, 0.0, tl.exp2((x - reference) * scale)), axis=1)
        number += tl.sum((x >= floor).to(tl.float32), axis=1)
    return tl.max(peak, axis=0), tl.sum(mass, axis=0), tl.sum(number, axis=0)


@triton.jit
def measure_pass(
    row, count, reference, scale, floor, t0, t1, t2, t3, TILE: tl.constexpr, STAGES: tl.constexpr
):
    """As `weigh_pass`, then the weight and number of the tokens at or above each threshold.

    Those come as [2, 2, 2]: weights before numbers, thresholds in the order 0, 2, 1, 3. They are summed at once:
    eight sums, one after the other, would take longer than the tokens of a piece.
    """
    LANES: tl.constexpr = TILE // (128 // row.dtype.element_ty.primitive_bitwidth)
    offsets = _vectors(row, TILE)
    peak = tl.full([LANES], -INFINITY, tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    mass0 = tl.zeros([LANES], tl.float32)
    mass1 = tl.zeros([LANES], tl.float32)
    mass2 = tl.zeros([LANES], tl.float32)
    mass3 = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.float32)
    number0 = tl.zeros([LANES], tl.float32)
    number1 = tl.zeros([LANES], tl.float32)
    number2 = tl.zeros([LANES], tl.float32)
    number3 = tl.zeros([LANES], tl.float32)
    for start in tl.range(0, count, TILE, num_stages=STAGES):
        x = tl.load(row + start + offsets, mask=start + offsets < count, other=-INFINITY).to(tl.float32)
        weight = tl.where(x < floor, 0.0, tl.exp2((x - reference) * scale))
        peak = tl.maximum(peak, tl.max(x, axis=1))
        mass += tl.sum(weight, axis=1)
        mass0 += tl.sum(tl.where(x >= t0, weight, 0.0), axis=1)
        mass1 += tl.sum(tl.where(x >= t1, weight, 0.0), axis=1)
        mass2 += tl.sum(tl.where(x >= t2, weight, 0.0), axis=1)
        mass3 += tl.sum(tl.where(x >= t3, weight, 0.0), axis=1)
        number += tl.sum((x >= floor).to(tl.float32), axis=1)
        number0 += tl.sum((x >= t0).to(tl.float32), axis=1)
        number1 += tl.sum((x >= t1).to(tl.float32), axis=1)
        number2 += tl.sum((x >= t2).to(tl.float32), axis=1)
        number3 += tl.sum((x >= t3).to(tl.float32), axis=1)
    first = tl.join(tl.join(mass0, number0), tl.join(mass1, number1))
    second = tl.join(tl.join(mass2, number2), tl.join(mass3, number3))
    sums = tl.sum(tl.join(first, second), axis=0)
    return tl.max(peak, axis=0), tl.sum(mass, axis=0), tl.sum(number, axis=0), sums


@triton.jit
def sum_places():
    """Where in a record of eight the sums of `measure_pass` belong: four weights, then four numbers."""
    kinds = tl.arange(0, 2)[:, None, None] * 4
    return kinds + tl.arange(0, 2)[None, :, None] + tl.arange(0, 2)[None, None, :] * 2


@triton.jit
def sum_at(sums, place):
    """One of the sums, by its place."""
    chosen = tl.where(sum_places() == place, sums, 0.0)
    return tl.sum(tl.sum(tl.sum(chosen, axis=2), axis=1), axis=0)


@triton.jit
def collect_pass(
    row, count, first_id, low, high, values, ids, filled, TILE: tl.constexpr, LIST: tl.constexpr
):
    """Adds the logits in [low, high) and their ids to a list that holds `filled`, by rising id. Returns how many then.

    `row` begins at the token `first_id`.
    """
    lanes = tl.arange(0, TILE)
    for start in tl.range(0, count, TILE, num_stages=2):
        x = tl.load(row + start + lanes, mask=start + lanes < count, other=-INFINITY).to(tl.float32)
        wanted = (x >= low) & (x < high)
        places = tl.cumsum(wanted.to(tl.int32), axis=0) + (filled - 1)
        tl.store(values + places, x, mask=wanted & (places < LIST))
        tl.store(ids + places, first_id + start + lanes, mask=wanted & (places < LIST))
        filled += tl.sum(wanted.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads read what these wrote
    return filled


@triton.jit
def draw_from_row(
    row, vocab, start, running, passed, reference, scale, threshold, room, goal,
    WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """The id at which the kept weights, summed by rising id, exceed `goal` (fp64).

    Begins at `start`, with `running` of weight and `passed` equals of the threshold before it. Wide steps find the
    stretch; narrow ones inside it the token. When roundings keep the goal out of reach, the last stretch with a kept
    token gives its last one.
    """
    level_weight = tl.exp2((threshold - reference) * scale)
    lanes = tl.arange(0, WIDE)
    found_at, found_running, found_passed = start, running, passed
    while start < vocab:
        x = tl.load(row + start + lanes, mask=start + lanes < vocab, other=-INFINITY).to(tl.float32)
        weight = tl.where(x > threshold, tl.exp2((x - reference) * scale), 0.0)
        level = tl.sum((x == threshold).to(tl.int32), axis=0)
        kept_level = tl.minimum(tl.maximum(room - passed, 0), level)
        mass = tl.sum(weight, axis=0) + kept_level.to(tl.float32) * level_weight
        found_at = tl.where(mass > 0, start, found_at)
        found_running = tl.where(mass > 0, running, found_running)
        found_passed = tl.where(mass > 0, passed, found_passed)
        running += mass.to(tl.float64)
        passed += level
        start = tl.where(running > goal, vocab, start + WIDE)
    offsets = tl.arange(0, NARROW)
    token = vocab * 0 - 1
    last = vocab * 0 - 1
    end = tl.minimum(found_at + WIDE, vocab)
    while found_at < end:
        x = tl.load(row + found_at + offsets, mask=found_at + offsets < end, other=-INFINITY).to(tl.float32)
        level = x == threshold
        kept = (x > threshold) | (level & (tl.cumsum(level.to(tl.int32), axis=0) + found_passed <= room))
        weight = tl.where(kept, tl.exp2((x - reference) * scale), 0.0).to(tl.float64)
        hit = (weight > 0) & (found_running + tl.cumsum(weight, axis=0) > goal)
        first = tl.min(tl.where(hit, found_at + offsets, 0x7FFFFFFF), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, found_at + offsets, -1), axis=0))
        token = tl.where(first < 0x7FFFFFFF, first, token)
        found_running += tl.sum(weight, axis=0)
        found_passed += tl.sum(level.to(tl.int32), axis=0)
        found_at = tl.where(token >= 0, end, found_at + NARROW)
    return tl.where(token >= 0, token, last)

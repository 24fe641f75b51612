"""Work on a row's short list: up to LIST logits and their token ids, by rising id. It is read once, into registers."""

import triton
import triton.language as tl

from quire.kernels.sample.triton_passes import INFINITY, from_key, order_key


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
    """The threshold in [low, high) at which the list, with what lies above it, reaches `goal`.

    (threshold; how many of its equals are kept, lowest id first; the kept weight; the number at or above it). `goal`
    is a number of tokens or a weight; `low` counts as reaching it.
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
    """The piece of the row in which the draw falls, when each has a base weight and the rest of the kept is listed.

    (its first id; the kept weight before it; equals of the threshold before it; the goal: uniform times all weight).
    It has kept tokens itself.
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

"""One row's token by its own temperature and filters, without a sort.

A sample of the row guesses four thresholds around the wanted one. A pass over the row weighs them exactly, and if the
guess was good few tokens are left in between; else thresholds are set between the nearest two and weighed again. The
few are listed, and the list is searched to the last bit. In the usual case that is two passes over the row, and the
draw from the list, or half a pass more where the kept tokens are too many for it.
"""

import triton
import triton.language as tl

from quire.kernels.sample.triton_passes import (
    INFINITY,
    LOWEST,
    collect_pass,
    draw_from_list,
    draw_from_row,
    from_key,
    level_room,
    measure_pass,
    order_key,
    peak_pass,
    search_list,
)

LOG2E = tl.constexpr(1.4426950408889634)
MOST_PASSES = tl.constexpr(40)  # a pass halves the integers between two thresholds at least: 32 would do
HEADROOM = tl.constexpr(60.0)  # log2 by which weights may exceed one before they are measured anew
SEARCHED = tl.constexpr(
    64.0
)  # log2 of the weights, below the largest, among which a sample looks for thresholds
SEARCH_STEPS = tl.constexpr(12)


@triton.jit
def _load_sample(row, vocab, SAMPLE: tl.constexpr):
    """Logits spread over the row in pieces of 32, -inf where there are none."""
    index = tl.arange(0, SAMPLE)
    spread = (index // 32) * (vocab // (SAMPLE // 32)) + index % 32
    offsets = tl.where(vocab >= SAMPLE, spread, index)
    return tl.load(row + offsets, mask=offsets < vocab, other=-INFINITY).to(tl.float32)


@triton.jit
def _guess(
    x, vocab, reference, scale, floor, by_count, top_k, top_p, SAMPLE: tl.constexpr, LIST: tl.constexpr
):
    """Four thresholds: one with about half a list of tokens above it, three around the wanted one."""
    share = tl.minimum(vocab, SAMPLE).to(tl.float32) / vocab
    x = tl.where(x >= floor, x, -INFINITY)
    weight = tl.exp2((x - reference) * scale)
    amount = tl.where(by_count, (x > -INFINITY).to(tl.float32), weight)
    total = tl.sum(weight, axis=0)
    squares = tl.sum(weight * weight, axis=0)
    goal = tl.where(by_count, top_k * share, top_p * total)
    deviation = tl.where(by_count, tl.sqrt(goal) + 1.0, tl.sqrt(top_p * (1.0 - top_p) * squares))
    goal0 = (LIST // 2) * share
    goal1 = goal - 2.5 * deviation
    goal3 = goal + 2.5 * deviation
    bottom = tl.maximum(floor, reference - SEARCHED / scale)
    low0, low1, low2, low3 = bottom, bottom, bottom, bottom
    high0, high1, high2, high3 = reference, reference, reference, reference
    for _ in range(SEARCH_STEPS):
        t0 = 0.5 * (low0 + high0)
        t1 = 0.5 * (low1 + high1)
        t2 = 0.5 * (low2 + high2)
        t3 = 0.5 * (low3 + high3)
        reached0 = tl.sum((x >= t0).to(tl.float32), axis=0) >= goal0
        reached1 = tl.sum(tl.where(x >= t1, amount, 0.0), axis=0) >= goal1
        reached2 = tl.sum(tl.where(x >= t2, amount, 0.0), axis=0) >= goal
        reached3 = tl.sum(tl.where(x >= t3, amount, 0.0), axis=0) >= goal3
        low0, high0 = tl.where(reached0, t0, low0), tl.where(reached0, high0, t0)
        low1, high1 = tl.where(reached1, t1, low1), tl.where(reached1, high1, t1)
        low2, high2 = tl.where(reached2, t2, low2), tl.where(reached2, high2, t2)
        low3, high3 = tl.where(reached3, t3, low3), tl.where(reached3, high3, t3)
    return low0, low1, low2, low3


@triton.jit
def _tighten(low, low_mass, low_number, high, high_mass, high_number, t, mass, number, by_count, goal):
    """Moves one end of [low, high) to the threshold t, if that lies inside."""
    reached = tl.where(by_count, number.to(tl.float32), mass) >= goal
    raises = reached & (t > low) & (t < high)
    lowers = (reached == 0) & (t > low) & (t < high)
    return (
        tl.where(raises, t, low), tl.where(raises, mass, low_mass), tl.where(raises, number, low_number),
        tl.where(lowers, t, high), tl.where(lowers, mass, high_mass), tl.where(lowers, number, high_number),
    )  # fmt: skip


@triton.jit
def _between(low, low_mass, low_number, high, high_mass, high_number, by_count, goal):
    """Four thresholds in [low, high]: the middle integer for safety, and three where a straight line points."""
    low_key = order_key(low)
    middle = from_key(low_key + ((order_key(high) - low_key) >> 1))
    most = tl.where(by_count, low_number.to(tl.float32), low_mass)
    least = tl.where(by_count, high_number.to(tl.float32), high_mass)
    part = tl.minimum(tl.maximum((most - goal) / tl.maximum(most - least, 1e-37), 0.0), 1.0)
    width = high - low
    point = low + width * part
    return middle, point - 0.04 * width, point, point + 0.04 * width


@triton.jit
def draw_token(
    row, vocab, temperature, top_k, top_p, min_p, uniform, values, ids,
    TILE: tl.constexpr, STAGES: tl.constexpr, SAMPLE: tl.constexpr, LIST: tl.constexpr,
    WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """A token id; -1 where logits are not finite or every token is banned."""
    # variables that a branch or a loop changes must be tensors from the start
    yes = temperature == temperature
    no = temperature != temperature
    nothing = temperature * 0.0
    none = vocab * 0
    scale = LOG2E / temperature
    floor = nothing + LOWEST
    sample = _load_sample(row, vocab, SAMPLE)
    reference = tl.maximum(tl.max(sample, axis=0), LOWEST)
    if min_p > 0:
        reference = tl.maximum(peak_pass(row, vocab, TILE, STAGES), LOWEST)
        floor = tl.maximum(reference + tl.log2(min_p) / scale, LOWEST)
    by_count = (top_k > 0) & (top_k < vocab)
    filtered = by_count | (top_p < 1.0)
    t0, t1, t2, t3 = reference, reference, reference, reference
    if filtered:
        t0, t1, t2, t3 = _guess(sample, vocab, reference, scale, floor, by_count, top_k, top_p, SAMPLE, LIST)

    low, low_mass, low_number = floor, nothing, none
    high, high_mass, high_number = reference, nothing, none
    threshold, room, kept_mass = floor, none + vocab, nothing
    goal = nothing
    passes = none
    is_fresh = yes  # nothing is known of the row yet
    is_listed = no  # the list holds all kept tokens
    is_usable = yes
    is_open = yes
    while is_open:
        (
            peak, mass, number, mass0, mass1, mass2, mass3, number0, number1, number2, number3,
        ) = measure_pass(row, vocab, reference, scale, floor, t0, t1, t2, t3, TILE, STAGES)  # fmt: skip
        passes += 1
        is_usable = (peak > -INFINITY) & (peak < INFINITY)
        overflows = is_usable & is_fresh & ((peak - reference) * scale > HEADROOM)
        reference = tl.where(overflows, peak, reference)
        is_usable = is_usable & (overflows | (mass < INFINITY))  # false for NaN
        is_open = overflows
        if is_usable & (overflows == 0):
            if is_fresh:
                is_fresh = no
                low, low_mass, low_number = floor, mass, number
                high, high_mass, high_number = from_key(order_key(peak) + 1), nothing, none
                kept_mass = mass
                by_count = by_count & (top_k < number)
                goal = tl.where(by_count, top_k.to(tl.float32), tl.maximum(top_p * mass, 1e-37))
            if by_count | (top_p < 1.0):
                low, low_mass, low_number, high, high_mass, high_number = _tighten(
                    low,
                    low_mass,
                    low_number,
                    high,
                    high_mass,
                    high_number,
                    t0,
                    mass0,
                    number0,
                    by_count,
                    goal,
                )
                low, low_mass, low_number, high, high_mass, high_number = _tighten(
                    low,
                    low_mass,
                    low_number,
                    high,
                    high_mass,
                    high_number,
                    t1,
                    mass1,
                    number1,
                    by_count,
                    goal,
                )
                low, low_mass, low_number, high, high_mass, high_number = _tighten(
                    low,
                    low_mass,
                    low_number,
                    high,
                    high_mass,
                    high_number,
                    t2,
                    mass2,
                    number2,
                    by_count,
                    goal,
                )
                low, low_mass, low_number, high, high_mass, high_number = _tighten(
                    low,
                    low_mass,
                    low_number,
                    high,
                    high_mass,
                    high_number,
                    t3,
                    mass3,
                    number3,
                    by_count,
                    goal,
                )
                is_listed = low_number <= LIST
                fits = is_listed | (low_number - high_number <= LIST)
                is_single = order_key(high) - order_key(low) <= 1
                is_open = (fits | is_single | (passes >= MOST_PASSES)) == 0
                if is_open == 0:
                    if fits:
                        end = tl.where(is_listed, INFINITY, high)
                        collect_pass(row, vocab, low, end, values, ids, TILE, LIST)
                        above_mass = tl.where(is_listed, 0.0, high_mass)
                        above_number = tl.where(is_listed, 0, high_number)
                        threshold, room, kept_mass, low_number = search_list(
                            values,
                            reference,
                            scale,
                            low,
                            high,
                            by_count,
                            goal,
                            above_mass,
                            above_number,
                            LIST,
                        )
                        if is_listed & by_count & (top_p < 1.0):
                            goal = tl.maximum(top_p * kept_mass, 1e-37)
                            threshold, room, kept_mass, low_number = search_list(
                                values, reference, scale, threshold, high, no, goal, nothing, none, LIST
                            )
                            by_count = no
                    else:
                        # one value, or as good as one, is all that is left: its tokens are too many for the list
                        threshold = low
                        level = low_number - high_number
                        level_weight = tl.exp2((low - reference) * scale)
                        room = level_room(by_count, goal, high_mass, high_number, level, level_weight)
                        kept_mass = high_mass + room.to(tl.float32) * level_weight
                    if by_count & (top_p < 1.0):
                        # top-k's threshold is found, top-p's lies at it or above
                        low, low_mass = threshold, kept_mass
                        high, high_mass, high_number = from_key(order_key(peak) + 1), nothing, none
                        by_count = no
                        goal = tl.maximum(top_p * kept_mass, 1e-37)
                        is_open = yes
                t0, t1, t2, t3 = _between(
                    low, low_mass, low_number, high, high_mass, high_number, by_count, goal
                )
    token = none - 1
    if is_usable:
        if is_listed:
            token = draw_from_list(values, ids, reference, scale, threshold, room, uniform, LIST)
        else:
            goal_mass = uniform * kept_mass.to(tl.float64)
            token = draw_from_row(row, vocab, reference, scale, threshold, room, goal_mass, WIDE, NARROW)
    return token

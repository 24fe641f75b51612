"""Where a filter's threshold lies: a guess from a sample of the row, then an interval [low, high) that narrows.

Its ends carry the weight and number of the tokens at or above them. `low` reaches the goal, `high` does not.
"""

import triton
import triton.language as tl

from quire.kernels.sample.triton_passes import INFINITY, from_key, order_key

SEARCHED = tl.constexpr(64.0)  # log2 of the weights, below the largest, among which a sample is searched
SEARCH_STEPS = tl.constexpr(12)


@triton.jit
def load_sample(row, vocab, SAMPLE: tl.constexpr):
    """Logits spread over the row in pieces of 32, -inf where there are none."""
    index = tl.arange(0, SAMPLE)
    spread = (index // 32) * (vocab // (SAMPLE // 32)) + index % 32
    offsets = tl.where(vocab >= SAMPLE, spread, index)
    return tl.load(row + offsets, mask=offsets < vocab, other=-INFINITY).to(tl.float32)


@triton.jit
def guess(
    x, vocab, reference, scale, floor, by_count, top_k, top_p, SAMPLE: tl.constexpr, LIST: tl.constexpr
):
    """Four thresholds, [4]: one with about half a list of tokens above it, three around the wanted one."""
    share = tl.minimum(vocab, SAMPLE).to(tl.float32) / vocab
    x = tl.where(x >= floor, x, -INFINITY)
    weight = tl.exp2((x - reference) * scale)
    one = (x > -INFINITY).to(tl.float32)
    amount = tl.where(by_count, one, weight)
    total = tl.sum(weight, axis=0)
    squares = tl.sum(weight * weight, axis=0)
    goal = tl.where(by_count, top_k * share, top_p * total)
    deviation = tl.where(by_count, tl.sqrt(goal) + 1.0, tl.sqrt(top_p * (1.0 - top_p) * squares))
    index = tl.arange(0, 4)
    goals = tl.where(index == 0, (LIST // 2) * share, goal + (index - 2).to(tl.float32) * (2.5 * deviation))
    amounts = tl.where(index[:, None] == 0, one[None, :], amount[None, :])
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
    """(low, its weight and number, high, its weight and number, whether by count, goal) of all that is not banned."""
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

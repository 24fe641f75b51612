// Exponentials by one polynomial, with the same bits on every instruction set; relative error about 1e-7.
#pragma once

#include "vector.h"

namespace quire {
namespace QUIRE_ISA {

// 2^x; zero below -126, and x must not exceed 127.
inline Floats exponential_of_two(Floats x) {
    const Floats limit = broadcast(-126.0f);
    const Floats clamped = maximum(x, limit);
    const Floats whole = round_even(clamped);
    const Floats rest = subtract(clamped, whole);
    Floats y = fused(broadcast(1.5403530e-4f), rest, broadcast(1.3333558e-3f));
    y = fused(y, rest, broadcast(9.6181291e-3f));
    y = fused(y, rest, broadcast(5.5504109e-2f));
    y = fused(y, rest, broadcast(2.4022651e-1f));
    y = fused(y, rest, broadcast(6.9314718e-1f));
    y = fused(y, rest, broadcast(1.0f));
    return keep_at_least(x, limit, multiply(y, power_of_two(whole)));
}

// e^x; zero below -87.3, and x is cut at 88.
inline Floats exponential(Floats x) {
    const Floats limit = broadcast(-87.3f);
    const Floats clamped = minimum(maximum(x, limit), broadcast(88.0f));
    const Floats whole = round_even(multiply(clamped, broadcast(1.44269504f)));
    Floats rest = fused(whole, broadcast(-0.693359375f), clamped);
    rest = fused(whole, broadcast(2.12194440e-4f), rest);
    Floats y = fused(broadcast(1.3888889e-3f), rest, broadcast(8.3333333e-3f));
    y = fused(y, rest, broadcast(4.1666667e-2f));
    y = fused(y, rest, broadcast(1.6666667e-1f));
    y = fused(y, rest, broadcast(0.5f));
    y = fused(y, rest, broadcast(1.0f));
    y = fused(y, rest, broadcast(1.0f));
    return keep_at_least(x, limit, multiply(y, power_of_two(whole)));
}

// 1 / x for normal x up to 2^120, to about one unit in the last place, without the slow division: a guess from the
// bits, then three steps of Newton's.
inline Floats reciprocal(Floats x) {
    Floats y = reciprocal_guess(x);
    for (int step = 0; step < 3; ++step) {
        const Floats error = negated_fused(x, y, broadcast(1.0f));
        y = fused(y, error, y);
    }
    return y;
}

// gate / (1 + e^-gate) * up
inline Floats silu_times(Floats gate, Floats up) {
    // Beyond 80 the sigmoid is zero for all purposes, and the reciprocal stays a normal number.
    const Floats power = minimum(subtract(zeros(), gate), broadcast(80.0f));
    return multiply(multiply(gate, reciprocal(add(broadcast(1.0f), exponential(power)))), up);
}

}  // namespace QUIRE_ISA
}  // namespace quire

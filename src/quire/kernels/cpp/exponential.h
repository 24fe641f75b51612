// Exponentials by one polynomial, with the same bits on every instruction set; relative error about 1e-7
// (of silu: times the size of the argument).
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

// gate / (1 + e^-gate) * up. The power is made in as few steps as can be: this runs beside the tiles, which leave the
// vector units little room.
inline Floats silu_times(Floats gate, Floats up) {
    const Floats power = multiply(gate, broadcast(-1.44269504f));
    const Floats clamped = minimum(maximum(power, broadcast(-126.0f)), broadcast(126.0f));
    // Adding 1.5 * 2^23 leaves the nearest whole number in the lowest bits.
    const Floats shifted = add(clamped, broadcast(12582912.0f));
    const Floats rest = subtract(clamped, subtract(shifted, broadcast(12582912.0f)));
    Floats y = fused(broadcast(1.3264724e-3f), rest, broadcast(9.6715130e-3f));
    y = fused(y, rest, broadcast(5.5507336e-2f));
    y = fused(y, rest, broadcast(2.4022242e-1f));
    y = fused(y, rest, broadcast(6.9314700e-1f));
    y = fused(y, rest, broadcast(1.0f));
    return multiply(divide(gate, add(broadcast(1.0f), add_to_exponent(y, shifted))), up);
}

}  // namespace QUIRE_ISA
}  // namespace quire

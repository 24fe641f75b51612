// Sixteen floats at a time, on every instruction set. Every function gives the same bits on every set: fused
// multiply-adds are explicit, and sums fold halves (16 -> 8 -> 4 -> 2 -> 1) in one fixed order.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef QUIRE_ISA
#define QUIRE_ISA generic
#endif

namespace quire {
namespace QUIRE_ISA {

constexpr int kLanes = 16;

// Elements of pages and tables, as stored.
struct Half { uint16_t bits; };
struct BFloat { uint16_t bits; };

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Asks for weights that lie 4 KiB ahead of their reader. They are one contiguous share per thread, which an EPYC
// prefetches faster by itself where little is computed with each byte; Xeons with AMX gain from both.
template <bool kMuchComputed>
inline void prefetch_stream([[maybe_unused]] const void* source, [[maybe_unused]] int64_t num_bytes) {
#if !defined(__AMX_INT8__)
    if (!kMuchComputed) return;
#endif
    const char* ahead = static_cast<const char*>(source) + 4096;
    for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(ahead + i);
}

}  // namespace QUIRE_ISA
}  // namespace quire

#if defined(__AVX512F__)
#include "vector_avx512.h"
#elif defined(__AVX2__)
#include "vector_avx2.h"
#else
#include "vector_generic.h"
#endif

namespace quire {
namespace QUIRE_ISA {

// Whole floats in [-128, 127].
inline void store(int8_t* target, Floats a) { store_bytes(target, a, 0); }

inline BFloat bfloat_of(float value) {
    const uint32_t bits = bits_of_float(value);
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline float float_of(BFloat value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }

// Lanes from `count` on are zero and are not read.
template <class Element>
inline Floats load_part(const Element* source, int64_t count) {
    if (count >= kLanes) return load(source);
    Element padded[kLanes] = {};
    std::memcpy(padded, source, static_cast<size_t>(count) * sizeof(Element));
    return load(padded);
}

// Lanes from `count` on are not written.
template <class Element>
inline void store_part(Element* target, Floats value, int64_t count) {
    if (count >= kLanes) return store(target, value);
    Element padded[kLanes];
    store(padded, value);
    std::memcpy(target, padded, static_cast<size_t>(count) * sizeof(Element));
}

inline Floats zeros() { return broadcast(0.0f); }

}  // namespace QUIRE_ISA
}  // namespace quire

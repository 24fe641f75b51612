// Rotary embedding of q and k in place, and the store of k and v into their slots.
#include "../cpp/pool.h"
#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

struct PageStrides { int64_t block, slot, head; };

// Of pages in int8: [blocks, kv heads, block size], null for other pages.
struct PageScales { BFloat* data; int64_t block_stride, head_stride; };

constexpr float kLargestByte = 127.0f, kSmallestScale = 1e-30f;

struct RotaryBatch {
    float* qkv;
    int64_t token_stride, num_heads, num_kv_heads, head_dim;
    const float* cos_sin;
    int64_t half;  // rotary_dim / 2
    const int32_t* positions;
    const int64_t* slots;
    void* k_pages;
    void* v_pages;
    int64_t block_size;
    PageStrides k_strides, v_strides;
    PageScales k_scales, v_scales;
};

// Two products and a sum, each rounded: the reference does the same, so the bits agree.
inline void rotate_head(float* head, const float* cosine, const float* sine, int64_t half) {
    for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t count = half - i;
        const Floats c = load_part(cosine + i, count), s = load_part(sine + i, count);
        const Floats first = load_part(head + i, count), second = load_part(head + half + i, count);
        store_part(head + i, subtract(multiply(first, c), multiply(second, s)), count);
        store_part(head + half + i, add(multiply(second, c), multiply(first, s)), count);
    }
}

template <class Element>
inline void store_head(const float* source, Element* target, int64_t head_dim) {
    for (int64_t i = 0; i < head_dim; i += kLanes) {
        store_part(target + i, load_part(source + i, head_dim - i), head_dim - i);
    }
}

// Whole numbers of a scale, which is the largest magnitude / 127, rounded: by less than half a number in 127.
inline BFloat quantize_head(const float* source, int8_t* target, int64_t head_dim) {
    Floats top = zeros();
    for (int64_t i = 0; i < head_dim; i += kLanes) {
        top = maximum(top, absolute(load_part(source + i, head_dim - i)));
    }
    const float wanted = largest(top) / kLargestByte;
    const BFloat scale = bfloat_of(wanted > kSmallestScale ? wanted : kSmallestScale);
    const Floats inverse = broadcast(1.0f / float_of(scale));
    for (int64_t i = 0; i < head_dim; i += kLanes) {
        const int64_t count = head_dim - i;
        store_part(target + i, round_even(multiply(load_part(source + i, count), inverse)), count);
    }
    return scale;
}

template <class Element>
inline void store_heads(const float* source, Element* pages, const PageStrides& strides, const PageScales& scales,
                        int64_t slot, const RotaryBatch& batch) {
    const int64_t block = slot / batch.block_size, offset = slot - block * batch.block_size;
    Element* target = pages + block * strides.block + offset * strides.slot;
    for (int64_t head = 0; head < batch.num_kv_heads; ++head) {
        const float* values = source + head * batch.head_dim;
        if constexpr (sizeof(Element) == 1) {
            scales.data[block * scales.block_stride + head * scales.head_stride + offset] =
                quantize_head(values, target + head * strides.head, batch.head_dim);
        } else {
            store_head(values, target + head * strides.head, batch.head_dim);
        }
    }
}

template <class Element>
inline void rotate_tokens(const RotaryBatch& batch, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
        float* row = batch.qkv + token * batch.token_stride;
        if (batch.cos_sin != nullptr) {
            const float* cosine = batch.cos_sin + batch.positions[token] * 2 * batch.half;
            for (int64_t head = 0; head < batch.num_heads + batch.num_kv_heads; ++head) {
                rotate_head(row + head * batch.head_dim, cosine, cosine + batch.half, batch.half);
            }
        }
        const float* k = row + batch.num_heads * batch.head_dim;
        const float* v = k + batch.num_kv_heads * batch.head_dim;
        store_heads(k, static_cast<Element*>(batch.k_pages), batch.k_strides, batch.k_scales,
                    batch.slots[token], batch);
        store_heads(v, static_cast<Element*>(batch.v_pages), batch.v_strides, batch.v_scales,
                    batch.slots[token], batch);
    }
}

// Arguments: qkv, token stride, tokens, heads, kv heads, head_dim, cos_sin, rotary_dim, positions, slots,
// page dtype, block size, k pages, its three strides, v pages, its three strides, k scales, v scales (null unless the
// pages are int8), two strides of both.
inline void rotate_and_store(const int64_t* words) {
    const Arguments a{words};
    const RotaryBatch batch{
        a.pointer<float>(0), a.integer(1), a.integer(3), a.integer(4), a.integer(5),
        a.pointer<const float>(6), a.integer(7) / 2, a.pointer<const int32_t>(8), a.pointer<const int64_t>(9),
        a.pointer<void>(12), a.pointer<void>(16), a.integer(11),
        {a.integer(13), a.integer(14), a.integer(15)}, {a.integer(17), a.integer(18), a.integer(19)},
        {a.pointer<BFloat>(20), a.integer(22), a.integer(23)}, {a.pointer<BFloat>(21), a.integer(22), a.integer(23)}};
    const int64_t dtype = a.integer(10);
    parallel_for(a.integer(2), 8, [&, dtype](int64_t begin, int64_t end) {
        if (dtype == 0) rotate_tokens<float>(batch, begin, end);
        else if (dtype == 1) rotate_tokens<Half>(batch, begin, end);
        else if (dtype == 2) rotate_tokens<BFloat>(batch, begin, end);
        else rotate_tokens<int8_t>(batch, begin, end);
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire

// Rotary embedding of q and k in place, and the store of k and v into their slots.
#include "../cpp/pool.h"
#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

struct PageStrides { int64_t block, slot, head; };

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
inline void store_heads(const float* source, Element* pages, const PageStrides& strides, int64_t slot,
                        const RotaryBatch& batch) {
    const int64_t block = slot / batch.block_size, offset = slot - block * batch.block_size;
    Element* target = pages + block * strides.block + offset * strides.slot;
    for (int64_t head = 0; head < batch.num_kv_heads; ++head) {
        for (int64_t i = 0; i < batch.head_dim; i += kLanes) {
            const int64_t count = batch.head_dim - i;
            store_part(target + head * strides.head + i, load_part(source + head * batch.head_dim + i, count), count);
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
        store_heads(k, static_cast<Element*>(batch.k_pages), batch.k_strides, batch.slots[token], batch);
        store_heads(v, static_cast<Element*>(batch.v_pages), batch.v_strides, batch.slots[token], batch);
    }
}

// Arguments: qkv, token stride, tokens, heads, kv heads, head_dim, cos_sin, rotary_dim, positions, slots,
// page dtype, block size, k pages, its three strides, v pages, its three strides.
inline void rotate_and_store(const int64_t* words) {
    const Arguments a{words};
    const RotaryBatch batch{
        a.pointer<float>(0), a.integer(1), a.integer(3), a.integer(4), a.integer(5),
        a.pointer<const float>(6), a.integer(7) / 2, a.pointer<const int32_t>(8), a.pointer<const int64_t>(9),
        a.pointer<void>(12), a.pointer<void>(16), a.integer(11),
        {a.integer(13), a.integer(14), a.integer(15)}, {a.integer(17), a.integer(18), a.integer(19)}};
    const int64_t dtype = a.integer(10);
    parallel_for(a.integer(2), 8, [&, dtype](int64_t begin, int64_t end) {
        if (dtype == 0) rotate_tokens<float>(batch, begin, end);
        else if (dtype == 1) rotate_tokens<Half>(batch, begin, end);
        else rotate_tokens<BFloat>(batch, begin, end);
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire

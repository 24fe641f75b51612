// Normalisation of rows. A row's sum runs over sixteen lanes in order and folds once, in any batch.
#include "../cpp/pool.h"
#include "../cpp/vector.h"

#include <cmath>

namespace quire {
namespace QUIRE_ISA {

// Rows that one thread takes at a time; fewer rows than this run on the calling thread.
inline int64_t rows_per_chunk(int64_t width) {
    const int64_t rows = 16384 / (width > 0 ? width : 1);
    return rows < 1 ? 1 : rows;
}

inline float mean_of_squares(const float* x, int64_t width) {
    Floats total = zeros();
    for (int64_t i = 0; i < width; i += kLanes) {
        const Floats value = load_part(x + i, width - i);
        total = fused(value, value, total);
    }
    return sum(total) / static_cast<float>(width);
}

// kOnto: the result is added to what `out` holds.
template <bool kOnto = false>
inline void rms_norm_row(const float* x, const float* weight, float eps, float* out, int64_t width) {
    const Floats factor = broadcast(1.0f / std::sqrt(mean_of_squares(x, width) + eps));
    for (int64_t i = 0; i < width; i += kLanes) {
        const Floats scaled = multiply(load_part(x + i, width - i), factor);
        Floats value = multiply(scaled, load_part(weight + i, width - i));
        if (kOnto) value = add(load_part(out + i, width - i), value);
        store_part(out + i, value, width - i);
    }
}

inline void layer_norm_row(const float* x, const float* weight, const float* bias, float eps, float* out,
                           int64_t width) {
    Floats total = zeros();
    for (int64_t i = 0; i < width; i += kLanes) total = add(total, load_part(x + i, width - i));
    const float mean = sum(total) / static_cast<float>(width);
    Floats squares = zeros();
    for (int64_t i = 0; i < width; i += kLanes) {
        // Lanes beyond the row must not count: they hold minus the mean after the subtraction.
        float centred[kLanes] = {};
        store_part(centred, subtract(load_part(x + i, width - i), broadcast(mean)), width - i);
        squares = fused(load(centred), load(centred), squares);
    }
    const Floats factor = broadcast(1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps));
    for (int64_t i = 0; i < width; i += kLanes) {
        Floats value = multiply(subtract(load_part(x + i, width - i), broadcast(mean)), factor);
        if (weight != nullptr) value = multiply(value, load_part(weight + i, width - i));
        if (bias != nullptr) value = add(value, load_part(bias + i, width - i));
        store_part(out + i, value, width - i);
    }
}

inline void add_row(float* residual, const float* x, int64_t width) {
    for (int64_t i = 0; i < width; i += kLanes) {
        store_part(residual + i, add(load_part(residual + i, width - i), load_part(x + i, width - i)), width - i);
    }
}

// Arguments: x, x stride, rows, width, weight, bias, eps, out, out stride, residual, residual stride.
template <bool kAdd, bool kCentre, bool kOnto = false>
inline void norm_rows(const int64_t* words) {
    const Arguments arguments{words};
    const float* x = arguments.pointer<const float>(0);
    const int64_t x_stride = arguments.integer(1), rows = arguments.integer(2), width = arguments.integer(3);
    const float* weight = arguments.pointer<const float>(4);
    const float* bias = arguments.pointer<const float>(5);
    const float eps = arguments.real(6);
    float* out = arguments.pointer<float>(7);
    const int64_t out_stride = arguments.integer(8), residual_stride = arguments.integer(10);
    float* residual = arguments.pointer<float>(9);
    parallel_for(rows, rows_per_chunk(width), [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const float* source = x + row * x_stride;
            if (kAdd) {
                float* total = residual + row * residual_stride;
                add_row(total, source, width);
                source = total;
            }
            float* target = out + row * out_stride;
            if (kCentre) layer_norm_row(source, weight, bias, eps, target, width);
            else rms_norm_row<kOnto>(source, weight, eps, target, width);
        }
    });
}

inline void rms_norm(const int64_t* words) { norm_rows<false, false>(words); }
inline void add_rms_norm(const int64_t* words) { norm_rows<true, false>(words); }
inline void rms_norm_onto(const int64_t* words) { norm_rows<false, false, true>(words); }
inline void layer_norm(const int64_t* words) { norm_rows<false, true>(words); }
inline void add_layer_norm(const int64_t* words) { norm_rows<true, true>(words); }

// Arguments: x, token stride, head stride, tokens, heads, head_dim, weight, eps. In place.
inline void head_rms_norm(const int64_t* words) {
    const Arguments arguments{words};
    float* x = arguments.pointer<float>(0);
    const int64_t token_stride = arguments.integer(1), head_stride = arguments.integer(2);
    const int64_t tokens = arguments.integer(3), heads = arguments.integer(4), width = arguments.integer(5);
    const float* weight = arguments.pointer<const float>(6);
    const float eps = arguments.real(7);
    parallel_for(tokens, rows_per_chunk(heads * width), [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            for (int64_t head = 0; head < heads; ++head) {
                float* row = x + token * token_stride + head * head_stride;
                rms_norm_row(row, weight, eps, row, width);
            }
        }
    });
}

}  // namespace QUIRE_ISA
}  // namespace quire

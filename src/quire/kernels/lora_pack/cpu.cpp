// An adapter's matrices, as its file has them, into tiles: A as it is, B transposed. One thread, one pass over the bytes
// (two of a matrix that becomes bytes: the second finds it in the cache), numbers that are not finite found on the way.
#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kPackRanks = 512;
constexpr float kPackLargest = 127.0f;
constexpr float kPackSmallestPeak = 1e-30f;

struct PackSite {  // a row of Places.sites
    int64_t rank, inputs, outputs, tile_ranks, a_offset, a_code, b_offset, b_code;
};

// Where each rank of a matrix goes, and what it is multiplied with where it becomes bytes.
template <class Target>
struct PackLines {
    Target* line[kPackRanks];
    float peak[kPackRanks + kLanes], inverse[kPackRanks + kLanes];

    void place(Target* target, const int64_t* tiles, int64_t rank, int64_t tile_ranks, int64_t width) {
        for (int64_t j = 0; j < rank; ++j) line[j] = target + tiles[j / tile_ranks] + j % tile_ranks * width;
    }
    void invert(int64_t rank) {
        for (int64_t j = 0; j < rank; ++j) inverse[j] = peak[j] > kPackSmallestPeak ? kPackLargest / peak[j] : 0.0f;
    }
};

// Zero, or not a number once anything that is not finite went in.
struct PackFinite {
    Floats seen = zeros();
    void see(Floats a) { seen = fused(a, zeros(), seen); }
    bool all() const { return sum(seen) == 0.0f; }
};

// Lanes beyond the end of the matrix are zero; other surplus lanes hold the matrix's own next numbers.
template <class Source>
inline Floats load_inside(const Source* matrix, int64_t size, int64_t first) {
    return first < size ? load_part(matrix + first, size - first) : zeros();
}

template <class Target>
inline void put(Target* target, Floats a, float, int64_t count, PackFinite& finite) {
    store_part(target, a, count);
    finite.see(load_part(target, count));  // as it is now: what was finite may be too large for fewer bits
}

inline void put(int8_t* target, Floats a, float inverse, int64_t count, PackFinite&) {
    const Floats whole = round_even(multiply(a, broadcast(inverse)));
    if (count >= kLanes) return store_bytes(target, whole, 0);
    int8_t bytes[kLanes];
    store_bytes(bytes, whole, 0);
    std::memcpy(target, bytes, static_cast<size_t>(count));
}

template <class Target>
constexpr bool becomes_bytes() { return sizeof(Target) == 1; }

template <class Source, class Target>
inline bool pack_a(const Source* a, const PackSite& site, PackLines<Target>& lines) {
    PackFinite finite;
    for (int64_t j = 0; j < site.rank; ++j) {
        const Source* row = a + j * site.inputs;
        if (becomes_bytes<Target>()) {
            Floats peak = zeros();
            for (int64_t k = 0; k < site.inputs; k += kLanes) {
                const Floats numbers = load_part(row + k, site.inputs - k);
                finite.see(numbers);
                peak = maximum(peak, absolute(numbers));
            }
            lines.peak[j] = largest(peak);
            lines.inverse[j] = lines.peak[j] > kPackSmallestPeak ? kPackLargest / lines.peak[j] : 0.0f;
        }
        for (int64_t k = 0; k < site.inputs; k += kLanes) {
            put(lines.line[j] + k, load_part(row + k, site.inputs - k), lines.inverse[j], site.inputs - k, finite);
        }
    }
    return finite.all();
}

// The largest number of every column of B, which is a line of what is written.
template <class Source, class Target>
inline bool find_peaks(const Source* b, const PackSite& site, PackLines<Target>& lines) {
    PackFinite finite;
    const int64_t size = site.outputs * site.rank;
    for (int64_t j = 0; j < site.rank; j += kLanes) {
        Floats peak = zeros();
        for (int64_t c = 0; c < site.outputs; ++c) {
            const Floats numbers = load_inside(b, size, c * site.rank + j);
            finite.see(numbers);
            peak = maximum(peak, absolute(numbers));
        }
        store(lines.peak + j, peak);
    }
    lines.invert(site.rank);
    return finite.all();
}

template <class Source, class Target>
inline bool pack_b(const Source* b, const PackSite& site, PackLines<Target>& lines) {
    if (becomes_bytes<Target>() && !find_peaks(b, site, lines)) return false;
    PackFinite finite;
    const int64_t size = site.outputs * site.rank;
    for (int64_t c = 0; c < site.outputs; c += kLanes) {
        const int64_t rows = site.outputs - c < kLanes ? site.outputs - c : kLanes;
        for (int64_t j = 0; j < site.rank; j += kLanes) {
            Floats block[kLanes];
            for (int64_t i = 0; i < kLanes; ++i) {
                block[i] = i < rows ? load_inside(b, size, (c + i) * site.rank + j) : zeros();
            }
            transpose(block);
            for (int64_t i = 0; i < kLanes && j + i < site.rank; ++i) {
                put(lines.line[j + i] + c, block[i], lines.inverse[j + i], rows, finite);
            }
        }
    }
    return finite.all();
}

// A's scale times B's, behind each tile of A.
inline bool write_scales(int8_t* target, const int64_t* tiles, const PackSite& site, const PackLines<int8_t>& a,
                         const PackLines<int8_t>& b) {
    bool finite = true;
    for (int64_t first = 0, tile = 0; first < site.rank; first += site.tile_ranks, ++tile) {
        const int64_t ranks = site.rank - first < site.tile_ranks ? site.rank - first : site.tile_ranks;
        int8_t* behind = target + tiles[tile] + (ranks * site.inputs + 3) / 4 * 4;
        for (int64_t j = 0; j < ranks; ++j) {
            const float scale = a.peak[first + j] / kPackLargest * (b.peak[first + j] / kPackLargest);
            finite = finite && scale - scale == 0.0f;
            std::memcpy(behind + j * 4, &scale, sizeof scale);
        }
    }
    return finite;
}
template <class Target>
inline bool write_scales(Target*, const int64_t*, const PackSite&, const PackLines<Target>&, const PackLines<Target>&) {
    return true;
}

template <class Use>
inline bool with_source(int64_t code, const char* at, const Use& use) {
    if (code == 0) return use(reinterpret_cast<const float*>(at));
    if (code == 1) return use(reinterpret_cast<const Half*>(at));
    return use(reinterpret_cast<const BFloat*>(at));
}

// The first matrix with a number that is not finite, 2 * site for A and 2 * site + 1 for B; -1 if there is none.
template <class Target>
inline int64_t pack_all(const char* source, Target* target, int64_t count, const PackSite* sites, int64_t tiles,
                        const int64_t* tile_a, const int64_t* tile_b) {
    static thread_local PackLines<Target> a, b;
    for (int64_t s = 0; s < count; ++s) {
        const PackSite& site = sites[s];
        a.place(target, tile_a + s * tiles, site.rank, site.tile_ranks, site.inputs);
        b.place(target, tile_b + s * tiles, site.rank, site.tile_ranks, site.outputs);
        if (!with_source(site.a_code, source + site.a_offset, [&](auto from) { return pack_a(from, site, a); })) {
            return 2 * s;
        }
        if (!with_source(site.b_code, source + site.b_offset, [&](auto from) { return pack_b(from, site, b); })) {
            return 2 * s + 1;
        }
        if (!write_scales(target, tile_a + s * tiles, site, a, b)) return 2 * s;
    }
    return -1;
}

// Arguments: source, target, dtype, number of sites, sites, tiles of a site, tile_a, tile_b, where the answer goes.
inline void lora_pack(const int64_t* words) {
    const Arguments a{words};
    const auto pack = [&a](auto* target) {
        return pack_all(a.pointer<const char>(0), target, a.integer(3), a.pointer<const PackSite>(4), a.integer(5),
                        a.pointer<const int64_t>(6), a.pointer<const int64_t>(7));
    };
    int64_t* found = a.pointer<int64_t>(8);
    if (a.integer(2) == 0) *found = pack(a.pointer<float>(1));
    else if (a.integer(2) == 1) *found = pack(a.pointer<Half>(1));
    else if (a.integer(2) == 2) *found = pack(a.pointer<BFloat>(1));
    else *found = pack(a.pointer<int8_t>(1));
}

}  // namespace QUIRE_ISA
}  // namespace quire

// Collectives over cpp/group.h. Sums are made in the order of the ranks: all ranks get the same bits.
// Messages longer than a buffer go in pieces. After an abort results hold anything.
#include "../cpp/group.h"
#include "../cpp/pool.h"

#include <cstring>

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kReducedAlone = 32768;  // elements below which a second thread is not worth waking

template <class Element, class Combine>
inline void reduce(Group& group, Element* data, int64_t count, const Combine& combine) {
    const int64_t most = group.capacity / static_cast<int64_t>(sizeof(Element));
    for (int64_t first = 0; first < count; first += most) {
        const int64_t size = count - first < most ? count - first : most;
        begin(group);
        std::memcpy(group.own(), data + first, static_cast<size_t>(size) * sizeof(Element));
        if (!arrive(group)) return;
        parallel_for(size, kReducedAlone, [&](int64_t start, int64_t end) {
            Element* out = data + first;
            const Element* zero = reinterpret_cast<const Element*>(group.buffer(0));
            const Element* one = reinterpret_cast<const Element*>(group.buffer(group.size > 1 ? 1 : 0));
            if (group.size == 1) return;
            for (int64_t i = start; i < end; ++i) out[i] = combine(zero[i], one[i]);
            for (int64_t rank = 2; rank < group.size; ++rank) {
                const Element* other = reinterpret_cast<const Element*>(group.buffer(rank));
                for (int64_t i = start; i < end; ++i) out[i] = combine(out[i], other[i]);
            }
        });
    }
}

// Arguments: group, index of the counter, data, elements, kind (0: sum of floats, 1: of int32, 2: largest float).
inline void group_reduce(const int64_t* words) {
    const Arguments a{words};
    Group& group = *a.pointer<Group>(0);
    const int64_t count = a.integer(3);
    group.counts[a.integer(1)] += 4 * count;
    if (a.integer(4) == 1) {
        reduce(group, a.pointer<int32_t>(2), count, [](int32_t x, int32_t y) {
            return static_cast<int32_t>(static_cast<uint32_t>(x) + static_cast<uint32_t>(y));
        });
    } else if (a.integer(4) == 2) {
        reduce(group, a.pointer<float>(2), count, [](float x, float y) { return x < y ? y : x; });
    } else {
        reduce(group, a.pointer<float>(2), count, [](float x, float y) { return x + y; });
    }
}

// Rows of every rank side by side. Arguments: group, index of the counter, own rows, their stride, number of rows,
// bounds [size + 1] of the ranks' columns, result or null where it is not wanted, its stride; all in bytes.
inline void group_gather(const int64_t* words) {
    const Arguments a{words};
    Group& group = *a.pointer<Group>(0);
    const char* own = a.pointer<const char>(2);
    const int64_t stride = a.integer(3), num_rows = a.integer(4), out_stride = a.integer(7);
    const int64_t* bounds = a.pointer<const int64_t>(5);
    char* out = a.pointer<char>(6);
    int64_t widest = 1;
    for (int64_t rank = 0; rank < group.size; ++rank) {
        widest = bounds[rank + 1] - bounds[rank] > widest ? bounds[rank + 1] - bounds[rank] : widest;
    }
    group.counts[a.integer(1)] += num_rows * bounds[group.size];
    const int64_t width = bounds[group.rank + 1] - bounds[group.rank];
    const int64_t most = group.capacity / widest;  // rows at a time; Python sees to at least one
    for (int64_t first = 0; first < num_rows; first += most) {
        const int64_t count = num_rows - first < most ? num_rows - first : most;
        begin(group);
        for (int64_t row = 0; row < count; ++row) {
            std::memcpy(group.own() + row * width, own + (first + row) * stride, static_cast<size_t>(width));
        }
        if (!arrive(group)) return;
        for (int64_t rank = 0; out != nullptr && rank < group.size; ++rank) {
            const int64_t bytes = bounds[rank + 1] - bounds[rank];
            for (int64_t row = 0; row < count; ++row) {
                std::memcpy(out + (first + row) * out_stride + bounds[rank], group.buffer(rank) + row * bytes,
                            static_cast<size_t>(bytes));
            }
        }
    }
}

// Arguments: group, index of the counter, data, bytes, the rank that has them.
inline void group_broadcast(const int64_t* words) {
    const Arguments a{words};
    Group& group = *a.pointer<Group>(0);
    char* data = a.pointer<char>(2);
    const int64_t num_bytes = a.integer(3), root = a.integer(4);
    group.counts[a.integer(1)] += num_bytes;
    for (int64_t first = 0; first < num_bytes; first += group.capacity) {
        const auto size = static_cast<size_t>(num_bytes - first < group.capacity ? num_bytes - first : group.capacity);
        begin(group);
        if (group.rank == root) std::memcpy(group.own(), data + first, size);
        if (!arrive(group)) return;
        if (group.rank != root) std::memcpy(data + first, group.buffer(root), size);
    }
}

// Arguments: channel, index of the counter, data, bytes. The channel's rank says whether they leave or come.
inline void group_pass(const int64_t* words) {
    const Arguments a{words};
    Group& channel = *a.pointer<Group>(0);
    char* data = a.pointer<char>(2);
    const int64_t num_bytes = a.integer(3);
    channel.counts[a.integer(1)] += num_bytes;
    for (int64_t first = 0; first < num_bytes; first += channel.capacity) {
        const int64_t left = num_bytes - first;
        const auto size = static_cast<size_t>(left < channel.capacity ? left : channel.capacity);
        char* slot = next_slot(channel);
        if (slot == nullptr) return;
        if (channel.rank == 0) std::memcpy(slot, data + first, size);
        else std::memcpy(data + first, slot, size);
        finish_slot(channel);
    }
}

}  // namespace QUIRE_ISA
}  // namespace quire

// A group of processes that exchange bytes through memory they all map. Nothing here depends on the instruction set.
//
// Memory: a line for the abort flag, a line per rank with its counter, then per rank two buffers of `capacity` bytes.
// The buffers take turns: a rank that writes buffer b again has seen all others arrive at the exchange in between, so
// no rank still reads what b held.
#pragma once

#include <cstdint>

namespace quire {

constexpr int64_t kMaxRanks = 64;
constexpr int64_t kLineBytes = 64;
constexpr int64_t kHeaderBytes = (2 + 2 * kMaxRanks) * kLineBytes;

// Private to a process; Python makes it, as an array of int64.
struct Group {
    char* memory;  // shared
    int64_t rank, size, capacity;
    int64_t exchanges;  // that were begun
    int64_t waiting;    // 1 while another rank is waited for
    int64_t counts[1];  // payload bytes by (kind, tag); as many as Python made room for

    char* buffer(int64_t of_rank) const {
        return memory + kHeaderBytes + (2 * of_rank + (exchanges & 1)) * capacity;
    }
    char* own() const { return buffer(rank); }
};

// Begins an exchange: own() may be written.
inline void begin(Group& group) { ++group.exchanges; }

// Tells that own() is written and waits for all ranks; false after an abort, when buffers hold anything.
bool arrive(Group& group);

// Between two ranks that share memory of their own: `rank` 0 sends, 1 receives. Memory: the abort flag, a line with
// the number sent, one with the number taken, then `size` slots of `capacity` bytes.
// The next slot, once it is free to write (sender) or filled (receiver); null after an abort.
char* next_slot(Group& channel);
void finish_slot(Group& channel);

}  // namespace quire

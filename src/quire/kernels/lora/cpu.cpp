// y += scale * (x A^T) B, each line with its own adapter. Lines of one adapter go together, so that its weights are read
// once. A sum has one order, along its own line's numbers: the bits of a line do not depend on its neighbours.
#include <vector>

#include "../cpp/pool.h"
#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kLoraLines = 64;      // of a piece of work, at most: their halves-way sums stay in the cache
constexpr int64_t kLoraColumns = 384;   // of a piece of work when B is read, at most
constexpr int64_t kLoraBytes = 32768;   // weights that a thread claims at a time, at least
constexpr int kLoraBlock = 4;           // lines, or vectors of columns, that share what is loaded

struct LoraProblem {
    const float* x;  // null: lines are ids
    int64_t x_stride;
    const char* ids;
    bool wide_ids;
    int64_t first_id, inputs;
    float* y;
    int64_t y_stride;
    const char* weights;
    const int64_t* tile_a;
    const int64_t* tile_b;
    const int32_t* ranks;
    const int32_t* tile_ranks;
    const float* scales;
    int64_t sites, tiles;
    const int32_t* order;
    const int32_t* slots;
    const int32_t* starts;
    int64_t segments, first_site, parts;
    int64_t bounds[4];
};

// What some lines have to do at one site: everything about one adapter there.
struct LoraTask {
    const int32_t* lines;
    int64_t count, rank, tile_ranks, first_column, columns;
    const int64_t* tile_a;
    const int64_t* tile_b;
    float scale;
    int64_t inner;  // where x A^T begins: [count][rank] floats

    int64_t tile_count() const { return (rank + tile_ranks - 1) / tile_ranks; }
    int64_t ranks_of(int64_t tile) const {
        return rank - tile * tile_ranks < tile_ranks ? rank - tile * tile_ranks : tile_ranks;
    }
};

// Some lines of a task, and a tile of A or a stretch of B's columns.
struct LoraPiece {
    const LoraTask* task;
    int64_t first_line, lines, index;
};

struct LoraPlan {
    std::vector<LoraTask> tasks;
    std::vector<LoraPiece> shrink, expand;
    int64_t inner_size, bytes;  // floats of all x A^T; of one read of all A
};

inline int64_t column_pieces(const LoraTask& task) { return (task.columns + kLoraColumns - 1) / kLoraColumns; }

// Neighbouring segments of one adapter are one task.
inline void add_tasks(const LoraProblem& p, LoraPlan& plan) {
    for (int64_t segment = 0; segment < p.segments;) {
        const int64_t slot = p.slots[segment], first = p.starts[segment];
        int64_t next = segment + 1;
        while (next < p.segments && p.slots[next] == slot) ++next;
        const int64_t count = p.starts[next] - first;
        segment = next;
        if (slot < 0 || count <= 0) continue;
        for (int64_t part = 0; part < p.parts; ++part) {
            const int64_t place = slot * p.sites + p.first_site + part, rank = p.ranks[place];
            if (rank <= 0) continue;
            plan.tasks.push_back({p.order + first, count, rank, p.tile_ranks[place], p.bounds[part],
                                  p.bounds[part + 1] - p.bounds[part], p.tile_a + place * p.tiles,
                                  p.tile_b + place * p.tiles, p.scales[place], plan.inner_size});
            plan.inner_size += count * rank;
            plan.bytes += rank * p.inputs * 2;
        }
    }
}

inline void make_plan(const LoraProblem& p, LoraPlan& plan) {
    plan.tasks.clear();
    plan.shrink.clear();
    plan.expand.clear();
    plan.inner_size = plan.bytes = 0;
    add_tasks(p, plan);
    for (const LoraTask& task : plan.tasks) {
        for (int64_t line = 0; line < task.count; line += kLoraLines) {
            const int64_t lines = task.count - line < kLoraLines ? task.count - line : kLoraLines;
            for (int64_t i = 0; i < task.tile_count(); ++i) plan.shrink.push_back({&task, line, lines, i});
            for (int64_t i = 0; i < column_pieces(task); ++i) plan.expand.push_back({&task, line, lines, i});
        }
    }
}

// kLines lines times kRanks ranks of A, from `a` on: sixteen sums at most.
template <int kLines, int kRanks, class Element>
inline void shrink_block(const LoraProblem& p, const int32_t* lines, const Element* a, int64_t ranks, float* inner,
                         int64_t inner_stride) {
    Floats sums[kLanes];
    const float* x[kLines];
    const Element* row[kRanks];
    for (int i = 0; i < kLanes; ++i) sums[i] = zeros();
    for (int i = 0; i < kLines; ++i) x[i] = p.x + lines[i] * p.x_stride;
    for (int j = 0; j < kRanks; ++j) row[j] = a + (j < ranks ? j : 0) * p.inputs;
    int64_t k = 0;
    for (; k + kLanes <= p.inputs; k += kLanes) {
        Floats values[kLines];
        for (int i = 0; i < kLines; ++i) values[i] = load(x[i] + k);
        for (int j = 0; j < kRanks; ++j) {
            const Floats weight = load(row[j] + k);
            for (int i = 0; i < kLines; ++i) {
                sums[i * kRanks + j] = fused(values[i], weight, sums[i * kRanks + j]);
            }
        }
    }
    if (k < p.inputs) {
        for (int j = 0; j < kRanks; ++j) {
            const Floats weight = load_part(row[j] + k, p.inputs - k);
            for (int i = 0; i < kLines; ++i) {
                sums[i * kRanks + j] = fused(load_part(x[i] + k, p.inputs - k), weight, sums[i * kRanks + j]);
            }
        }
    }
    float results[kLanes];
    store(results, sums_of(sums));
    for (int i = 0; i < kLines; ++i) {
        for (int j = 0; j < kRanks && j < ranks; ++j) inner[i * inner_stride + j] = results[i * kRanks + j];
    }
}

template <int kLines, class Element>
inline void shrink_lines(const LoraProblem& p, const int32_t* lines, const Element* a, int64_t ranks, float* inner,
                         int64_t inner_stride) {
    constexpr int kRanks = kLines == 1 ? 16 : kLines == 2 ? 8 : 4;
    for (int64_t j = 0; j < ranks; j += kRanks) {
        shrink_block<kLines, kRanks>(p, lines, a + j * p.inputs, ranks - j, inner + j, inner_stride);
    }
}

template <class Element>
inline void shrink_piece(const LoraProblem& p, const LoraPiece& piece, float* all_inner) {
    const LoraTask& task = *piece.task;
    const Element* a = reinterpret_cast<const Element*>(p.weights) + task.tile_a[piece.index];
    const int64_t ranks = task.ranks_of(piece.index);
    const int32_t* lines = task.lines + piece.first_line;
    float* inner = all_inner + task.inner + piece.first_line * task.rank + piece.index * task.tile_ranks;
    for (int64_t done = 0; done < piece.lines; done += kLoraBlock) {
        const int64_t left = piece.lines - done;
        if (left >= 4) shrink_lines<4>(p, lines + done, a, ranks, inner + done * task.rank, task.rank);
        else if (left == 3) shrink_lines<3>(p, lines + done, a, ranks, inner + done * task.rank, task.rank);
        else if (left == 2) shrink_lines<2>(p, lines + done, a, ranks, inner + done * task.rank, task.rank);
        else shrink_lines<1>(p, lines + done, a, ranks, inner + done * task.rank, task.rank);
    }
}

// A line is one where its id is, and zero elsewhere.
template <class Element>
inline void pick_piece(const LoraProblem& p, const LoraPiece& piece, float* all_inner) {
    const LoraTask& task = *piece.task;
    const Element* a = reinterpret_cast<const Element*>(p.weights) + task.tile_a[piece.index];
    for (int64_t i = piece.first_line; i < piece.first_line + piece.lines; ++i) {
        const int64_t line = task.lines[i];
        const int64_t id = p.first_id + (p.wide_ids ? reinterpret_cast<const int64_t*>(p.ids)[line]
                                                    : reinterpret_cast<const int32_t*>(p.ids)[line]);
        float* inner = all_inner + task.inner + i * task.rank + piece.index * task.tile_ranks;
        for (int64_t j = 0; j < task.ranks_of(piece.index); ++j) {
            float lanes[kLanes];
            store(lanes, load_part(a + j * p.inputs + id, 1));
            inner[j] = lanes[0];
        }
    }
}

// kLines lines of y, kVectors vectors of columns from `column` of the part on; `count` columns of the last are real.
template <int kLines, int kVectors, class Element>
inline void expand_block(const LoraProblem& p, const LoraTask& task, int64_t first_line, int64_t column, int64_t count,
                         const float* inner) {
    Floats sums[kLines][kVectors];
    for (auto& line : sums) {
        for (Floats& vector : line) vector = zeros();
    }
    for (int64_t tile = 0; tile < task.tile_count(); ++tile) {
        const Element* b = reinterpret_cast<const Element*>(p.weights) + task.tile_b[tile] + column;
        const int64_t ranks = task.ranks_of(tile);
        for (int64_t j = 0; j < ranks; ++j, b += task.columns, ++inner) {
            for (int v = 0; v < kVectors; ++v) {
                const Floats weight = kVectors > 1 ? load(b + v * kLanes) : load_part(b, count);
                for (int i = 0; i < kLines; ++i) {
                    sums[i][v] = fused(broadcast(inner[i * task.rank]), weight, sums[i][v]);
                }
            }
        }
    }
    const Floats scale = broadcast(task.scale);
    for (int i = 0; i < kLines; ++i) {
        float* y = p.y + task.lines[first_line + i] * p.y_stride + task.first_column + column;
        for (int v = 0; v < kVectors; ++v, y += kLanes) {
            const int64_t real = kVectors > 1 ? kLanes : count;
            store_part(y, fused(scale, sums[i][v], load_part(y, real)), real);
        }
    }
}

template <int kLines, class Element>
inline void expand_lines(const LoraProblem& p, const LoraTask& task, int64_t first_line, int64_t first, int64_t last,
                         const float* inner) {
    int64_t column = first;
    for (; column + kLoraBlock * kLanes <= last; column += kLoraBlock * kLanes) {
        expand_block<kLines, kLoraBlock, Element>(p, task, first_line, column, kLanes, inner);
    }
    for (; column < last; column += kLanes) {
        expand_block<kLines, 1, Element>(p, task, first_line, column, last - column, inner);
    }
}

template <class Element>
inline void expand_piece(const LoraProblem& p, const LoraPiece& piece, const float* all_inner) {
    const LoraTask& task = *piece.task;
    const int64_t pieces = column_pieces(task);
    const int64_t width = ((task.columns + pieces - 1) / pieces + kLanes - 1) / kLanes * kLanes;
    const int64_t first = piece.index * width, end = first + width < task.columns ? first + width : task.columns;
    const int64_t last_line = piece.first_line + piece.lines;
    for (int64_t line = piece.first_line; line < last_line; line += kLoraBlock) {
        const float* inner = all_inner + task.inner + line * task.rank;
        const int64_t left = last_line - line;
        if (left >= 4) expand_lines<4, Element>(p, task, line, first, end, inner);
        else if (left == 3) expand_lines<3, Element>(p, task, line, first, end, inner);
        else if (left == 2) expand_lines<2, Element>(p, task, line, first, end, inner);
        else expand_lines<1, Element>(p, task, line, first, end, inner);
    }
}

inline int64_t pieces_at_a_time(int64_t pieces, int64_t bytes) {
    const int64_t size = bytes / pieces + 1;
    return (kLoraBytes + size - 1) / size;
}

template <class Element>
inline void run_lora(const LoraProblem& p) {
    static thread_local LoraPlan plan;
    make_plan(p, plan);
    if (plan.tasks.empty()) return;
    float* inner = static_cast<float*>(shared_scratch(static_cast<size_t>(plan.inner_size) * sizeof(float)));
    const LoraPiece* shrink = plan.shrink.data();
    const LoraPiece* expand = plan.expand.data();
    const int64_t pieces = static_cast<int64_t>(plan.shrink.size());
    parallel_for(pieces, pieces_at_a_time(pieces, plan.bytes), [&p, shrink, inner](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            if (p.x != nullptr) shrink_piece<Element>(p, shrink[i], inner);
            else pick_piece<Element>(p, shrink[i], inner);
        }
    });
    const int64_t others = static_cast<int64_t>(plan.expand.size());
    parallel_for(others, pieces_at_a_time(others, plan.bytes), [&p, expand, inner](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) expand_piece<Element>(p, expand[i], inner);
    });
}

// Arguments: x, x stride, ids, whether ids are 64 bits wide, first id, inputs, y, y stride, weights, dtype, tile_a,
// tile_b, ranks, tile_ranks, scales, sites, tiles, order, slots, starts, segments, first site, parts, four bounds.
inline void lora_add(const int64_t* words) {
    const Arguments a{words};
    const LoraProblem problem{
        a.pointer<const float>(0), a.integer(1), a.pointer<const char>(2), a.integer(3) != 0, a.integer(4),
        a.integer(5), a.pointer<float>(6), a.integer(7), a.pointer<const char>(8),
        a.pointer<const int64_t>(10), a.pointer<const int64_t>(11), a.pointer<const int32_t>(12),
        a.pointer<const int32_t>(13), a.pointer<const float>(14), a.integer(15), a.integer(16),
        a.pointer<const int32_t>(17), a.pointer<const int32_t>(18), a.pointer<const int32_t>(19), a.integer(20),
        a.integer(21), a.integer(22), {a.integer(23), a.integer(24), a.integer(25), a.integer(26)}};
    if (a.integer(9) == 0) run_lora<float>(problem);
    else if (a.integer(9) == 1) run_lora<Half>(problem);
    else run_lora<BFloat>(problem);
}

}  // namespace QUIRE_ISA
}  // namespace quire

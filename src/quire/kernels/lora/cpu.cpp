// y += scale * (x A^T) B, each row with its own adapter. Rows of one adapter go together, so that its weights are read
// once. A sum has one order, along its own row's numbers: the bits of a row do not depend on its neighbours.
#include <vector>

#include "../cpp/pool.h"
#include "../cpp/vector.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kLoraRows = 64;      // of a piece of work, at most: their halves-way sums stay in the cache
constexpr int64_t kLoraColumns = 192;   // of a piece of work when B is read, at most
constexpr int64_t kLoraBytes = 32768;   // weights that a thread claims at a time, at least
constexpr int64_t kLoraTasksEach = 4;   // tasks of a thread that even out what each takes
constexpr int64_t kLoraWiden = 12;       // rows from which on weights are widened once for all of them
constexpr int kLoraBlock = 4;           // rows, or vectors of columns, that share what is loaded

struct LoraProblem {
    const float* x;  // null: rows are ids
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

// What some rows have to do at one site: everything about one adapter there.
struct LoraTask {
    const int32_t* rows;
    int64_t count, rank, tile_ranks, first_column, columns;
    const int64_t* tile_a;
    const int64_t* tile_b;
    float scale;
    int64_t inner;     // where x A^T begins: [count][rank] floats
    bool whole_rows;   // B's columns are not cut: it is read but once, and in order

    int64_t tile_count() const { return (rank + tile_ranks - 1) / tile_ranks; }
    int64_t ranks_of(int64_t tile) const {
        return rank - tile * tile_ranks < tile_ranks ? rank - tile * tile_ranks : tile_ranks;
    }
};

// Some rows of a task, and a tile of A or a stretch of B's columns.
struct LoraPiece {
    const LoraTask* task;
    int64_t first_row, rows, index;
};

struct LoraPlan {
    std::vector<LoraTask> tasks;
    std::vector<LoraPiece> shrink, expand;
    int64_t inner_size, bytes;  // floats of all x A^T; of one read of all A
};

inline int64_t column_pieces(const LoraTask& task) {
    return task.whole_rows ? 1 : (task.columns + kLoraColumns - 1) / kLoraColumns;
}


// Weights that this thread will probably need next, asked for while others are at work.
struct LoraAhead {
    const char* at = nullptr;
    const char* end = nullptr;

    void ask(int cache_lines) {
        for (int i = 0; i < cache_lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

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
                                  p.tile_b + place * p.tiles, p.scales[place], plan.inner_size, false});
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
    const bool many = static_cast<int64_t>(plan.tasks.size()) >= kLoraTasksEach * num_threads();
    for (LoraTask& task : plan.tasks) {
        task.whole_rows = many && task.count <= kLoraBlock;
        for (int64_t row = 0; row < task.count; row += kLoraRows) {
            const int64_t rows = task.count - row < kLoraRows ? task.count - row : kLoraRows;
            for (int64_t i = 0; i < task.tile_count(); ++i) plan.shrink.push_back({&task, row, rows, i});
            for (int64_t i = 0; i < column_pieces(task); ++i) plan.expand.push_back({&task, row, rows, i});
        }
    }
}

// kRows rows times kRanks ranks of A, from `a` on: sixteen sums at most.
template <int kRows, int kRanks, class Element>
inline void shrink_block(const LoraProblem& p, const int32_t* rows, const Element* a, int64_t ranks, float* inner,
                         int64_t inner_stride, LoraAhead& ahead) {
    Floats sums[kRows][kRanks];
    const float* x[kRows];
    const Element* row[kRanks];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
        for (int j = 0; j < kRanks; ++j) sums[i][j] = zeros();
    }
    for (int i = 0; i < kRows; ++i) x[i] = p.x + rows[i] * p.x_stride;
    for (int j = 0; j < kRanks; ++j) row[j] = a + (j < ranks ? j : 0) * p.inputs;
    const int64_t whole = p.inputs / kLanes * kLanes;
    for (int64_t k = 0; k < whole; k += kLanes) {
        Floats values[kRows];
        for (int i = 0; i < kRows; ++i) values[i] = load(x[i] + k);
        if (kRows < kLoraBlock) ahead.ask(kRanks * sizeof(Element) / 4);
#pragma GCC unroll 16
        for (int j = 0; j < kRanks; ++j) {
            const Floats weight = load(row[j] + k);
#pragma GCC unroll 4
            for (int i = 0; i < kRows; ++i) sums[i][j] = fused(values[i], weight, sums[i][j]);
        }
    }
    Floats ended[kLanes];  // a copy: what has an address does not stay in registers
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
        for (int j = 0; j < kRanks; ++j) ended[i * kRanks + j] = sums[i][j];
    }
    for (int i = kRows * kRanks; i < kLanes; ++i) ended[i] = zeros();
    if (whole < p.inputs) {
        const int64_t left = p.inputs - whole;
        for (int i = 0; i < kRows * kRanks; ++i) {
            const Floats value = load_part(x[i / kRanks] + whole, left);
            ended[i] = fused(value, load_part(row[i % kRanks] + whole, left), ended[i]);
        }
    }
    float results[kLanes];
    store(results, sums_of(ended));
    for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kRanks && j < ranks; ++j) inner[i * inner_stride + j] = results[i * kRanks + j];
    }
}

template <int kRows, class Element>
inline void shrink_rows(const LoraProblem& p, const int32_t* rows, const Element* a, int64_t ranks, float* inner,
                         int64_t inner_stride, LoraAhead& ahead) {
    constexpr int kRanks = kRows == 1 ? 16 : kRows == 2 ? 8 : 4;
    int64_t j = 0;
    for (; ranks - j > kRanks / 2; j += kRanks) {
        shrink_block<kRows, kRanks>(p, rows, a + j * p.inputs, ranks - j, inner + j, inner_stride, ahead);
    }
    for (; j < ranks; j += 4) {  // small ranks would mostly multiply for nothing
        shrink_block<kRows, 4>(p, rows, a + j * p.inputs, ranks - j, inner + j, inner_stride, ahead);
    }
}

// Weights as floats: widened once where many rows multiply them.
template <class Element>
inline void widen_rows(const Element* from, int64_t stride, int64_t rows, int64_t width, float* to) {
    for (int64_t row = 0; row < rows; ++row, from += stride, to += width) {
        for (int64_t i = 0; i < width; i += kLanes) store_part(to + i, load_part(from + i, width - i), width - i);
    }
}

template <class Element>
inline void shrink_tile(const LoraProblem& p, const LoraPiece& piece, const Element* a, float* all_inner,
                        LoraAhead& ahead) {
    const LoraTask& task = *piece.task;
    const int64_t ranks = task.ranks_of(piece.index);
    const int32_t* rows = task.rows + piece.first_row;
    float* inner = all_inner + task.inner + piece.first_row * task.rank + piece.index * task.tile_ranks;
    for (int64_t done = 0; done < piece.rows; done += kLoraBlock) {
        const int64_t left = piece.rows - done;
        float* sums = inner + done * task.rank;
        if (left >= 4) shrink_rows<4>(p, rows + done, a, ranks, sums, task.rank, ahead);
        else if (left == 3) shrink_rows<3>(p, rows + done, a, ranks, sums, task.rank, ahead);
        else if (left == 2) shrink_rows<2>(p, rows + done, a, ranks, sums, task.rank, ahead);
        else shrink_rows<1>(p, rows + done, a, ranks, sums, task.rank, ahead);
    }
}

// Bytes have a number for each rank behind their tile of A: A's scale times B's.
template <class Element>
inline void apply_scales(const LoraProblem&, const LoraPiece&, const Element*, float*) {}

inline void apply_scales(const LoraProblem& p, const LoraPiece& piece, const int8_t* a, float* all_inner) {
    const LoraTask& task = *piece.task;
    const int64_t ranks = task.ranks_of(piece.index);
    const float* scales = reinterpret_cast<const float*>(a + (ranks * p.inputs + 3) / 4 * 4);
    float* inner = all_inner + task.inner + piece.first_row * task.rank + piece.index * task.tile_ranks;
    for (int64_t i = 0; i < piece.rows; ++i, inner += task.rank) {
        for (int64_t j = 0; j < ranks; ++j) inner[j] *= scales[j];
    }
}

template <class Element>
inline void shrink_piece(const LoraProblem& p, const LoraPiece& piece, const LoraPiece& next, float* all_inner) {
    const Element* weights = reinterpret_cast<const Element*>(p.weights);
    const Element* a = weights + piece.task->tile_a[piece.index];
    const Element* ahead_a = weights + next.task->tile_a[next.index];
    const int64_t ranks = piece.task->ranks_of(piece.index);
    LoraAhead ahead{reinterpret_cast<const char*>(ahead_a),
                    reinterpret_cast<const char*>(ahead_a + next.task->ranks_of(next.index) * p.inputs)};
    if (piece.rows < kLoraWiden) {
        shrink_tile(p, piece, a, all_inner, ahead);
    } else {
        float* wide = static_cast<float*>(thread_scratch(static_cast<size_t>(ranks * p.inputs) * sizeof(float)));
        widen_rows(a, p.inputs, ranks, p.inputs, wide);
        shrink_tile(p, piece, static_cast<const float*>(wide), all_inner, ahead);
    }
    apply_scales(p, piece, a, all_inner);
}

// A row is one where its id is, and zero elsewhere.
template <class Element>
inline void pick_piece(const LoraProblem& p, const LoraPiece& piece, float* all_inner) {
    const LoraTask& task = *piece.task;
    const Element* a = reinterpret_cast<const Element*>(p.weights) + task.tile_a[piece.index];
    for (int64_t i = piece.first_row; i < piece.first_row + piece.rows; ++i) {
        const int64_t row = task.rows[i];
        const int64_t id = p.first_id + (p.wide_ids ? reinterpret_cast<const int64_t*>(p.ids)[row]
                                                    : reinterpret_cast<const int32_t*>(p.ids)[row]);
        float* inner = all_inner + task.inner + i * task.rank + piece.index * task.tile_ranks;
        for (int64_t j = 0; j < task.ranks_of(piece.index); ++j) {
            float lanes[kLanes];
            store(lanes, load_part(a + j * p.inputs + id, 1));
            inner[j] = lanes[0];
        }
    }
    apply_scales(p, piece, a, all_inner);
}

// All of B that a piece needs, tile by tile.
template <class Element>
struct LoraAheadTiles {
    const Element* weights;
    const LoraTask* task;
    int64_t tile;
    LoraAhead ahead;

    void open() {
        if (ahead.at < ahead.end || tile >= task->tile_count()) return;
        const Element* b = weights + task->tile_b[tile];
        ahead = {reinterpret_cast<const char*>(b),
                 reinterpret_cast<const char*>(b + task->ranks_of(tile) * task->columns)};
        ++tile;
    }
};

// kRows rows of y, kVectors vectors of columns from `column` of the part on; `count` columns of the last are real.
template <int kRows, int kVectors, class Element>
inline void expand_block(const LoraProblem& p, const LoraTask& task, int64_t first_row, int64_t column, int64_t count,
                         const float* inner, LoraAheadTiles<Element>& next) {
    Floats sums[kRows][kVectors];
    for (auto& row : sums) {
        for (Floats& vector : row) vector = zeros();
    }
    for (int64_t tile = 0; tile < task.tile_count(); ++tile) {
        const Element* b = reinterpret_cast<const Element*>(p.weights) + task.tile_b[tile] + column;
        const int64_t ranks = task.ranks_of(tile);
        next.open();
        for (int64_t j = 0; j < ranks; ++j, b += task.columns, ++inner) {
            if (kRows < kLoraBlock) next.ahead.ask(kVectors * sizeof(Element) / 4);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const Floats weight = kVectors > 1 ? load(b + v * kLanes) : load_part(b, count);
#pragma GCC unroll 4
                for (int i = 0; i < kRows; ++i) {
                    sums[i][v] = fused(broadcast(inner[i * task.rank]), weight, sums[i][v]);
                }
            }
        }
    }
    const Floats scale = broadcast(task.scale);
    for (int i = 0; i < kRows; ++i) {
        float* y = p.y + task.rows[first_row + i] * p.y_stride + task.first_column + column;
        for (int v = 0; v < kVectors; ++v, y += kLanes) {
            const int64_t real = kVectors > 1 ? kLanes : count;
            store_part(y, fused(scale, sums[i][v], load_part(y, real)), real);
        }
    }
}

template <int kRows, class Element>
inline void expand_rows(const LoraProblem& p, const LoraTask& task, int64_t first_row, int64_t first, int64_t last,
                         const float* inner, LoraAheadTiles<Element>& next) {
    int64_t column = first;
    for (; column + kLoraBlock * kLanes <= last; column += kLoraBlock * kLanes) {
        expand_block<kRows, kLoraBlock, Element>(p, task, first_row, column, kLanes, inner, next);
    }
    for (; column < last; column += kLanes) {
        expand_block<kRows, 1, Element>(p, task, first_row, column, last - column, inner, next);
    }
}

// Columns first … end - 1 of the part.
template <class Element>
inline void expand_stretch(const LoraProblem& p, const LoraTask& task, const LoraPiece& piece, int64_t first,
                           int64_t end, const float* all_inner, LoraAheadTiles<Element>& next) {
    const int64_t last_row = piece.first_row + piece.rows;
    for (int64_t row = piece.first_row; row < last_row; row += kLoraBlock) {
        const float* inner = all_inner + task.inner + row * task.rank;
        const int64_t left = last_row - row;
        if (left >= 4) expand_rows<4, Element>(p, task, row, first, end, inner, next);
        else if (left == 3) expand_rows<3, Element>(p, task, row, first, end, inner, next);
        else if (left == 2) expand_rows<2, Element>(p, task, row, first, end, inner, next);
        else expand_rows<1, Element>(p, task, row, first, end, inner, next);
    }
}

// As one dense tile of floats.
template <class Element>
inline void expand_widened(const LoraProblem& p, const LoraPiece& piece, int64_t first, int64_t end,
                           const float* all_inner) {
    const LoraTask& task = *piece.task;
    const int64_t width = end - first, start = 0;
    float* wide = static_cast<float*>(thread_scratch(static_cast<size_t>(task.rank * width) * sizeof(float)));
    for (int64_t tile = 0; tile < task.tile_count(); ++tile) {
        const Element* b = reinterpret_cast<const Element*>(p.weights) + task.tile_b[tile] + first;
        widen_rows(b, task.columns, task.ranks_of(tile), width, wide + tile * task.tile_ranks * width);
    }
    LoraProblem problem = p;
    LoraTask dense = task;
    problem.weights = reinterpret_cast<const char*>(wide);
    dense.tile_b = &start;
    dense.tile_ranks = task.rank;
    dense.first_column = task.first_column + first;
    dense.columns = width;
    LoraAheadTiles<float> nothing{nullptr, &dense, 1, {}};
    expand_stretch<float>(problem, dense, piece, 0, width, all_inner, nothing);
}

template <class Element>
inline void expand_piece(const LoraProblem& p, const LoraPiece& piece, const LoraPiece& following,
                         const float* all_inner) {
    const LoraTask& task = *piece.task;
    const int64_t pieces = column_pieces(task);
    const int64_t width = ((task.columns + pieces - 1) / pieces + kLanes - 1) / kLanes * kLanes;
    const int64_t first = piece.index * width, end = first + width < task.columns ? first + width : task.columns;
    if (first >= end) return;
    if (piece.rows >= kLoraWiden) return expand_widened<Element>(p, piece, first, end, all_inner);
    LoraAheadTiles<Element> next{reinterpret_cast<const Element*>(p.weights), following.task,
                                 following.task->whole_rows ? 0 : following.task->tile_count(), {}};
    expand_stretch<Element>(p, task, piece, first, end, all_inner, next);
}

inline int64_t pieces_at_a_time(int64_t pieces, int64_t bytes) {
    const int64_t size = bytes / pieces + 1;
    return (kLoraBytes + size - 1) / size;
}

// Runs all pieces; `run` gets each with the one that its thread will probably take next.
template <class Run>
inline void run_pieces(const std::vector<LoraPiece>& all, int64_t bytes, const Run& run) {
    const LoraPiece* pieces = all.data();
    const int64_t count = static_cast<int64_t>(all.size()), grain = pieces_at_a_time(count, bytes);
    parallel_for(count, grain, [=, &run](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) run(pieces[i], pieces[i + 1 < count ? i + 1 : i]);
    });
}

template <class Element>
inline void run_lora(const LoraProblem& p) {
    static thread_local LoraPlan plan;
    make_plan(p, plan);
    if (plan.tasks.empty()) return;
    float* inner = static_cast<float*>(shared_scratch(static_cast<size_t>(plan.inner_size) * sizeof(float)));
    run_pieces(plan.shrink, plan.bytes, [&p, inner](const LoraPiece& piece, const LoraPiece& next) {
        if (p.x != nullptr) shrink_piece<Element>(p, piece, next, inner);
        else pick_piece<Element>(p, piece, inner);
    });
    run_pieces(plan.expand, plan.bytes, [&p, inner](const LoraPiece& piece, const LoraPiece& next) {
        expand_piece<Element>(p, piece, next, inner);
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
    else if (a.integer(9) == 2) run_lora<BFloat>(problem);
    else run_lora<int8_t>(problem);
}

}  // namespace QUIRE_ISA
}  // namespace quire

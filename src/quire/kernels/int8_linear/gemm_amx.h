// See gemm.h. Tiles: 0..3 sums (2 x 2), 4 and 5 rows of x, 6 and 7 weights.
#pragma once

namespace quire {
namespace QUIRE_ISA {

// Below this many rows VNNI is as quick. From here on weights are what costs, and tiles, mostly empty, read them best.
constexpr int64_t kFewestTileRows = 4;
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // of a row: 64 columns of x, or 16 channels by 4 columns of weight

// Palette 1; eight tiles of 16 rows of 64 bytes. In memory for good: the compiler does not see that
// `_tile_loadconfig` reads all of it, and drops the stores of a local one.
alignas(64) const uint8_t tile_config[64] = {
    1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0};

struct TileSession {
    TileSession() {
        // The compiler does not know that tiles read memory either: what was stored so far must be there.
        asm volatile("" ::: "memory");
        _tile_loadconfig(tile_config);
    }
    ~TileSession() { _tile_release(); }
};

// Rows of x come as tiles of 16 rows by 64 columns, each in one piece of 1 KiB, tiles of the same rows in order.
struct TileGemm {
    static constexpr int64_t kMaxRows = 32, kRowMultiple = kTileRows;
    static constexpr int8_t kFlip = 0;
    using Session = TileSession;

    static int64_t place(int64_t row, int64_t column, int64_t padded_columns) {
        const int64_t above = row / kTileRows * kTileRows;
        return above * padded_columns + column / kTileBytes * kTileSize + (row - above) * kTileBytes +
               column % kTileBytes;
    }

    template <class Background>
    static void run(const GemmInput& input, int64_t rows, int32_t* result, Background& background) {
        if (rows > kTileRows) two_tile_rows(input, result, background);
        else one_tile_row(input, result, background);
    }

  private:
    static constexpr int64_t kTileSize = kTileRows * kTileBytes;
    static constexpr size_t kResultStride = kPairChannels * sizeof(int32_t);

    static int64_t rows_per_step(const GemmInput& input) {
        const int64_t steps = input.num_groups / kTileRows;
        return (kMaxRows + steps - 1) / steps;
    }

    template <class Background>
    static void one_tile_row(const GemmInput& input, int32_t* result, Background& background) {
        const int64_t share = rows_per_step(input);
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t offset = 0; offset < input.num_groups * kTileBytes; offset += kTileSize) {
            _tile_loadd(4, input.x + offset, kTileBytes);
            _tile_loadd(6, input.first + offset, kTileBytes);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, input.second + offset, kTileBytes);
            _tile_dpbssd(1, 4, 7);
            if (input.ahead_first != nullptr) prefetch_ahead(input, offset, kTileRows);
            background(share);
        }
        _tile_stored(0, result, kResultStride);
        _tile_stored(1, result + kChannels, kResultStride);
    }

    template <class Background>
    static void two_tile_rows(const GemmInput& input, int32_t* result, Background& background) {
        const int64_t share = rows_per_step(input);
        const int8_t* lower = input.x + kTileRows * input.x_stride;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t offset = 0; offset < input.num_groups * kTileBytes; offset += kTileSize) {
            _tile_loadd(4, input.x + offset, kTileBytes);
            _tile_loadd(6, input.first + offset, kTileBytes);
            _tile_loadd(5, lower + offset, kTileBytes);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, input.second + offset, kTileBytes);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(3, 5, 7);
            if (input.ahead_first != nullptr) prefetch_ahead(input, offset, kTileRows);
            background(share);
        }
        int32_t* below = result + kTileRows * kPairChannels;
        _tile_stored(0, result, kResultStride);
        _tile_stored(1, result + kChannels, kResultStride);
        _tile_stored(2, below, kResultStride);
        _tile_stored(3, below + kChannels, kResultStride);
    }
};

// Calls function(GEMM) with the best GEMM for this number of rows.
template <class Function>
inline void with_gemm(int64_t tokens, const Function& function) {
    if (tokens >= kFewestTileRows) function(TileGemm{});
    else function(VnniGemm{});
}

}  // namespace QUIRE_ISA
}  // namespace quire

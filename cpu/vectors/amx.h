// SPDX-License-Identifier: Apache-2.0
//
// Tiles of AMX, for the source files that are compiled for it: sums are 16 x 16
// of f32. A left tile has 16 rows of 32 bf16 along k, a right one 16 pairs
// along k of 16 columns, the two of a pair beside each other.
//
// Tile instructions are opaque to the compiler: what they are to read has to be
// kept before them by an asm that clobbers memory.
#ifndef JAX_LAYOUT_CPU_VECTORS_AMX_H_
#define JAX_LAYOUT_CPU_VECTORS_AMX_H_

#include <immintrin.h>

#include <cstdint>

#include "cpu/vectors/epilogue.h"

namespace jax_layout {
namespace {

// All eight tiles are 16 rows of 64 bytes.
struct alignas(64) AmxConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr AmxConfig kAmxConfig;

// Sets the tiles up for this thread, and gives them back: it belongs to a pool
// in which others may use them as well.
class AmxTiles {
 public:
  AmxTiles() { _tile_loadconfig(&kAmxConfig); }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// kRows x kCols tiles of sums: in tiles 0 and 1, and below them 2 and 3; in
// memory as many times 1024 bytes further, each contiguous. Products use the
// others.
template <int kRows, int kCols>
struct AmxSums {
  static JAX_LAYOUT_INLINE void Zero() {
    _tile_zero(0);
    if constexpr (kCols == 2) _tile_zero(1);
    if constexpr (kRows == 2) _tile_zero(2);
    if constexpr (kRows == 2 && kCols == 2) _tile_zero(3);
  }
  static JAX_LAYOUT_INLINE void Load(const float* sums) {
    Load(sums, 16, 256, 512);
  }
  static JAX_LAYOUT_INLINE void Store(float* sums) {
    Store(sums, 16, 256, 512);
  }
  // The same of rows that are `ld` floats apart, of one array.
  static JAX_LAYOUT_INLINE void LoadRows(const float* rows, int64_t ld) {
    Load(rows, ld, 16, 16 * ld);
  }
  static JAX_LAYOUT_INLINE void StoreRows(float* rows, int64_t ld) {
    Store(rows, ld, 16, 16 * ld);
  }
  // Adds products of 32 along k. Rows of tiles are `stride` bytes apart, the
  // second tile is `tile` bytes after the first.
  static JAX_LAYOUT_INLINE void Add(const char* left, int64_t left_stride,
                                    int64_t left_tile, const char* right,
                                    int64_t right_stride, int64_t right_tile) {
    _tile_loadd(6, right, right_stride);
    _tile_loadd(4, left, left_stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kCols == 2) _tile_loadd(7, right + right_tile, right_stride);
    if constexpr (kCols == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRows == 2) _tile_loadd(5, left + left_tile, left_stride);
    if constexpr (kRows == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRows == 2 && kCols == 2) _tile_dpbf16ps(3, 5, 7);
  }

 private:
  // Rows are `ld` floats apart, the tile on the right `right` floats after the
  // first, the one below it `below`.
  static JAX_LAYOUT_INLINE void Load(const float* sums, int64_t ld,
                                     int64_t right, int64_t below) {
    const int64_t bytes = ld * static_cast<int64_t>(sizeof(float));
    _tile_loadd(0, sums, bytes);
    if constexpr (kCols == 2) _tile_loadd(1, sums + right, bytes);
    if constexpr (kRows == 2) _tile_loadd(2, sums + below, bytes);
    if constexpr (kRows == 2 && kCols == 2) {
      _tile_loadd(3, sums + below + right, bytes);
    }
  }
  static JAX_LAYOUT_INLINE void Store(float* sums, int64_t ld, int64_t right,
                                      int64_t below) {
    const int64_t bytes = ld * static_cast<int64_t>(sizeof(float));
    _tile_stored(0, sums, bytes);
    if constexpr (kCols == 2) _tile_stored(1, sums + right, bytes);
    if constexpr (kRows == 2) _tile_stored(2, sums + below, bytes);
    if constexpr (kRows == 2 && kCols == 2) {
      _tile_stored(3, sums + below + right, bytes);
    }
  }
};

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_VECTORS_AMX_H_

// SPDX-License-Identifier: Apache-2.0
//
// What the host plans once and each permute kernel receives by value: plain
// structures, each below the 4 KB of kernel arguments. Strides and offsets are
// bytes.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_PARAMS_H_
#define JAX_LAYOUT_CUDA_PERMUTE_PARAMS_H_

#include <cstdint>

#include "core/permute/plan.h"
#include "cuda/fast_division.cuh"

namespace jax_layout {

// Below this size the launch dominates: smaller blocks, so that one wave
// reaches every multiprocessor.
inline constexpr int64_t kSmallBytes = 1 << 20;
// Below this size a wave or two of large blocks would leave a tail.
inline constexpr int64_t kMediumBytes = 32 << 20;

// Counts below this are handled in 32 bits. The slack keeps a partial block
// past the end below 2^31 too, as FastDivider<uint32_t> requires.
inline constexpr int64_t kMaxCount32 = (int64_t{1} << 31) - (1 << 16);

// One axis of a walk: `count` positions, `step` coordinates apart, the last of
// them pulled back to `last` so that a whole step fits.
struct WalkDim {
  FastDivider<uint32_t> count;
  uint32_t step = 1;
  int64_t last = 0;
  int64_t x_stride = 0;
  int64_t y_stride = 0;
};

// From a linear index (fastest axis first) to an offset in x and one in y.
struct Walk {
  int rank = 0;
  WalkDim dims[kMaxRank + 1];

  void Append(int64_t extent, int64_t step, int64_t x_stride,
              int64_t y_stride) {
    WalkDim& dim = dims[rank++];
    dim.count = FastDivider<uint32_t>(
        static_cast<uint32_t>((extent + step - 1) / step));
    dim.step = static_cast<uint32_t>(step);
    dim.last = extent - step;
    dim.x_stride = x_stride;
    dim.y_stride = y_stride;
  }

  __host__ __device__ void Locate(uint32_t index, int64_t* x,
                                  int64_t* y) const {
    *x = *y = 0;
    for (int d = 0; d < rank; ++d) {
      const WalkDim& dim = dims[d];
      const uint32_t rest = dim.count.Quotient(index);
      int64_t at =
          static_cast<int64_t>(index - rest * dim.count.divisor) * dim.step;
      at = at < dim.last ? at : dim.last;
      *x += at * dim.x_stride;
      *y += at * dim.y_stride;
      index = rest;
    }
  }
};

struct CopyParams {
  int unit;  // bytes per access
  int64_t size;
};

// UInt holds the count of units, below half its range. 32 bits have few axes:
// a launch waits for its arguments, and all its threads read them.
template <typename UInt>
struct RowsParams {
  static constexpr int kMaxDims = sizeof(UInt) == 4 ? 6 : kMaxRank;
  struct Dim {
    FastDivider<UInt> extent;
    UInt x_stride;  // units
  };
  int unit;    // bytes per access
  bool words;  // of y are whole, whatever the rows
  int rank;
  UInt units;                // in y
  UInt rows;                 // in y
  FastDivider<UInt> length;  // units of a row
  Dim dims[kMaxDims];        // y's, the fastest first

  // The first unit in x of a row of y.
  __device__ UInt Row(UInt row) const {
    UInt unit = 0;
#pragma unroll 5
    for (int d = 0; d < kMaxDims - 1; ++d) {
      if (d >= rank - 1) break;
      const UInt rest = dims[d].extent.Quotient(row);
      unit += (row - rest * dims[d].extent.divisor) * dims[d].x_stride;
      row = rest;
    }
    return unit + row * dims[rank - 1].x_stride;
  }
};

// Within a slice, y[j, i] = x[i, j], both with contiguous last axis.
struct TileParams {
  int element;      // bytes
  int load, store;  // bytes per access of x and of y
  int edge;         // elements along each side of a tile
  int64_t size;     // of x, in bytes
  int64_t i_extent, j_extent;
  int64_t x_row, y_row;  // from i to i + 1 in x, from j to j + 1 in y
  uint32_t tiles;
  FastDivider<uint32_t> i_tiles, j_tiles;
  Walk slices;
};

// A tile of at most 2^14 elements has at most 14 axes longer than 1.
inline constexpr int kMaxTileRank = 14;

struct PackedParams {
  // Mixed radix, fastest first, and what one step adds to a position in
  // shared memory (in elements) or to an offset in x or y.
  struct Order {
    uint32_t extent, reciprocal;  // at least 2; 2^32 over it, rounded up
    uint32_t stride;

    // n / extent of an element n of a tile: rounding adds less than
    // extent * n / 2^32, which is nothing while both are below 2^14.
    __host__ __device__ uint32_t Quotient(uint32_t n) const {
      return MultiplyHigh(reciprocal, n);
    }
  };
  struct Run {
    FastDivider<uint32_t> extent;
    int64_t stride;
  };
  // The contiguous runs of a tile, on one side.
  struct Runs {
    int vector;  // bytes per access; below 4, more from anywhere
    uint32_t count;
    FastDivider<uint32_t> length;  // accesses
    int rank;
    Run dims[kMaxTileRank];

    // Where a run begins, relative to the tile.
    __device__ int64_t Offset(uint32_t run) const {
      int64_t offset = 0;
      for (int d = 0; d < rank; ++d) {
        const uint32_t rest = dims[d].extent.Quotient(run);
        offset += (run - rest * dims[d].extent.divisor) * dims[d].stride;
        run = rest;
      }
      return offset;
    }
  };

  int element;  // bytes
  bool wide;    // offsets in a tile need 64 bits
  int shared_bytes;
  uint32_t elements;  // of shared memory, where such runs are whole vectors
  uint32_t tiles;
  int threads;                      // of a block
  uint32_t y_length;                // elements of a run
  FastDivider<uint32_t> y_vectors;  // whole ones of 16 bytes in a run, or 1
  int rank;
  uint32_t last_stride;  // of order[rank - 1]
  Order order[kMaxTileRank];
  Runs x, y;           // of patches, y's words of their first rows
  int64_t patch_step;  // bytes in y between rows of a patch
  Walk walk;           // over tiles
  int64_t size;        // of x, in bytes
  int64_t reach;       // from a tile's first byte in x to its last element
};

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_PARAMS_H_

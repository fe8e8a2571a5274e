// SPDX-License-Identifier: Apache-2.0
//
// The innermost axes of x and y differ and both are long: a transpose of each
// slice, tile by tile through shared memory.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_TILE_CUH_
#define JAX_LAYOUT_CUDA_PERMUTE_TILE_CUH_

#include "cuda/permute/params.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {

// The shape of a block's work. A vector holds kSide elements, and a thread
// turns square patches of kSide x kSide elements in its registers:
// kSide vectors in, kSide vectors out.
template <int kElement, int kVector, int kEdge, int kThreadCount>
struct Tile {
  static constexpr int kThreads = kThreadCount;
  static constexpr int kSide = kVector / kElement;
  static constexpr int kColumns = kEdge / kSide;  // vectors along an edge
  static constexpr int kPatches = kColumns * kColumns / kThreads;  // per thread
  // Patches held at a time: 8 loads in flight and their addresses still leave
  // room for eight warps per scheduler; a patch of 16 is one anyway.
  static constexpr int kHeld = kPatches < 8 / kSide ? kPatches
                               : kSide < 8          ? 8 / kSide
                                                    : 1;
  static constexpr int kSharedBytes = kEdge * kEdge * kElement;
  // Blocks of a multiprocessor, whose registers they share: as many as leave a
  // thread enough for its loads. Left to itself, the compiler spills some.
  static constexpr int kBlocks = (kSide >= 8     ? 640
                                  : kVector < 16 ? 768
                                                 : 1280) /
                                 kThreads;
  static_assert(kColumns * kColumns % kThreads == 0 && kPatches % kHeld == 0);
  // Rows of shared memory are whole multiples of its 32 banks, which the
  // swizzle below relies on.
  static_assert(kEdge * kElement % 128 == 0);

  // Shared memory holds y's rows j as kColumns vectors each. The vector of
  // patch column `column` in a row of patch row `patch` is moved by XOR: a
  // warp that writes one column of many patches, and one that reads along a
  // row, both touch all 32 banks evenly. Vectors of less than a bank move as
  // whole banks, hence the factor.
  static __device__ int Slot(int row, int patch, int column) {
    constexpr int kPerBank = kVector < 4 ? 4 / kVector : 1;
    return row * kColumns + (column ^ (patch * kPerBank & (kColumns - 1)));
  }
};

// out[c] = element c of in[0], in[1], ... packed in that order.
template <int kElement, int kVector>
__device__ inline void TransposePatch(
    const Packet<kVector> (&in)[kVector / kElement],
    Packet<kVector> (&out)[kVector / kElement]) {
  constexpr int kSide = kVector / kElement;
  if constexpr (kSide == 1) {
    out[0] = in[0];
  } else if constexpr (kElement >= 4) {
    // Whole registers change names, no instruction is left.
    constexpr int kWords = kElement / 4;
#pragma unroll
    for (int c = 0; c < kSide; ++c) {
#pragma unroll
      for (int r = 0; r < kSide; ++r) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          out[c].word[r * kWords + w] = in[r].word[c * kWords + w];
        }
      }
    }
  } else if constexpr (kElement == 2) {
    // 2x2 halves: one byte permute per register.
#pragma unroll
    for (int w = 0; w < kSide / 2; ++w) {
#pragma unroll
      for (int q = 0; q < kSide / 2; ++q) {
        const uint32_t a = in[2 * q].word[w], b = in[2 * q + 1].word[w];
        out[2 * w].word[q] = __byte_perm(a, b, 0x5410);
        out[2 * w + 1].word[q] = __byte_perm(a, b, 0x7632);
      }
    }
  } else {
    // 4x4 bytes: two byte permutes per register.
#pragma unroll
    for (int w = 0; w < kSide / 4; ++w) {
#pragma unroll
      for (int q = 0; q < kSide / 4; ++q) {
        const uint32_t a = in[4 * q].word[w], b = in[4 * q + 1].word[w];
        const uint32_t c = in[4 * q + 2].word[w], d = in[4 * q + 3].word[w];
        const uint32_t ab_low = __byte_perm(a, b, 0x5140);   // a0 b0 a1 b1
        const uint32_t ab_high = __byte_perm(a, b, 0x7362);  // a2 b2 a3 b3
        const uint32_t cd_low = __byte_perm(c, d, 0x5140);
        const uint32_t cd_high = __byte_perm(c, d, 0x7362);
        out[4 * w].word[q] = __byte_perm(ab_low, cd_low, 0x5410);
        out[4 * w + 1].word[q] = __byte_perm(ab_low, cd_low, 0x7632);
        out[4 * w + 2].word[q] = __byte_perm(ab_high, cd_high, 0x5410);
        out[4 * w + 3].word[q] = __byte_perm(ab_high, cd_high, 0x7632);
      }
    }
  }
}

// x to shared memory. i_left and j_left count the elements from the tile's
// corner to the end of the slice; kWhole says that they cover the tile, and
// leaves a loop without conditions. A patch is inside or outside as a whole,
// since kSide divides both extents.
template <typename T, int kElement, int kVector, bool kWhole>
__device__ inline void LoadTile(const char* x, int64_t x_row, int64_t i_left,
                                int64_t j_left, char* shared) {
  constexpr int kSide = T::kSide;
#pragma unroll 1
  for (int held = 0; held < T::kPatches; held += T::kHeld) {
    Packet<kVector> in[T::kHeld][kSide];
#pragma unroll
    for (int h = 0; h < T::kHeld; ++h) {
      const int patch = threadIdx.x + (held + h) * T::kThreads;
      const int i = patch / T::kColumns * kSide;
      const int j = patch % T::kColumns * kSide;
      if (kWhole || (i < i_left && j < j_left)) {
        const char* from = x + i * x_row + j * kElement;
#pragma unroll
        for (int r = 0; r < kSide; ++r) {
          in[h][r] = LoadGlobal<kVector>(from + r * x_row);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < T::kHeld; ++h) {
      const int patch = threadIdx.x + (held + h) * T::kThreads;
      const int i = patch / T::kColumns;
      const int j = patch % T::kColumns;
      if (kWhole || (i * kSide < i_left && j * kSide < j_left)) {
        Packet<kVector> out[kSide];
        TransposePatch<kElement, kVector>(in[h], out);
#pragma unroll
        for (int c = 0; c < kSide; ++c) {
          const int slot = T::Slot(j * kSide + c, j, i);
          StoreShared<kVector>(shared + slot * kVector, out[c]);
        }
      }
    }
  }
}

// Shared memory to y.
template <typename T, int kElement, int kVector, bool kWhole>
__device__ inline void StoreTile(char* y, int64_t y_row, int64_t i_left,
                                 int64_t j_left, const char* shared) {
  constexpr int kSide = T::kSide;
  constexpr int kVectors = T::kPatches * kSide;
  constexpr int kHeld = kVectors < 8 ? kVectors : 8;
#pragma unroll 1
  for (int held = 0; held < kVectors; held += kHeld) {
    Packet<kVector> out[kHeld];
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int vector = threadIdx.x + (held + h) * T::kThreads;
      const int j = vector / T::kColumns;
      const int i = vector % T::kColumns;
      // What lies outside was not loaded either.
      if (kWhole || (i * kSide < i_left && j < j_left)) {
        const int slot = T::Slot(j, j / kSide, i);
        out[h] = LoadShared<kVector>(shared + slot * kVector);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int vector = threadIdx.x + (held + h) * T::kThreads;
      const int j = vector / T::kColumns;
      const int i = vector % T::kColumns;
      if (kWhole || (i * kSide < i_left && j < j_left)) {
        StoreGlobal<kVector>(y + j * y_row + i * kVector, out[h]);
      }
    }
  }
}

// Launch: 1-D, one block per kEdge x kEdge tile; tiles along i (contiguous in
// y) come first, then along j (contiguous in x), then slices. 64-bit corners,
// and a 64-bit row stride inside.
// clang-format off
template <int kElement, int kVector, int kEdge, int kThreads>
__global__ __launch_bounds__(
    kThreads, Tile<kElement, kVector, kEdge, kThreads>::kBlocks)
void TileKernel(const __grid_constant__ TileParams p,
                const char* __restrict__ x, char* __restrict__ y) {
  // clang-format on
  using T = Tile<kElement, kVector, kEdge, kThreads>;
  uint32_t rest = p.i_tiles.Quotient(blockIdx.x);
  const int64_t i =
      static_cast<int64_t>(blockIdx.x - rest * p.i_tiles.divisor) * kEdge;
  const uint32_t slice = p.j_tiles.Quotient(rest);
  const int64_t j =
      static_cast<int64_t>(rest - slice * p.j_tiles.divisor) * kEdge;
  int64_t x_offset, y_offset;
  p.slices.Locate(slice, &x_offset, &y_offset);
  x += x_offset + i * p.x_row + j * kElement;
  y += y_offset + j * p.y_row + i * kElement;
  const int64_t i_left = p.i_extent - i, j_left = p.j_extent - j;

  char* shared = SharedMemory();
  if (i_left >= kEdge && j_left >= kEdge) {
    LoadTile<T, kElement, kVector, true>(x, p.x_row, i_left, j_left, shared);
    __syncthreads();
    StoreTile<T, kElement, kVector, true>(y, p.y_row, i_left, j_left, shared);
  } else {
    LoadTile<T, kElement, kVector, false>(x, p.x_row, i_left, j_left, shared);
    __syncthreads();
    StoreTile<T, kElement, kVector, false>(y, p.y_row, i_left, j_left, shared);
  }
}

// An axis of fewer elements, or of fewer bytes, is left to PackedKernel, which
// can join it with its neighbours.
inline constexpr int64_t kTileMinExtent = 32;
inline constexpr int64_t kTileMinBytes = 64;

inline bool FitsTile(const PermutePlan& plan) {
  const int64_t i_extent = plan.dims[plan.rank - 1].extent;
  const int64_t j_extent = plan.dims[plan.InnermostOfX()].extent;
  for (int64_t extent : {i_extent, j_extent}) {
    if (extent < kTileMinExtent || extent * plan.chunk < kTileMinBytes) {
      return false;
    }
  }
  return true;
}

// The compiled shapes: vectors of 16 bytes; where extents or pointers forbid
// that, of 4 bytes, or single elements.
inline TileParams PlanTile(const PermutePlan& plan, int alignment) {
  TileParams p = {};
  const int element = static_cast<int>(plan.chunk);
  const int j_dim = plan.InnermostOfX(), i_dim = plan.rank - 1;
  p.element = element;
  p.i_extent = plan.dims[i_dim].extent;
  p.j_extent = plan.dims[j_dim].extent;
  p.x_row = plan.dims[i_dim].x_stride * element;
  p.y_row = plan.dims[j_dim].y_stride * element;

  // Every axis other than the innermost one begins on multiples of its stride,
  // and those are multiples of the innermost extent.
  int64_t bits = alignment | p.i_extent * element | p.j_extent * element;
  const int aligned = static_cast<int>(bits & -bits);
  p.vector = aligned >= 16 ? 16 : element < 4 && aligned >= 4 ? 4 : element;
  const bool small = plan.size < kSmallBytes && p.vector == 16;
  p.edge = element == 1   ? 128
           : element <= 4 ? (small && element == 4 ? 32 : 64)
                          : (small && element == 16 ? 16 : 32);

  const int64_t i_tiles = (p.i_extent + p.edge - 1) / p.edge;
  const int64_t j_tiles = (p.j_extent + p.edge - 1) / p.edge;
  const int64_t slices = plan.size / plan.chunk / p.i_extent / p.j_extent;
  // Each factor is at most the count of elements over 16, so no overflow.
  if (i_tiles * j_tiles > kMaxCount32 / slices) return p;  // p.tiles == 0
  p.tiles = static_cast<uint32_t>(i_tiles * j_tiles * slices);
  p.i_tiles = FastDivider<uint32_t>(static_cast<uint32_t>(i_tiles));
  p.j_tiles = FastDivider<uint32_t>(static_cast<uint32_t>(j_tiles));
  for (int d = plan.rank - 2; d >= 0; --d) {
    if (d == j_dim) continue;
    p.slices.Append(plan.dims[d].extent, 1, plan.dims[d].x_stride * element,
                    plan.dims[d].y_stride * element);
  }
  return p;
}

}  // namespace jax_layout

#endif  // JAX_LAYOUT_CUDA_PERMUTE_TILE_CUH_

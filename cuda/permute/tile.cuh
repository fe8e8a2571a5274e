// SPDX-License-Identifier: Apache-2.0
//
// The innermost axes of x and y differ and both are long: a transpose of each
// slice, tile by tile through shared memory.
#ifndef JAX_LAYOUT_CUDA_PERMUTE_TILE_CUH_
#define JAX_LAYOUT_CUDA_PERMUTE_TILE_CUH_

#include "cuda/permute/params.h"
#include "cuda/vector_access.cuh"

namespace jax_layout {

// The shape of a block's work. Shared memory holds y's rows in vectors of 16
// bytes, of kDown elements. A thread turns patches in its registers: kDown
// loads of kAcross elements each become kAcross vectors. Each side has the
// accesses that it allows: kLoad and kStore bytes; rows of x that begin
// anywhere are loaded in words all the same, which a kLoad of less than 4 bytes
// says.
template <int kElement, int kLoad, int kStore, int kEdge, int kThreadCount>
struct Tile {
  static constexpr int kThreads = kThreadCount;
  static constexpr int kDown = 16 / kElement;
  static constexpr bool kAnywhere = kLoad < 4;
  static constexpr int kLoaded = kAnywhere ? 4 : kLoad;
  static constexpr int kAcross = kLoaded / kElement;
  static constexpr int kRowBytes = kEdge * kElement;
  static constexpr int kColumns = kRowBytes / 16;  // vectors of a row
  static constexpr int kPatchesAcross = kEdge / kAcross;
  static constexpr int kPatches = kColumns * kPatchesAcross / kThreads;
  // Patches held at a time, of 8 loads, or 16 narrow ones: these and their
  // addresses leave room for eight warps per scheduler.
  static constexpr int kAtOnce = (kLoad < 16 ? 16 : 8) / kDown;
  static constexpr int kHeld = kAtOnce < 1          ? 1
                               : kAtOnce < kPatches ? kAtOnce
                                                    : kPatches;
  static constexpr int kSharedBytes = kEdge * kRowBytes;
  // Blocks of a multiprocessor, whose registers they share: as many as leave a
  // thread enough for its loads. Left to itself, the compiler spills some.
  static constexpr int kBlocks = (kLoad == 2      ? 1280
                                  : kLoad < 16    ? 1024
                                  : kElement <= 2 ? (kStore < 16 ? 512 : 640)
                                                  : 1280) /
                                 kThreads;
  static_assert(kColumns * kPatchesAcross % kThreads == 0);
  static_assert(kPatches % kHeld == 0);
  // Rows of shared memory are whole multiples of its 32 banks, which the
  // swizzle below relies on.
  static_assert(kRowBytes % 128 == 0);

  // Where byte `byte` of y's row `row` is. Vectors are moved by XOR with the
  // row's patch: a warp that writes one column of many patches, and one that
  // reads along a row, both touch all 32 banks evenly.
  static __device__ int At(int row, int byte) {
    return row * kRowBytes + (byte ^ (row / kAcross & (kColumns - 1)) * 16);
  }
};

// out[c] = element c of in[0], in[1], ... packed in that order.
template <int kElement, int kLoad>
__device__ inline void TransposePatch(const Packet<kLoad> (&in)[16 / kElement],
                                      Packet<16> (&out)[kLoad / kElement]) {
  constexpr int kAcross = kLoad / kElement;
  constexpr int kWordsIn = Packet<kLoad>::kWords;
  if constexpr (kElement >= 4) {
    // Whole registers change names, no instruction is left.
    constexpr int kWords = kElement / 4;
#pragma unroll
    for (int c = 0; c < kAcross; ++c) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        out[c].word[q] = in[q / kWords].word[c * kWords + q % kWords];
      }
    }
  } else if constexpr (kElement == 2) {
    // 2x2 halves: one byte permute per register.
#pragma unroll
    for (int w = 0; w < kWordsIn; ++w) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const uint32_t a = in[2 * q].word[w], b = in[2 * q + 1].word[w];
        out[2 * w].word[q] = __byte_perm(a, b, 0x5410);
        if constexpr (kAcross > 1) {
          out[2 * w + 1].word[q] = __byte_perm(a, b, 0x7632);
        }
      }
    }
  } else {
    // 4x4 bytes: two byte permutes per register.
#pragma unroll
    for (int w = 0; w < kWordsIn; ++w) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        uint32_t rows[4], columns[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) rows[r] = in[4 * q + r].word[w];
        TransposeBytes(rows, columns);
#pragma unroll
        for (int c = 0; c < 4; ++c) out[4 * w + c].word[q] = columns[c];
      }
    }
  }
}

// x to shared memory. i_left and j_left count the elements from the tile's
// corner to the end of the slice, kEdge at most. Past them, what is there is
// loaded again, so that no load waits for a branch; kWhole says that there is
// no such thing or, of rows that begin anywhere, that the words around are in
// x, which ends at x_end.
template <typename T, int kElement, bool kWhole>
__device__ inline void LoadTile(const char* x, const char* x_end, int64_t x_row,
                                int i_left, int j_left, char* shared) {
  constexpr int kLoad = T::kLoaded;
#pragma unroll 1
  for (int held = 0; held < T::kPatches; held += T::kHeld) {
    Packet<kLoad> in[T::kHeld][T::kDown];
#pragma unroll
    for (int h = 0; h < T::kHeld; ++h) {
      const int patch = threadIdx.x + (held + h) * T::kThreads;
      const int i = patch / T::kPatchesAcross * T::kDown;
      const int j = patch % T::kPatchesAcross * T::kAcross;
      if constexpr (kWhole && !T::kAnywhere) {
        const char* from = x + i * x_row + j * kElement;
#pragma unroll
        for (int r = 0; r < T::kDown; ++r) {
          in[h][r] = LoadGlobal<kLoad>(from + r * x_row);
        }
      } else {
        constexpr int kLast = T::kAnywhere ? 1 : T::kAcross;
        const char* from = x + (j < j_left ? j : j_left - kLast) * kElement;
#pragma unroll
        for (int r = 0; r < T::kDown; ++r) {
          const int row = i + r < i_left ? i + r : i_left - 1;
          const char* at = from + row * x_row;
          if constexpr (!T::kAnywhere) {
            in[h][r] = LoadGlobal<kLoad>(at);
          } else if constexpr (kWhole) {
            in[h][r] = LoadAround<4>(at).Join();
          } else {
            in[h][r] = LoadBytes<4>(at, x_end).Join();
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < T::kHeld; ++h) {
      const int patch = threadIdx.x + (held + h) * T::kThreads;
      const int column = patch / T::kPatchesAcross;
      const int row = patch % T::kPatchesAcross * T::kAcross;
      Packet<16> out[T::kAcross];
      TransposePatch<kElement, kLoad>(in[h], out);
#pragma unroll
      for (int c = 0; c < T::kAcross; ++c) {
        StoreShared<16>(shared + T::At(row + c, column * 16), out[c]);
      }
    }
  }
}

// Shared memory to y, whose rows begin on multiples of kStore.
template <typename T, int kElement, int kStore, bool kWhole>
__device__ inline void StoreTile(char* y, int64_t y_row, int i_left, int j_left,
                                 const char* shared) {
  constexpr int kPieces = T::kRowBytes / kStore;  // of a row
  constexpr int kEach = T::kSharedBytes / kStore / T::kThreads;
  constexpr int kHeld = kEach < 8 ? kEach : 8;
#pragma unroll 1
  for (int held = 0; held < kEach; held += kHeld) {
    Packet<kStore> out[kHeld];
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int piece = threadIdx.x + (held + h) * T::kThreads;
      out[h] = LoadShared<kStore>(
          shared + T::At(piece / kPieces, piece % kPieces * kStore));
    }
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int piece = threadIdx.x + (held + h) * T::kThreads;
      const int j = piece / kPieces, byte = piece % kPieces * kStore;
      if (kWhole || (byte < i_left * kElement && j < j_left)) {
        StoreGlobal<kStore>(y + j * y_row + byte, out[h]);
      }
    }
  }
}

// The same for rows that begin anywhere: whole words of y, a warp for each row,
// and single bytes of the words that it shares with the tiles beside, eight
// threads for each row.
template <typename T, int kElement>
__device__ inline void StoreWords(char* y, int64_t y_row, int i_left,
                                  int j_left, const char* shared) {
  static_assert(T::kRowBytes == 32 * 4);
  constexpr int kRows = T::kRowBytes / kElement;
  constexpr int kWarps = T::kThreads / 32, kEights = T::kThreads / 8;
  const int bytes = i_left * kElement;
  const int word_at = threadIdx.x % 32 * 4;
#pragma unroll 8
  for (int row = 0; row < kRows; row += kWarps) {
    const int j = row + threadIdx.x / 32;
    char* to = y + j * y_row;
    // Bytes of the row's first word that are before it.
    const int before = static_cast<int>(reinterpret_cast<uintptr_t>(to) & 3);
    const auto low =
        LoadShared<4>(shared + T::At(j, word_at > 0 ? word_at - 4 : 0));
    const auto high = LoadShared<4>(shared + T::At(j, word_at));
    const uint32_t word =
        __byte_perm(low.word[0], high.word[0], 0x7654 - 0x1111 * before);
    const int at = word_at - before;
    if (j < j_left && at >= 0 && at + 4 <= bytes) {
      StoreGlobal<4>(to + at, {{word}});
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; row += kEights) {
    const int j = row + threadIdx.x / 8;
    char* to = y + j * y_row;
    const int at = EdgeByte<4>(to, bytes, threadIdx.x % 8);
    if (j < j_left && at >= 0) {
      StoreGlobal<1>(to + at, LoadShared<1>(shared + T::At(j, at)));
    }
  }
}

// Launch: 1-D, one block per kEdge x kEdge tile; tiles along i (contiguous in
// y) come first, then along j (contiguous in x), then slices. 64-bit corners,
// and a 64-bit row stride inside.
// clang-format off
template <int kElement, int kLoad, int kStore, int kEdge, int kThreads>
__global__ __launch_bounds__(
    kThreads, Tile<kElement, kLoad, kStore, kEdge, kThreads>::kBlocks)
void TileKernel(const __grid_constant__ TileParams p,
                const char* __restrict__ x, char* __restrict__ y) {
  // clang-format on
  using T = Tile<kElement, kLoad, kStore, kEdge, kThreads>;
  uint32_t rest = p.i_tiles.Quotient(blockIdx.x);
  const int64_t i =
      static_cast<int64_t>(blockIdx.x - rest * p.i_tiles.divisor) * kEdge;
  const uint32_t slice = p.j_tiles.Quotient(rest);
  const int64_t j =
      static_cast<int64_t>(rest - slice * p.j_tiles.divisor) * kEdge;
  int64_t x_offset, y_offset;
  p.slices.Locate(slice, &x_offset, &y_offset);
  const char *x_begin = x, *x_end = x + p.size;
  x += x_offset + i * p.x_row + j * kElement;
  y += y_offset + j * p.y_row + i * kElement;
  const int i_left =
      static_cast<int>(p.i_extent - i < kEdge ? p.i_extent - i : kEdge);
  const int j_left =
      static_cast<int>(p.j_extent - j < kEdge ? p.j_extent - j : kEdge);
  const bool whole = i_left == kEdge && j_left == kEdge;

  // Of the first element and of the last, the words around.
  const bool inside =
      x - (reinterpret_cast<uintptr_t>(x) & 3) >= x_begin &&
      x + (i_left - 1) * p.x_row + (j_left - 1) * kElement + 8 <= x_end;

  char* shared = SharedMemory();
  if (T::kAnywhere ? inside : whole) {
    LoadTile<T, kElement, true>(x, x_end, p.x_row, i_left, j_left, shared);
  } else {
    LoadTile<T, kElement, false>(x, x_end, p.x_row, i_left, j_left, shared);
  }
  __syncthreads();
  if constexpr (kStore < 16 && kElement < 4) {
    StoreWords<T, kElement>(y, p.y_row, i_left, j_left, shared);
  } else if (whole) {
    StoreTile<T, kElement, kStore, true>(y, p.y_row, i_left, j_left, shared);
  } else {
    StoreTile<T, kElement, kStore, false>(y, p.y_row, i_left, j_left, shared);
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

// The compiled shapes: accesses of 16 bytes; on a side whose extent or pointers
// forbid that, of 4 bytes, or single elements. Elements of 1 and 2 bytes move
// in words wherever rows begin: a load of 1 or 2 bytes says so.
inline TileParams PlanTile(const PermutePlan& plan, int alignment) {
  TileParams p = {};
  const int element = static_cast<int>(plan.chunk);
  const int j_dim = plan.InnermostOfX(), i_dim = plan.rank - 1;
  p.element = element;
  p.size = plan.size;
  p.i_extent = plan.dims[i_dim].extent;
  p.j_extent = plan.dims[j_dim].extent;
  p.x_row = plan.dims[i_dim].x_stride * element;
  p.y_row = plan.dims[j_dim].y_stride * element;

  // Every axis other than the innermost one begins on multiples of its stride,
  // and those are multiples of the innermost extent.
  const auto aligned = [&](int64_t extent) {
    const int64_t bits = alignment | extent * element;
    return static_cast<int>(bits & -bits);
  };
  const int x_aligned = aligned(p.j_extent), y_aligned = aligned(p.i_extent);
  p.load = x_aligned >= 16 ? 16 : element < 4 && x_aligned >= 4 ? 4 : element;
  p.store = y_aligned >= 16 ? 16 : element < 4 ? 4 : element;
  // Small tiles where few would leave multiprocessors without one at the end.
  const bool small = p.load == 16 && p.store == 16 &&
                     plan.size < (element == 4 ? kMediumBytes : kSmallBytes);
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

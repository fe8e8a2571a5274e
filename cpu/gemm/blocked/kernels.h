// SPDX-License-Identifier: Apache-2.0
//
// Blocks of a matrix product, written once over a vector type V (see
// cpu/vectors/epilogue.h) and included by one source file per instruction set.
//
//                   cols
//             +--+--+--+--+
//           k |  |  |  |  |  panels: k_block x a tile's columns
//             +--+--+--+--+
//        k
//   +--------+--+
//   |        |  |  tile: its sums stay in registers
//   +--------+--+
//   |        |  |
//   +--------+--+
//     panels pass by from L2
//
// A tile multiplies a vector or two of b with single elements of a. In a packed
// panel, what is needed for one k is together and the next k follows. Where the
// processor multiplies pairs of bf16, a pair stands in the place of a float,
// and panels are half as deep.
#ifndef JAX_LAYOUT_CPU_GEMM_BLOCKED_KERNELS_H_
#define JAX_LAYOUT_CPU_GEMM_BLOCKED_KERNELS_H_

#include <cstdint>

#include "cpu/vectors/epilogue.h"

namespace jax_layout {

// Rows of a or columns of b, to panels.
struct BlockedPack {
  DType type;
  const void* from;
  int64_t ld;
  bool along;  // k is contiguous, else the rows or columns are
  int64_t width, k;
  bool rows;  // panels of tiles' rows (RowsOfTile()), else of their columns
  float* to;
  int64_t panel;  // from one panel to the next
};

// Memory that tiles ask for while they multiply, a cache line per k: of each
// of `rows` rows so many lines.
struct BlockedAhead {
  const char* from;
  int64_t ld;  // in bytes
  int64_t rows, lines;
  int64_t row = 0, line = 0;  // that come next
};

// A panel of b, times some rows of a: a part of y.
struct BlockedPanel {
  int64_t rows, cols, k;
  int64_t k_block;
  // Packed rows are in panels, `a_panel` apart.
  bool a_packed, b_packed;
  const float* a;
  int64_t a_panel, a_row, a_k;
  const float* b;
  int64_t b_k;
  int64_t ld;  // of y
  // The result is f32 and the product itself, which is then summed in y, else
  // in `sums`: rows x the columns of a tile.
  bool plain;
  float* sums;
  GemmEpilogue epilogue;
  BlockedAhead ahead;
};

struct BlockedKernels {
  int64_t rows, cols;  // of a tile, at most
  int64_t lanes;
  int64_t depth;  // elements along k in the place of a float
  bool masks;     // loads parts of vectors
  void (*pack)(const BlockedPack&);
  void (*run)(BlockedPanel&);
};

#ifdef __x86_64__
extern const BlockedKernels kBlockedAvx512Bf16, kBlockedAvx512, kBlockedAvx2;
#elif defined(__aarch64__)
extern const BlockedKernels kBlockedNeon;
#endif

constexpr int64_t kCacheLine = 64;

namespace {

JAX_LAYOUT_INLINE int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// Operands widened to f32.
template <class V>
struct Widened : V {
  using Reg = typename V::Reg;
  static constexpr int64_t kDepth = 1;

  static JAX_LAYOUT_INLINE Reg MultiplyAdd(Reg sum, Reg left, Reg right) {
    return sum + left * right;
  }
  // Of `rows` rows, up to kDepth, `lanes` columns.
  template <class T>
  static JAX_LAYOUT_INLINE Reg LoadAcross(const T* p, int64_t, int64_t,
                                          int lanes) {
    return V::Load(p, lanes);
  }
  // So many elements of a row, up to kDepth times the lanes.
  template <class T>
  static JAX_LAYOUT_INLINE Reg LoadAlong(const T* p, int count) {
    return V::Load(p, count);
  }
};

// Rows in tiles of nearly the same size.
struct TileRows {
  int64_t first, count;
};
JAX_LAYOUT_INLINE TileRows RowsOfTile(int64_t rows, int64_t tiles,
                                      int64_t tile) {
  const int64_t first = rows * tile / tiles;
  return {first, rows * (tile + 1) / tiles - first};
}

// From one k to the next, in a panel of so many rows. Those of less than a
// vector overlap while they are stored: memory for one more must follow.
JAX_LAYOUT_INLINE constexpr int64_t PanelStride(int64_t rows, int64_t lanes) {
  return rows <= lanes ? rows : (rows + lanes - 1) / lanes * lanes;
}

// A panel's place among what is packed.
struct PanelPlace {
  int64_t first, width;
  int64_t stride;  // from one k to the next
};

template <class V>
JAX_LAYOUT_INLINE PanelPlace PlaceOf(const BlockedPack& p, int64_t panels,
                                     int64_t i) {
  constexpr int64_t kCols = V::kTileVectors * V::kLanes;
  if (p.rows) {
    const auto [first, count] = RowsOfTile(p.width, panels, i);
    return {first, count, PanelStride(count, V::kLanes)};
  }
  return {i * kCols, Least(kCols, p.width - i * kCols), kCols};
}

// Rows of panels next to each other, so that long pieces of the operand's rows
// are read.
template <class V, class T>
void PackAcross(const BlockedPack& p, int64_t panels) {
  constexpr int64_t kLanes = V::kLanes, kDepth = V::kDepth;
  constexpr int64_t kAhead = 8;  // rows that are asked for
  for (int64_t q = 0; q < p.k; q += kDepth) {
    const T* row = static_cast<const T*>(p.from) + q * p.ld;
    const int64_t rows = Least(kDepth, p.k - q);
    // Of what follows a row in memory, whole vectors may have some.
    const bool whole = (p.k - q - rows) * p.ld >= kLanes;
    for (int64_t i = 0; i < panels; ++i) {
      const auto [first, width, stride] = PlaceOf<V>(p, panels, i);
      float* to = p.to + i * p.panel + q / kDepth * stride;
      for (int64_t j = 0; j < width; j += kLanes) {
        const int n = whole ? kLanes : Least(kLanes, width - j);
        for (int64_t r = 0; r < kDepth; ++r) {
          __builtin_prefetch(row + (kAhead + r) * p.ld + first + j);
        }
        V::Store(to + j, V::LoadAcross(row + first + j, p.ld, rows, n));
      }
    }
  }
}

template <class V, class T>
void PackAlong(const BlockedPack& p, int64_t panels) {
  using Reg = typename V::Reg;
  constexpr int64_t kLanes = V::kLanes, kMost = V::kDepth * kLanes;
  for (int64_t i = 0; i < panels; ++i) {
    const auto [first, width, stride] = PlaceOf<V>(p, panels, i);
    for (int64_t j = 0; j < width; j += kLanes) {
      const int64_t rows = Least(kLanes, width - j);
      for (int64_t q = 0; q < p.k; q += kMost) {
        const T* from = static_cast<const T*>(p.from) + (first + j) * p.ld + q;
        float* to = p.to + i * p.panel + q / V::kDepth * stride + j;
        const int count = static_cast<int>(Least(kMost, p.k - q));
        const int n = (count + V::kDepth - 1) / V::kDepth;
        Reg r[kLanes];
        if (rows == kLanes && count == kMost) {
#pragma GCC unroll 16
          for (int l = 0; l < kLanes; ++l) {
            r[l] = V::LoadAlong(from + l * p.ld, kMost);
          }
        } else {
          for (int l = 0; l < kLanes; ++l) {
            r[l] = l < rows ? V::LoadAlong(from + l * p.ld, count) : V::Zero();
          }
        }
        V::Transpose(r);
        if (n == kLanes) {
#pragma GCC unroll 16
          for (int l = 0; l < kLanes; ++l) V::Store(to + l * stride, r[l]);
        } else {
          for (int l = 0; l < n; ++l) V::Store(to + l * stride, r[l]);
        }
      }
    }
  }
}

template <class V, class T>
void PackOf(const BlockedPack& p) {
  const int64_t most = p.rows ? V::kTileRows : V::kTileVectors * V::kLanes;
  const int64_t panels = (p.width + most - 1) / most;
  p.along ? PackAlong<V, T>(p, panels) : PackAcross<V, T>(p, panels);
}

template <class V>
void Pack(const BlockedPack& p) {
  if constexpr (V::kDepth > 1) {
    PackOf<V, BF16>(p);
  } else {
    if (p.type == DType::kBF16) return PackOf<V, BF16>(p);
    if (p.type == DType::kF16) return PackOf<V, F16>(p);
    PackOf<V, float>(p);
  }
}

struct TileArguments {
  const float* a;
  int64_t a_row, a_k;
  const float* b;
  int64_t b_k;
  int64_t k;
  int tail;  // columns of the last vector
  bool add;
  float* sums;
  int64_t ld;
  const char* ahead;
  int64_t ahead_ld, ahead_count;
};

// Packed: a's stride is known, and all of the last vector of b is there.
template <class V, int kRows, int kVectors, bool kPacked>
void Tile(const TileArguments& arguments) {
  const TileArguments t = arguments;  // stores do not change a copy
  using Reg = typename V::Reg;
  constexpr int kLanes = V::kLanes;
  Reg sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = V::Zero();
  }
  const float* a = t.a;
  const float* b = t.b;
  const char* ahead = t.ahead;
  const int64_t a_row = kPacked ? 1 : t.a_row;
  const int64_t a_k = kPacked ? PanelStride(kRows, kLanes) : t.a_k;
  const int64_t b_k = kPacked ? V::kTileVectors * kLanes : t.b_k;
  for (int64_t p = 0; p < t.k; ++p) {
    if constexpr (kPacked && V::kPrefetch > 0) {
      static_assert(kLanes * sizeof(float) == kCacheLine);
      for (int64_t line = 0; line < V::kTileVectors; ++line) {
        __builtin_prefetch(b + V::kPrefetch * b_k + line * kLanes);
      }
      __builtin_prefetch(a + V::kPrefetch * a_k);
    }
    Reg right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      right[v] = !kPacked && V::kMasks && v == kVectors - 1
                     ? V::Load(b + v * kLanes, t.tail)
                     : V::Load(b + v * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Reg left = V::Set(a[r * a_row]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = V::MultiplyAdd(sum[r][v], left, right[v]);
      }
    }
    a += a_k;
    b += b_k;
    if (p < t.ahead_count) {
      __builtin_prefetch(ahead, 0, 2);
      ahead += t.ahead_ld;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = t.sums + r * t.ld + v * kLanes;
      const int n = v == kVectors - 1 ? t.tail : kLanes;
      if (t.add) sum[r][v] = sum[r][v] + V::Load(to, n);
      V::Store(to, sum[r][v], n);
    }
  }
}

using TileFunction = void(const TileArguments&);

// By the rows and vectors of a tile.
template <class V, bool kPacked>
struct Tiles {
  TileFunction* at[V::kTileRows][V::kTileVectors];

  constexpr Tiles() : at() { Row<1>(); }
  template <int kRows>
  constexpr void Row() {
    Column<kRows, 1>();
    if constexpr (kRows < V::kTileRows) Row<kRows + 1>();
  }
  template <int kRows, int kVectors>
  constexpr void Column() {
    at[kRows - 1][kVectors - 1] = Tile<V, kRows, kVectors, kPacked>;
    if constexpr (kVectors < V::kTileVectors) Column<kRows, kVectors + 1>();
  }
};
template <class V, bool kPacked>
constexpr Tiles<V, kPacked> kTiles;

template <class V>
void FinishTile(const BlockedPanel& b, const float* sums, int64_t row,
                int64_t rows) {
  constexpr int64_t kLanes = V::kLanes;
  constexpr int64_t kCols = V::kTileVectors * kLanes;
  auto finish = [&]<class T, Activation kActivation, Activation kDerivative>() {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < b.cols; j += kLanes) {
        Finish<V, T, kActivation, kDerivative>(
            b.epilogue, V::Load(sums + i * kCols + j), (row + i) * b.ld + j, j,
            static_cast<int>(Least(kLanes, b.cols - j)));
      }
    }
  };
  if (b.epilogue.result == DType::kBF16) {
    WithActivation<BF16>(b.epilogue, finish);
  } else if (b.epilogue.result == DType::kF16) {
    WithActivation<F16>(b.epilogue, finish);
  } else {
    WithActivation<float>(b.epilogue, finish);
  }
}

// The next lines, at most one per k.
JAX_LAYOUT_INLINE void AskAhead(BlockedAhead& a, TileArguments& t) {
  t.ahead_count = 0;
  if (a.line == a.lines) return;
  t.ahead = a.from + a.row * a.ld + a.line * kCacheLine;
  t.ahead_ld = a.ld;
  t.ahead_count = Least(t.k, a.rows - a.row);
  a.row += t.ahead_count;
  if (a.row == a.rows) {
    a.row = 0;
    ++a.line;
  }
}

template <class V>
void RunPanel(BlockedPanel& b) {
  constexpr int64_t kLanes = V::kLanes;
  constexpr int64_t kRows = V::kTileRows, kCols = V::kTileVectors * kLanes;
  const bool packed = b.a_packed && b.b_packed;
  const int64_t vectors = (b.cols + kLanes - 1) / kLanes;
  const int64_t tiles = (b.rows + kRows - 1) / kRows;
  TileArguments t;
  t.b_k = b.b_k;
  t.tail = static_cast<int>(b.cols - (vectors - 1) * kLanes);
  t.ld = b.plain ? b.ld : kCols;
  if (!b.plain && (packed || !V::kMasks)) t.tail = kLanes;
  int64_t k0 = 0;
  do {
    t.k = Least(b.k_block, b.k - k0);
    t.b = b.b + k0 * b.b_k;
    t.add = k0 > 0;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const auto [row, count] = RowsOfTile(b.rows, tiles, tile);
      if (b.a_packed) {
        t.a_row = 1;
        t.a_k = PanelStride(count, kLanes);
        t.a = b.a + tile * b.a_panel + k0 * t.a_k;
      } else {
        t.a_row = b.a_row;
        t.a_k = b.a_k;
        t.a = b.a + row * b.a_row + k0 * b.a_k;
      }
      t.sums = b.plain ? reinterpret_cast<float*>(b.epilogue.y) + row * b.ld
                       : b.sums + (b.k_block < b.k ? row * kCols : 0);
      AskAhead(b.ahead, t);
      TileFunction* const* functions = packed ? kTiles<V, true>.at[count - 1]
                                              : kTiles<V, false>.at[count - 1];
      functions[vectors - 1](t);
      if (!b.plain && k0 + t.k >= b.k) FinishTile<V>(b, t.sums, row, count);
    }
    k0 += t.k;
  } while (k0 < b.k);
}

template <class V>
constexpr BlockedKernels kBlocked = {V::kTileRows, V::kTileVectors * V::kLanes,
                                     V::kLanes,    V::kDepth,
                                     V::kMasks,    Pack<V>,
                                     RunPanel<V>};

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_BLOCKED_KERNELS_H_

// SPDX-License-Identifier: Apache-2.0
//
// The products of attention, written once over a vector type V (see
// cpu/vectors/epilogue.h) and included by one source file per instruction set.
//
// A block of some queries and some keys is in the second-level cache. Left
// operands lie in rows of kLd floats, so that a tile's addresses are constants;
// right operands in panels of a tile's columns, which follow each other.
#ifndef JAX_LAYOUT_CPU_ATTENTION_TILES_H_
#define JAX_LAYOUT_CPU_ATTENTION_TILES_H_

#include <cstdint>

#include "cpu/attention/kernels.h"
#include "cpu/vectors/epilogue.h"

namespace jax_layout {
namespace {

// Keys of a block, and the row of one in memory, an odd number of cache lines.
constexpr int64_t kKeys = 256;
constexpr int64_t kLd = kKeys + 16;
// Queries of a block: four full tiles of AVX-512.
template <class V>
constexpr int64_t kQueries =
    (56 + V::kTileRows - 1) / V::kTileRows * V::kTileRows;
template <class V>
constexpr int64_t kCols = V::kTileVectors * V::kLanes;

JAX_LAYOUT_INLINE constexpr int64_t Least(int64_t a, int64_t b) {
  return a < b ? a : b;
}
JAX_LAYOUT_INLINE constexpr int64_t Most(int64_t a, int64_t b) {
  return a > b ? a : b;
}
JAX_LAYOUT_INLINE constexpr int64_t UpTo(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// --- scores

// e^x of what may be far below: a NaN is the second, and stays.
template <class V>
JAX_LAYOUT_INLINE typename V::Reg Power(typename V::Reg x) {
  return Exp<V>(V::Max(V::Set(-110.f), x));
}

// A row of scores, [begin, end), both multiples of vectors.
template <class V>
JAX_LAYOUT_INLINE float LargestOf(const float* row, int64_t begin,
                                  int64_t end) {
  constexpr int64_t kLanes = V::kLanes;
  typename V::Reg most[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) most[i] = V::Load(row + begin);
  int64_t j = begin;
  for (; j + 4 * kLanes <= end; j += 4 * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      most[i] = V::Max(most[i], V::Load(row + j + i * kLanes));
    }
  }
  for (; j < end; j += kLanes) most[0] = V::Max(most[0], V::Load(row + j));
  return V::Largest(V::Max(V::Max(most[0], most[1]), V::Max(most[2], most[3])));
}

// row[j] = e^(row[j] - shift), and their sum.
template <class V>
JAX_LAYOUT_INLINE float PowersOf(float* row, int64_t begin, int64_t end,
                                 float shift) {
  constexpr int64_t kLanes = V::kLanes;
  const typename V::Reg by = V::Set(shift);
  typename V::Reg sum[2] = {V::Zero(), V::Zero()};
  int64_t j = begin;
  for (; j + 2 * kLanes <= end; j += 2 * kLanes) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      float* at = row + j + i * kLanes;
      const typename V::Reg p = Power<V>(V::Load(at) - by);
      V::Store(at, p);
      sum[i] = sum[i] + p;
    }
  }
  for (; j < end; j += kLanes) {
    const typename V::Reg p = Power<V>(V::Load(row + j) - by);
    V::Store(row + j, p);
    sum[0] = sum[0] + p;
  }
  return V::Sum(sum[0] + sum[1]);
}

// --- operands

// How operands are multiplied: as float32, to which others are widened. Another
// arithmetic A may have kDepth of a k next to each other in the 4 bytes of a
// float; it offers the same, and may multiply whole blocks itself.
template <class V>
struct Widened {
  using Reg = typename V::Reg;
  static constexpr int64_t kDepth = 1;
  // Products take so many of a k at a time: operands are zero up to there.
  static constexpr int64_t kStep = kDepth;
  // Floats from a row of NarrowAcross() to the next.
  static constexpr int64_t kAcrossRow = 1;
  // Whether left operands are packed with their factor; else products have it.
  static constexpr bool kFactors = true;

  static JAX_LAYOUT_INLINE Reg MultiplyAdd(Reg sum, Reg left, Reg right) {
    return sum + left * right;
  }

  // Rows of features, to panels of kCols rows each with a feature after the
  // other: the right operand of scores.
  template <class T>
  static void PackTransposed(const T* from, int64_t ld, int64_t rows,
                             int64_t features, float* to) {
    constexpr int64_t kLanes = V::kLanes;
    for (int64_t i = 0; i < UpTo(rows, kCols<V>); i += kLanes) {
      float* panel = to + i / kCols<V> * kCols<V> * features + i % kCols<V>;
      const int64_t count = Least(kLanes, rows - i);
      for (int64_t j = 0; j < features; j += kLanes) {
        const T* at = from + i * ld + j;
        const int n = static_cast<int>(Least(kLanes, features - j));
        Reg r[kLanes];
        if (count == kLanes && n == kLanes) {
#pragma GCC unroll 16
          for (int l = 0; l < kLanes; ++l) r[l] = V::Load(at + l * ld);
        } else {
          for (int l = 0; l < kLanes; ++l) {
            r[l] = l < count ? V::Load(at + l * ld, n) : V::Zero();
          }
        }
        V::Transpose(r);
        if (n == kLanes) {
#pragma GCC unroll 16
          for (int l = 0; l < kLanes; ++l) {
            V::Store(panel + (j + l) * kCols<V>, r[l]);
          }
        } else {
          for (int l = 0; l < n; ++l) {
            V::Store(panel + (j + l) * kCols<V>, r[l]);
          }
        }
      }
    }
  }

  // Rows of features, to panels of kCols features: the right operand of sums
  // over rows. Panels are `panel` floats apart.
  template <class T>
  static void PackRows(const T* from, int64_t ld, int64_t rows,
                       int64_t features, float* to, int64_t panel) {
    constexpr int64_t kLanes = V::kLanes;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < features; j += kLanes) {
        const int n = static_cast<int>(Least(kLanes, features - j));
        V::Store(to + j / kCols<V> * panel + i * kCols<V> + j % kCols<V>,
                 V::Load(from + i * ld + j, n));
      }
    }
  }

  // Rows of features times a factor, to rows of kLd: a left operand.
  template <class T>
  static void CopyRows(const T* from, int64_t ld, int64_t rows,
                       int64_t features, float factor, float* to) {
    constexpr int64_t kLanes = V::kLanes;
    const typename V::Reg times = V::Set(factor);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < features; j += kLanes) {
        const int n = static_cast<int>(Least(kLanes, features - j));
        V::Store(to + i * kLd + j, times * V::Load(from + i * ld + j, n));
      }
    }
  }

  // Powers of e of a row's scores, less `shift`, to a left operand in its
  // place: for the keys that are seen, of all of a block. Their sum. Scores
  // have their factor where kFactors says so.
  static float Powers(float* row, const SeenKeys& seen, const SeenKeys&, float,
                      float shift) {
    if (seen.begin == seen.end) return 0;
    return PowersOf<V>(row, seen.begin, seen.end, shift);
  }

  // Rows of floats, in place, to left operands; and two ways of another shape:
  // k goes from row to row.
  static void NarrowRow(float*, int64_t, int64_t) {}
  static const float* NarrowAcross(const float* rows, int64_t, int64_t, int64_t,
                                   float*) {
    return rows;
  }
};

// --- products

struct TileArguments {
  const float* a;
  const float* b;
  int64_t k;
  float* y;
  int64_t ld;
  bool add;
  const float* factors;  // of rows of y before they are added to, or none
  float times = 1;       // of what is not added, where A::kFactors is false
};

// y = a b. Across: rows of a are next to each other, and a k follows in kLd;
// otherwise the other way round.
template <class V, class A, int kRows, int kVectors, bool kAcross>
void Tile(const TileArguments& arguments) {
  const TileArguments t = arguments;  // stores do not change a copy
  using Reg = typename V::Reg;
  constexpr int kLanes = V::kLanes;
  constexpr int64_t kRow = kAcross ? 1 : kLd, kStep = kAcross ? kLd : 1;
  Reg sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = V::Zero();
  }
  const float* a = t.a;
  const float* b = t.b;
  for (int64_t p = 0; p < t.k; ++p) {
    Reg right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = V::Load(b + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Reg left = V::Set(a[r * kRow]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = A::MultiplyAdd(sum[r][v], left, right[v]);
      }
    }
    a += kStep;
    b += V::kTileVectors * kLanes;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    float* to = t.y + r * t.ld;
    const Reg factor = V::Set(t.factors == nullptr ? 1.f : t.factors[r]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      if (t.add) {
        sum[r][v] = sum[r][v] + factor * V::Load(to + v * kLanes);
      } else if constexpr (!A::kFactors) {
        sum[r][v] = sum[r][v] * V::Set(t.times);
      }
      V::Store(to + v * kLanes, sum[r][v]);
    }
  }
}

using TileFunction = void(const TileArguments&);

// By the rows and vectors of a tile.
template <class V, class A, bool kAcross>
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
    at[kRows - 1][kVectors - 1] = Tile<V, A, kRows, kVectors, kAcross>;
    if constexpr (kVectors < V::kTileVectors) Column<kRows, kVectors + 1>();
  }
};
template <class V, class A, bool kAcross>
constexpr Tiles<V, A, kAcross> kTiles;

// y = a b of many tiles, for columns [0, columns), of which y has whole
// vectors. Panels of b are `panel` floats apart.
template <class V, class A, bool kAcross>
void Multiply(int64_t rows, int64_t panel, int64_t columns,
              const TileArguments& all) {
  const int64_t tiles = (rows + V::kTileRows - 1) / V::kTileRows;
  TileArguments t = all;
  for (int64_t j = 0; j < columns; j += kCols<V>) {
    const int64_t width = Least(kCols<V>, columns - j);
    const int64_t vectors = (width + V::kLanes - 1) / V::kLanes;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t row = rows * i / tiles;
      const int64_t count = rows * (i + 1) / tiles - row;
      t.a = all.a + row * (kAcross ? 1 : kLd);
      t.b = all.b + j / kCols<V> * panel;
      t.y = all.y + row * all.ld + j;
      t.factors = all.factors == nullptr ? nullptr : all.factors + row;
      kTiles<V, A, kAcross>.at[count - 1][vectors - 1](t);
    }
  }
}
template <class V, class A, bool kAcross>
  requires requires { &A::template Multiply<kAcross>; }
void Multiply(int64_t rows, int64_t panel, int64_t columns,
              const TileArguments& all) {
  A::template Multiply<kAcross>(rows, panel, columns, all);
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_ATTENTION_TILES_H_

// SPDX-License-Identifier: Apache-2.0
//
// A few rows times a matrix, written once over what a processor multiplies and
// included by one source file per instruction set. Such an arithmetic A offers
//
//   Element, Wide, Sum     operands in memory; as they are multiplied; sums
//   Reg, SumReg            kLanes sums, or the operands of as many: a lane has
//   kDepth                 so many of k next to each other, 4 bytes in all
//   kRegisters             of the processor
//   Load(p, n), Load(p)    n <= kLanes * kDepth operands, of memory or widened
//   Spread(p)              one lane's operands to all lanes
//   MultiplyAdd(s, w, x)   s and the sums of products in each lane
//   Zero, LoadSums, StoreSums
//   Totals(s, p)           adds up the lanes of each of kLanes sums
//   Widen(p, stride, n, x) n operands, the rest of the last vector zero
//   Joined(row, next)      kDepth rows side by side, kLanes columns
//   Join(rows, n, p)       the same of n columns, to memory
//   Keep(p, w)             operands as they are multiplied
#ifndef JAX_LAYOUT_CPU_GEMM_SKINNY_KERNELS_H_
#define JAX_LAYOUT_CPU_GEMM_SKINNY_KERNELS_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/dtype.h"
#include "cpu/ahead.h"
#include "cpu/vectors/epilogue.h"

namespace jax_layout {

// Rows of x, where the matrix is contiguous along k, and along its columns.
constexpr int64_t kSkinnyRows = 64;
constexpr int64_t kSkinnyRowsAcross = 256;
// Lanes along k of a block at most. Where the matrix is contiguous along its
// columns, a strip of as many rows is in L1, and the next in L2; where it is
// along k, a group of x's rows is in L1, and of a column at most a page.
constexpr int64_t kSkinnySteps = 128;
constexpr int64_t kSkinnyLong = 1024;
// Columns come in strips of at most this.
constexpr int64_t kSkinnyStrip = 32;

// sums[i, j] = sum over k of x[i, k] * matrix[k, j]
struct SkinnyBlock {
  DType operands;
  const char* x;
  int64_t x_row, x_k;  // strides
  const char* matrix;  // at the first column and k = 0
  int64_t ld;
  bool along;  // k is contiguous, else the columns are
  int64_t rows, count, k;
  int64_t steps;  // lanes along k of a block, or of x in L1 if along
  char* sums;     // rows x RoundUp(count, kSkinnyStrip), 4 bytes each, aligned
  char* scratch;  // kSkinnyScratch bytes, aligned
};

// Columns that are contiguous along k are in L2 together.
constexpr int64_t kSkinnyPanel = 24;
// From one row to the next of x and of what is widened, in lanes: a power of
// two would leave most of L1 unused.
constexpr int64_t kSkinnyLd = kSkinnyLong + 16;

// x of a block, and what is widened of the matrix.
constexpr int64_t kSkinnyXBytes = 4 * kSkinnyRows * kSkinnyLd;
constexpr int64_t kSkinnyScratch = kSkinnyXBytes + 4 * kSkinnyPanel * kSkinnyLd;
static_assert(kSkinnyPanel * kSkinnyLd >= kSkinnySteps * kSkinnyStrip);
static_assert(kSkinnyRows * kSkinnyLd >= kSkinnyRowsAcross * kSkinnySteps);

using SkinnyFunction = void(const SkinnyBlock&);
#ifdef __x86_64__
SkinnyFunction SkinnyAvx512Bf16, SkinnyAvx512, SkinnyAvx2;
#elif defined(__aarch64__)
SkinnyFunction SkinnyNeon;
#endif

namespace {

// Products in f32, of operands that are widened as they are loaded.
template <class V, class T>
struct Widened {
  using Element = T;
  using Wide = float;
  using Sum = float;
  using Reg = typename V::Reg;
  using SumReg = Reg;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kDepth = 1;
  static constexpr int kRegisters = V::kRegisters;

  template <class P>
  static JAX_LAYOUT_INLINE Reg Load(const P* p) {
    return V::Load(p);
  }
  template <class P>
  static JAX_LAYOUT_INLINE Reg Load(const P* p, int n) {
    return V::Load(p, n);
  }
  static JAX_LAYOUT_INLINE Reg Spread(const float* p) { return V::Set(*p); }
  static JAX_LAYOUT_INLINE Reg MultiplyAdd(Reg sum, Reg w, Reg x) {
    return sum + w * x;
  }
  static JAX_LAYOUT_INLINE Reg Zero() { return V::Zero(); }
  static JAX_LAYOUT_INLINE Reg LoadSums(const float* p) { return V::Load(p); }
  static JAX_LAYOUT_INLINE void StoreSums(float* p, Reg v) { V::Store(p, v); }
  static JAX_LAYOUT_INLINE void Totals(const Reg* sums, float* p) {
    V::Store(p, V::SumOfEach(sums));
  }

  static void Widen(const T* p, int64_t stride, int64_t n, float* x) {
    if (stride == 1) {
      for (int64_t j = 0; j < n; j += kLanes) {
        V::Store(x + j, V::Load(p + j, Least(n - j)));
      }
      return;
    }
    for (int64_t j = 0; j < n; ++j)
      V::Store(x + j, V::Load(p + j * stride, 1), 1);
    for (int64_t j = n; j % kLanes != 0; ++j) x[j] = 0;
  }
  static JAX_LAYOUT_INLINE Reg Joined(const T* row, const T*) {
    return V::Load(row);
  }
  static JAX_LAYOUT_INLINE void Join(const T* const* rows, int n, float* p) {
    V::Store(p, V::Load(rows[0], n));
  }
  static JAX_LAYOUT_INLINE void Keep(float* p, Reg w) { V::Store(p, w); }
  static JAX_LAYOUT_INLINE int Least(int64_t n) {
    return static_cast<int>(std::min<int64_t>(n, kLanes));
  }
};

// What is common to products of pairs: of 16-bit operands, as bits.
template <class T, int kLaneCount>
struct Pairs {
  using Element = T;
  using Wide = uint16_t;
  static constexpr int kLanes = kLaneCount;
  static constexpr int kDepth = 2;

  static JAX_LAYOUT_INLINE uint16_t Bits(BF16 x) { return x.bits; }
  static JAX_LAYOUT_INLINE uint16_t Bits(int8_t x) {
    return static_cast<uint16_t>(x);
  }
  static void Widen(const T* p, int64_t stride, int64_t n, uint16_t* x) {
    if (stride == 1) {
      for (int64_t j = 0; j < n; ++j) x[j] = Bits(p[j]);
    } else {
      for (int64_t j = 0; j < n; ++j) x[j] = Bits(p[j * stride]);
    }
    for (int64_t j = n; j % (2 * kLanes) != 0; ++j) x[j] = 0;
  }
  static JAX_LAYOUT_INLINE void Join(const T* const* rows, int n, uint16_t* p) {
    const T *first = rows[0], *second = rows[1];
    T some[2][kLanes] = {};
    if (n < kLanes) {
      std::copy_n(first, n, some[0]);
      std::copy_n(second, n, some[1]);
      first = some[0];
      second = some[1];
    }
    for (int j = 0; j < kLanes; ++j) {
      p[2 * j] = Bits(first[j]);
      p[2 * j + 1] = Bits(second[j]);
    }
  }
};

// Where GCC would read an operand from memory anew for each of its products,
// more loads than the processor has time for.
template <class R>
JAX_LAYOUT_INLINE R InRegister(R value) {
#ifdef __x86_64__
  asm("" : "+v"(value));
#else
  asm("" : "+w"(value));
#endif
  return value;
}

// The matrix's columns contiguous: sums of kRows x kVectors, in registers for a
// block of k, one operand of each row of x spread over the lanes.
template <class A>
constexpr int kSkinnyVectors = A::kLanes == 4 ? 4 : 2;
template <class A>
constexpr int kAcrossRows = (A::kRegisters == 32 ? 24 : 12) / kSkinnyVectors<A>;

// So few rows have more columns: there are sums enough not to wait for one, and
// a call costs little beside what it multiplies.
constexpr int kWideRows = 4;
template <class A, int kRows>
constexpr int kWideVectors =
    (A::kRegisters == 32 ? 8 : 4) / (kRows <= 2 ? 1 : 2);

// What a tile's columns are read from: a strip that is packed, the matrix
// itself, or the matrix, and packed on the way for the tiles that follow.
enum class From { kStrip, kMatrix, kBoth };

template <class A>
struct AcrossCall {
  const typename A::Element* matrix;
  int64_t ld, depth;          // of the matrix
  typename A::Wide* strip;    // rows of kVectors
  const typename A::Wide* x;  // rows of kSkinnySteps * kDepth
  int64_t steps;
  typename A::Sum* sums;
  int64_t sums_ld;
  Ahead* ahead;
  int64_t lines;  // to ask for, at most kVectors a step
};

template <class A, From kFrom, int kRows, int kVectors = kSkinnyVectors<A>>
void Across(const AcrossCall<A>& c) {
  using T = typename A::Element;
  constexpr int kLane = A::kLanes * A::kDepth;
  // Beside the last row, if it is alone.
  static constexpr T kNothing[kVectors * A::kLanes] = {};
  typename A::SumReg sum[kRows][kVectors];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = A::LoadSums(c.sums + i * c.sums_ld + v * A::kLanes);
    }
  }
  const T* row = c.matrix;
  auto* strip = c.strip;
  const auto* x = c.x;
  Ahead ahead = *c.ahead;
  const int64_t pairs = c.depth / A::kDepth;
  int64_t lines = c.lines;
  for (int64_t step = 0; step < c.steps; ++step) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      if (lines > v * c.steps) ahead.Next();
    }
    --lines;
    typename A::Reg column[kVectors];
    if constexpr (kFrom == From::kStrip) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        column[v] = A::Load(strip + v * kLane);
      }
    } else {
      const T* next = step < pairs ? row + c.ld : kNothing;
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        column[v] = A::Joined(row + v * A::kLanes, next + v * A::kLanes);
        if constexpr (kFrom == From::kBoth) {
          A::Keep(strip + v * kLane, column[v]);
        }
      }
      row += A::kDepth * c.ld;
    }
    if constexpr (kFrom != From::kMatrix) strip += kVectors * kLane;
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const auto one = InRegister(A::Spread(x + i * kSkinnySteps * A::kDepth));
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = A::MultiplyAdd(sum[i][v], column[v], one);
      }
    }
    x += A::kDepth;
  }
  *c.ahead = ahead;
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      A::StoreSums(c.sums + i * c.sums_ld + v * A::kLanes, sum[i][v]);
    }
  }
}

// Calls f<rows>() for a number of rows in [1, kMost].
template <int kMost, class F>
JAX_LAYOUT_INLINE void WithRows(int rows, const F& f) {
  [&]<int... kRow>(std::integer_sequence<int, kRow...>) {
    static_cast<void>(
        ((rows == kRow + 1 && (f.template operator()<kRow + 1>(), true)) ||
         ...));
  }(std::make_integer_sequence<int, kMost>());
}

// Rows in even groups of at most `most`: fn(first, rows).
template <class F>
JAX_LAYOUT_INLINE void InGroups(int64_t rows, int64_t most, const F& fn) {
  const int64_t groups = (rows + most - 1) / most;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = rows * g / groups;
    fn(first, static_cast<int>(rows * (g + 1) / groups - first));
  }
}

template <class A>
void MultiplyAcross(const SkinnyBlock& b) {
  using T = typename A::Element;
  using Wide = typename A::Wide;
  constexpr int64_t kDepth = A::kDepth;
  constexpr int64_t kMost = kAcrossRows<A>;
  constexpr int64_t kLd = kSkinnySteps * kDepth;  // of x
  const int64_t block_k = b.steps * kDepth;
  constexpr int64_t kStrip = kSkinnyVectors<A> * A::kLanes;
  static_assert(kStrip <= kSkinnyStrip);
  const T* matrix = reinterpret_cast<const T*>(b.matrix);
  Wide* x = reinterpret_cast<Wide*>(b.scratch);
  Wide* strip = reinterpret_cast<Wide*>(b.scratch + kSkinnyXBytes);
  auto* sums = reinterpret_cast<typename A::Sum*>(b.sums);
  const int64_t ld = (b.count + kSkinnyStrip - 1) / kSkinnyStrip * kSkinnyStrip;
  for (int64_t p = 0; p < b.k; p += block_k) {
    const int64_t depth = std::min(block_k, b.k - p);
    const int64_t steps = (depth + kDepth - 1) / kDepth;
    for (int64_t i = 0; i < b.rows; ++i) {
      const T* from = reinterpret_cast<const T*>(b.x) + i * b.x_row + p * b.x_k;
      A::Widen(from, b.x_k, depth, x + i * kLd);
    }
    const T* block = matrix + p * b.ld;
    // All calls together ask for the next block.
    const int64_t bytes = b.count * sizeof(T);
    const int64_t row_lines = (bytes + 63) / 64;
    const int64_t next = std::clamp<int64_t>(b.k - p - block_k, 0, block_k);
    int64_t all_lines = next * row_lines;
    Ahead ahead = {reinterpret_cast<const char*>(block + block_k * b.ld),
                   row_lines, row_lines,
                   static_cast<int64_t>(b.ld * sizeof(T)) - 64 * row_lines};
    int64_t j = 0;
    if (b.rows <= kWideRows) {
      WithRows<kWideRows>(static_cast<int>(b.rows), [&]<int kRows> {
        constexpr int kVectors = kWideVectors<A, kRows>;
        constexpr int64_t kWide = kVectors * A::kLanes;
        const int64_t lines = next * (kWide * sizeof(T)) / 64;
        for (; j + kWide <= b.count; j += kWide) {
          Across<A, From::kMatrix, kRows, kVectors>({block + j, b.ld, depth,
                                                     strip, x, steps, sums + j,
                                                     ld, &ahead, lines});
          all_lines -= lines;
        }
      });
    }
    const int64_t calls =
        (b.rows + kMost - 1) / kMost * ((b.count - j + kStrip - 1) / kStrip);
    int64_t call = 0;
    for (; j < b.count; j += kStrip) {
      const int64_t columns = std::min(kStrip, b.count - j);
      const bool whole = columns == kStrip;
      if (!whole) {
        const T nothing[kStrip] = {};
        Wide* to = strip;
        for (int64_t r = 0; r < depth; r += kDepth) {
          const T* row = block + r * b.ld + j;
          const T* rows[] = {row, r + 1 < depth ? row + b.ld : nothing};
          for (int64_t v = 0; v < kStrip; v += A::kLanes) {
            const int64_t n = std::clamp<int64_t>(columns - v, 0, A::kLanes);
            A::Join(rows, static_cast<int>(n), to);
            rows[0] += n;
            rows[1] += n;
            to += A::kLanes * kDepth;
          }
        }
      }
      InGroups(b.rows, kMost, [&](int64_t first, int rows) {
        const int64_t lines =
            all_lines * (call + 1) / calls - all_lines * call / calls;
        ++call;
        const AcrossCall<A> tile = {block + j,
                                    b.ld,
                                    depth,
                                    strip,
                                    x + first * kLd,
                                    steps,
                                    sums + first * ld + j,
                                    ld,
                                    &ahead,
                                    lines};
        WithRows<kMost>(rows, [&]<int kRows> {
          if (!whole || first > 0) return Across<A, From::kStrip, kRows>(tile);
          if (b.rows == rows) return Across<A, From::kMatrix, kRows>(tile);
          Across<A, From::kBoth, kRows>(tile);
        });
      });
    }
  }
}

// k contiguous: dot products of kRows rows of x and kColumns of the matrix,
// with sums of them all in registers, and the columns' operands.
template <class A>
constexpr int kAlongRows = A::kRegisters == 32 ? 8 : 4;
constexpr int kAlongColumns = 3;

template <class A, int kRows, int kColumns>
JAX_LAYOUT_INLINE void AddAlong(const typename A::Wide* x,
                                const typename A::Reg (&column)[kColumns],
                                typename A::SumReg* sum) {
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    const auto row = InRegister(A::Load(x + i * kSkinnyLd * A::kDepth));
#pragma GCC unroll 4
    for (int v = 0; v < kColumns; ++v) {
      typename A::SumReg& to = sum[i * kColumns + v];
      to = A::MultiplyAdd(to, column[v], row);
    }
  }
}

template <class A, class W, int kColumns>
struct AlongCall {
  const W* w;
  int64_t ld;
  const typename A::Wide* x;  // rows of kSkinnyLd * kDepth
  int64_t depth;
  typename A::Sum* sums;
  int64_t sums_ld;
  const typename A::Element* ahead[kColumns];  // asks for as many of each
};

template <class A, class W, int kRows, int kColumns>
void Along(const AlongCall<A, W, kColumns>& c) {
  constexpr int64_t kStep = A::kLanes * A::kDepth;
  constexpr int kSums =
      (kRows * kColumns + A::kLanes - 1) / A::kLanes * A::kLanes;
  typename A::SumReg sum[kSums];
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) sum[i] = A::Zero();
  typename A::Reg column[kColumns];
  int64_t j = 0;
  for (; j + kStep <= c.depth; j += kStep) {
#pragma GCC unroll 4
    for (int v = 0; v < kColumns; ++v) {
      column[v] = A::Load(c.w + v * c.ld + j);
      __builtin_prefetch(c.ahead[v] + j, 0, 2);
    }
    AddAlong<A, kRows, kColumns>(c.x + j, column, sum);
  }
  if (j < c.depth) {
#pragma GCC unroll 4
    for (int v = 0; v < kColumns; ++v) {
      column[v] = A::Load(c.w + v * c.ld + j, static_cast<int>(c.depth - j));
    }
    AddAlong<A, kRows, kColumns>(c.x + j, column, sum);
  }
  typename A::Sum totals[kSums];
#pragma GCC unroll 8
  for (int i = 0; i < kSums; i += A::kLanes) A::Totals(sum + i, totals + i);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kColumns; ++v) {
      c.sums[i * c.sums_ld + v] += totals[i * kColumns + v];
    }
  }
}

template <class A>
void MultiplyAlong(const SkinnyBlock& b) {
  using T = typename A::Element;
  using Wide = typename A::Wide;
  constexpr int64_t kLd = kSkinnyLd * A::kDepth;
  constexpr int64_t kMost = kAlongRows<A>;
  const bool fits = std::min(b.rows, kMost) * kSkinnyLong <= b.steps;
  const int64_t length = (fits ? kSkinnyLong : kSkinnyLong / 2) * A::kDepth;
  const T* matrix = reinterpret_cast<const T*>(b.matrix);
  Wide* x = reinterpret_cast<Wide*>(b.scratch);
  Wide* widened = reinterpret_cast<Wide*>(b.scratch + kSkinnyXBytes);
  auto* sums = reinterpret_cast<typename A::Sum*>(b.sums);
  const int64_t ld = (b.count + kSkinnyStrip - 1) / kSkinnyStrip * kSkinnyStrip;
  const int64_t groups = (b.rows + kMost - 1) / kMost;
  // For fewer, widening what is loaded costs less.
  const bool widen = sizeof(T) != sizeof(Wide) && groups > 4;
  for (int64_t p = 0; p < b.k; p += length) {
    const int64_t depth = std::min(length, b.k - p);
    for (int64_t i = 0; i < b.rows; ++i) {
      const T* from = reinterpret_cast<const T*>(b.x) + i * b.x_row + p * b.x_k;
      A::Widen(from, b.x_k, depth, x + i * kLd);
    }
    for (int64_t j = 0; j < b.count; j += kSkinnyPanel) {
      const T* panel = matrix + j * b.ld + p;
      const int64_t columns = std::min(kSkinnyPanel, b.count - j);
      // Each panel asks for the next; behind the last is the next block's
      // first.
      int64_t ahead = kSkinnyPanel * b.ld;
      if (j + kSkinnyPanel >= b.count) {
        ahead = p + length < b.k ? length - j * b.ld : 0;
      }
      if (widen) {
        for (int64_t v = 0; v < columns; ++v) {
          A::Widen(panel + v * b.ld, 1, depth, widened + v * kLd);
        }
      }
      int64_t group = 0;
      InGroups(b.rows, kMost, [&](int64_t first, int rows) {
        const Wide* xs = x + first * kLd;
        auto* at = sums + first * ld + j;
        WithRows<kMost>(rows, [&]<int kRows> {
          int64_t v = 0;
          auto some = [&]<int kColumns> {
            const T* first = panel + v * b.ld;
            AlongCall<A, T, kColumns> call = {first,  b.ld, xs, depth,
                                              at + v, ld,   {}};
            // Groups take turns to ask for the columns.
            for (int64_t c = 0; c < kColumns; ++c) {
              const bool mine = c * groups / kColumns == group;
              call.ahead[c] = first + c * b.ld + (mine ? ahead : 0);
            }
            if constexpr (sizeof(T) != sizeof(Wide)) {
              if (widen) {
                AlongCall<A, Wide, kColumns> wide = {
                    widened + v * kLd, kLd, xs, depth, at + v, ld, {}};
                std::copy_n(call.ahead, kColumns, wide.ahead);
                return Along<A, Wide, kRows, kColumns>(wide);
              }
            }
            Along<A, T, kRows, kColumns>(call);
          };
          for (; v + kAlongColumns <= columns; v += kAlongColumns) {
            some.template operator()<kAlongColumns>();
          }
          for (; v < columns; ++v) some.template operator()<1>();
        });
        ++group;
      });
    }
  }
}

template <class A>
void Multiply(const SkinnyBlock& b) {
  b.along ? MultiplyAlong<A>(b) : MultiplyAcross<A>(b);
}

// With V's vectors of f32, and S for products of int8.
template <class V, class S>
void Skinny(const SkinnyBlock& b) {
  if (b.operands == DType::kS8) return Multiply<S>(b);
  if (b.operands == DType::kBF16) return Multiply<Widened<V, BF16>>(b);
  if (b.operands == DType::kF16) return Multiply<Widened<V, F16>>(b);
  return Multiply<Widened<V, float>>(b);
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_SKINNY_KERNELS_H_

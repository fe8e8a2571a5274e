// SPDX-License-Identifier: Apache-2.0
//
// A matrix times a vector, written once over a vector type (see
// gemm_epilogue.h) and included by one source file per instruction set.
#ifndef JAX_LAYOUT_CPU_GEMM_MATVEC_KERNELS_H_
#define JAX_LAYOUT_CPU_GEMM_MATVEC_KERNELS_H_

#include <cstdint>

#include "cpu/vectors/epilogue.h"

namespace jax_layout {

// Results of a block at most: their sums stay in L1. Rows of results are read
// so many at a time.
constexpr int64_t kMatvecCount = 4096, kMatvecRows = 8;

// `count` results, each the sum over k of matrix[i, k] * x[k].
struct MatvecBlock {
  DType operands;
  const char* matrix;  // at the first result and k = 0
  int64_t ld;
  bool along;  // k is contiguous, else the results are
  const char* x;
  int64_t x_stride;
  int64_t count, k;
  float* scratch;  // k elements
  // Where k is cut: the sums of a part are left here, MatvecPart(count) of
  // them; or, with num_parts, those of all parts are added up and finished.
  float* part;
  int64_t num_parts;
  int64_t y_stride;
  bool one_column;  // y is a column: all results have the same bias
  GemmEpilogue epilogue;
};

using MatvecFunction = void(const MatvecBlock&);
#ifdef __x86_64__
MatvecFunction MatvecAvx512, MatvecAvx2;
#elif defined(__aarch64__)
MatvecFunction MatvecNeon;
#endif

namespace {

// Whole vectors are written.
constexpr int64_t MatvecPart(int64_t count) { return (count + 63) / 64 * 64; }

// Asks for kCount elements, whole lines of the row `ld` further on, which is
// needed once this row is done: far enough ahead for memory, and right for
// every ld. Rows that L1 has no room for are asked into L2, as L1 has few
// misses at a time, and what is read now needs them.
template <class T, int kCount, bool kIntoL1>
JAX_LAYOUT_INLINE void PrefetchRow(const T* p, int64_t ld) {
  const char* const next = reinterpret_cast<const char*>(p + ld);
#pragma GCC unroll 4
  for (int at = 0; at < static_cast<int>(kCount * sizeof(T)); at += 64) {
    __builtin_prefetch(next + at, 0, kIntoL1 ? 3 : 2);
  }
}

// Rows that are contiguous along k, kRows at a time: they share the loads of x.
template <class V, class T, int kRows>
JAX_LAYOUT_INLINE void DotRows(const T* row, int64_t ld, const float* x,
                               int64_t k, float* z) {
  using Reg = typename V::Reg;
  constexpr int kLanes = V::kLanes;
  Reg sum[kRows][2];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = V::Zero();
  int64_t j = 0;
  for (; j + 2 * kLanes <= k; j += 2 * kLanes) {
    const Reg x0 = V::Load(x + j), x1 = V::Load(x + j + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const T* p = row + r * ld;
      PrefetchRow<T, 2 * kLanes, false>(p + j, kRows * ld);
      sum[r][0] = sum[r][0] + x0 * V::Load(p + j);
      sum[r][1] = sum[r][1] + x1 * V::Load(p + j + kLanes);
    }
  }
  for (; j < k; j += kLanes) {
    const int n = static_cast<int>(k - j < kLanes ? k - j : kLanes);
    const Reg x0 = V::Load(x + j, n);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = sum[r][0] + x0 * V::Load(row + r * ld + j, n);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) z[r] = V::Sum(sum[r][0] + sum[r][1]);
}

template <class V, class T>
void Dot(const MatvecBlock& b, const float* x, float* z) {
  const T* row = reinterpret_cast<const T*>(b.matrix);
  // More streams from memory for as many as there are registers.
  constexpr int kRows = V::kRegisters == 32 ? 8 : 4;
  int64_t i = 0;
  for (; i + kRows <= b.count; i += kRows) {
    DotRows<V, T, kRows>(row + i * b.ld, b.ld, x, b.k, z + i);
  }
  for (; i < b.count; ++i) {
    DotRows<V, T, 1>(row + i * b.ld, b.ld, x, b.k, z + i);
  }
}

// Rows that are contiguous along the results, kRows at a time: they share the
// loads and stores of the sums. Short pieces of rows are asked for; whole pages
// the processor finds itself.
template <class V, class T, int kRows, bool kAsk>
JAX_LAYOUT_INLINE void AddRows(const T* row, int64_t ld, const float* x,
                               int64_t count, float* z) {
  using Reg = typename V::Reg;
  constexpr int kLanes = V::kLanes;
  Reg factor[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) factor[r] = V::Set(x[r]);
  int64_t j = 0;
  for (; j + 2 * kLanes <= count; j += 2 * kLanes) {
    Reg sum0 = V::Load(z + j), sum1 = V::Load(z + j + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const T* p = row + r * ld + j;
      if constexpr (kAsk) PrefetchRow<T, 2 * kLanes, true>(p, kRows * ld);
      sum0 = sum0 + factor[r] * V::Load(p);
      sum1 = sum1 + factor[r] * V::Load(p + kLanes);
    }
    V::Store(z + j, sum0);
    V::Store(z + j + kLanes, sum1);
  }
  for (; j < count; j += kLanes) {
    const int n = static_cast<int>(count - j < kLanes ? count - j : kLanes);
    Reg sum = V::Load(z + j);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      sum = sum + factor[r] * V::Load(row + r * ld + j, n);
    }
    V::Store(z + j, sum);
  }
}

template <class V, class T>
void Add(const MatvecBlock& b, const float* x, float* z) {
  for (int64_t j = 0; j < b.count; j += V::kLanes) V::Store(z + j, V::Zero());
  const T* row = reinterpret_cast<const T*>(b.matrix);
  constexpr int kRows = kMatvecRows;
  constexpr int64_t kPage = 4096;
  int64_t i = 0;
  auto rows = [&]<bool kAsk>() {
    for (; i + kRows <= b.k; i += kRows) {
      AddRows<V, T, kRows, kAsk>(row + i * b.ld, b.ld, x + i, b.count, z);
    }
  };
  if (b.count * static_cast<int64_t>(sizeof(T)) < kPage) {
    rows.template operator()<true>();
  } else {
    rows.template operator()<false>();
  }
  for (; i < b.k; ++i) {
    AddRows<V, T, 1, false>(row + i * b.ld, b.ld, x + i, b.count, z);
  }
}

template <class V>
void AddParts(const MatvecBlock& b, float* z) {
  const int64_t distance = MatvecPart(b.count);
  for (int64_t j = 0; j < b.count; j += V::kLanes) {
    typename V::Reg sum = V::Load(b.part + j);
    for (int64_t i = 1; i < b.num_parts; ++i) {
      sum = sum + V::Load(b.part + i * distance + j);
    }
    V::Store(z + j, sum);
  }
}

template <class V, class T>
void Multiply(const MatvecBlock& b, float* z) {
  const T* x = reinterpret_cast<const T*>(b.x);
  if (b.x_stride == 1) {
    for (int64_t j = 0; j < b.k; j += V::kLanes) {
      const int n = static_cast<int>(b.k - j < V::kLanes ? b.k - j : V::kLanes);
      V::Store(b.scratch + j, V::Load(x + j, n), n);
    }
  } else {
    for (int64_t j = 0; j < b.k; ++j) {
      V::Store(b.scratch + j, V::Load(x + j * b.x_stride, 1), 1);
    }
  }
  b.along ? Dot<V, T>(b, b.scratch, z) : Add<V, T>(b, b.scratch, z);
}

template <class V>
void Matvec(const MatvecBlock& b) {
  // Whole vectors of it are written.
  alignas(64) float sums[kMatvecCount];
  float* const z = b.part != nullptr && b.num_parts == 0 ? b.part : sums;
  if (b.num_parts > 0) {
    AddParts<V>(b, z);
  } else if (b.operands == DType::kBF16) {
    Multiply<V, BF16>(b, z);
  } else if (b.operands == DType::kF16) {
    Multiply<V, F16>(b, z);
  } else {
    Multiply<V, float>(b, z);
  }
  if (z == b.part) return;
  const bool apart =
      b.y_stride != 1 || (b.one_column && b.epilogue.bias != nullptr);
  auto finish = [&]<class T, Activation kActivation, Activation kDerivative>() {
    const int lanes = apart ? 1 : V::kLanes;
    for (int64_t i = 0; i < b.count; i += lanes) {
      const int n = static_cast<int>(b.count - i < lanes ? b.count - i : lanes);
      Finish<V, T, kActivation, kDerivative>(b.epilogue, V::Load(z + i, n),
                                             i * b.y_stride,
                                             b.one_column ? 0 : i, n);
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

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_GEMM_MATVEC_KERNELS_H_

// SPDX-License-Identifier: Apache-2.0
//
// Convolutions of each channel by itself, written once over a vector type (see
// gemm_epilogue.h) and included by one source file per instruction set. Beyond
// what is said there, a vector type V here offers
//
//   Split(a, b, &even, &odd)  the elements of a, then b, with those indices
//   Merge(even, odd, &a, &b)  the reverse
//   kHalves                   whether it loads and stores 16-bit elements
//   kMasks                    whether it has, for f32,
//   Mask, Range(lo, hi)       the lanes lo <= i < hi
//   LoadMasked(p, mask)       those, touching no others; zero in the rest
//   Even(a, b)                as of Split()
//
// A convolution and its input gradient are one: results q of a phase read at
// q * step + offset + k * spacing for taps k. The input gradient has as many
// phases as the stride is long, each with the taps that reach it.
#ifndef JAX_LAYOUT_CPU_CONV_DEPTHWISE_KERNELS_H_
#define JAX_LAYOUT_CPU_CONV_DEPTHWISE_KERNELS_H_

#include <cstdint>

#include "cpu/vectors/epilogue.h"

namespace jax_layout {

// Results [begin, end) of a phase, whose taps [lo, hi) lie inside the image.
struct DepthwiseRun {
  int64_t begin, end, lo, hi;
};

// A phase of one spatial axis.
struct DepthwiseAxis {
  int64_t size;   // of the image that is read
  int64_t count;  // of results
  int64_t step, offset, spacing, taps;
  int64_t w_first, w_step;      // tap k is w_first + k * w_step of w
  int64_t out_first, out_step;  // result q is out_first + q * out_step
  const DepthwiseRun* runs;
  int64_t num_runs;
};

// A part of the problem for one thread. Strides count elements.
struct DepthwiseTile {
  DType type, result;
  const char* in;
  int64_t in_row, in_col;
  char* out;  // the weight gradient reads it
  int64_t out_row, out_col;
  const float* w;
  int64_t w_row, w_col;
  const char* bias;  // of the result's type, or none
  bool relu;
  const DepthwiseAxis* rows;  // one for each phase
  const DepthwiseAxis* cols;
  int64_t row_phases, col_phases;
  // The results, of every phase.
  int64_t row_begin, row_end, col_begin, col_end;
  int64_t channels;
  // Weight gradient: added to, [tap][sums_tap] of channels, or of vectors that
  // are yet to be summed, [channel][tap][lanes].
  float* sums;
  int64_t sums_tap;

  // Only where columns are contiguous, and channels are planes.
  int64_t in_plane, out_plane, w_plane;
  // The part of a plane that the results see, from row stage_row and column
  // stage_col, is copied to `scratch`: [row][column % step][column / step],
  // with zeros around it.
  int64_t stage_row, stage_rows, stage_col, stage_cols;
  float* scratch;
};

// Rows of results that are computed side by side in planes.
constexpr int kPlaneRows = 8;

struct DepthwiseKernels {
  int64_t lanes;
  // Channels are contiguous.
  void (*last)(const DepthwiseTile&);
  void (*last_weights)(const DepthwiseTile&);
  // Columns are.
  void (*planes)(const DepthwiseTile&);
  void (*plane_weights)(const DepthwiseTile&);
  // y[i * y_stride] = the sum of x[i * lanes ...], for i < n.
  void (*sum)(const float* x, int64_t n, float* y, int64_t y_stride);
  // Conversions of n elements.
  void (*read)(DType type, const void* x, int64_t stride, int64_t n, float* y);
  void (*write)(DType type, const float* x, int64_t n, void* y, int64_t stride);
};

// Whole vectors are read and written, up to so many floats too many.
constexpr int64_t kPlaneSlack = 64;
constexpr int64_t PlanePitch(int64_t stage_cols, int64_t step) {
  return (stage_cols + step - 1) / step;
}
// Floats of one staged plane.
constexpr int64_t StagedPlane(int64_t stage_rows, int64_t stage_cols,
                              int64_t step) {
  return stage_rows * step * PlanePitch(stage_cols, step) + kPlaneSlack;
}
// Small planes are staged together: what was just written is slow to be read.
constexpr int64_t kStaged = 4 << 10;
constexpr int64_t StagedTogether(int64_t plane) {
  return plane < kStaged ? kStaged / plane : 1;
}
// Floats of the scratch.
constexpr int64_t PlaneScratch(int64_t plane, int64_t col_phases,
                               int64_t result_cols) {
  return (plane < kStaged ? kStaged : plane) +
         (col_phases > 1 ? col_phases * kPlaneRows * (result_cols + kPlaneSlack)
                         : 0);
}

extern const DepthwiseKernels kDepthwisePortable;
#ifdef __x86_64__
extern const DepthwiseKernels kDepthwiseAvx512, kDepthwiseAvx2;
#elif defined(__aarch64__)
extern const DepthwiseKernels kDepthwiseNeon;
#endif

namespace {

JAX_LAYOUT_INLINE int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
JAX_LAYOUT_INLINE int64_t Most(int64_t a, int64_t b) { return a > b ? a : b; }

// Results side by side, or taps of a weight gradient.
constexpr int kColumns = 8;
constexpr int kTaps = 9;

// fn<count>(), a compile-time constant.
template <int kMost, class Fn>
JAX_LAYOUT_INLINE void WithCount(int64_t count, const Fn& fn) {
  if constexpr (kMost > 1) {
    if (count < kMost) return WithCount<kMost - 1>(count, fn);
  }
  fn.template operator()<kMost>();
}

// fn<T>(), T the element's type.
template <class V, class Fn>
JAX_LAYOUT_INLINE void WithType(DType type, const Fn& fn) {
  if constexpr (V::kHalves) {
    if (type == DType::kBF16) return fn.template operator()<BF16>();
    if (type == DType::kF16) return fn.template operator()<F16>();
  }
  fn.template operator()<float>();
}

template <class V>
JAX_LAYOUT_INLINE float Element(const float* x) {
  return *x;
}
template <class V, class T>
JAX_LAYOUT_INLINE float Element(const T* x) {
  float y[V::kLanes];
  V::Store(y, V::Load(x, 1));
  return y[0];
}

// What a block of results and one tap have to do with each other: offsets of
// the tap in what it reads, and where its sum is.
struct Tap {
  int64_t x, sum;
};

// kCount sums over rows and columns of x * y, in `lanes` lanes.
template <class V, class X, class Y, int kCount>
JAX_LAYOUT_INLINE void Correlate(const Tap* taps, const X* x, int64_t x_row,
                                 int64_t x_col, const Y* y, int64_t y_row,
                                 int64_t y_col, int64_t rows, int64_t cols,
                                 int lanes, float* sums) {
  typename V::Reg sum[kCount];
#pragma GCC unroll 9
  for (int t = 0; t < kCount; ++t) sum[t] = V::Load(sums + taps[t].sum, lanes);
  for (int64_t row = 0; row < rows; ++row) {
    const X* p[kCount];
#pragma GCC unroll 9
    for (int t = 0; t < kCount; ++t) p[t] = x + row * x_row + taps[t].x;
    const Y* q = y + row * y_row;
    int64_t at = 0;
    for (int64_t col = 0; col < cols; ++col, at += x_col, q += y_col) {
      const typename V::Reg v = V::Load(q, lanes);
#pragma GCC unroll 9
      for (int t = 0; t < kCount; ++t) {
        sum[t] = sum[t] + v * V::Load(p[t] + at, lanes);
      }
    }
  }
#pragma GCC unroll 9
  for (int t = 0; t < kCount; ++t) {
    V::Store(sums + taps[t].sum, sum[t], lanes);
  }
}

// fn(taps, count) for a few taps [row_lo, row_hi) x [col_lo, col_hi) at a time.
template <class Address, class Fn>
JAX_LAYOUT_INLINE void ForTaps(int64_t row_lo, int64_t row_hi, int64_t col_lo,
                               int64_t col_hi, const Address& address,
                               const Fn& fn) {
  Tap taps[kTaps];
  int count = 0;
  // Nearly even groups: the sums of a small one wait for each other.
  const int64_t all = (row_hi - row_lo) * (col_hi - col_lo);
  if (all <= 0) return;
  const int64_t groups = (all + kTaps - 1) / kTaps;
  const int64_t most = (all + groups - 1) / groups;
  for (int64_t k = row_lo; k < row_hi; ++k) {
    for (int64_t l = col_lo; l < col_hi; ++l) {
      taps[count++] = address(k, l);
      if (count == most) {
        fn(taps, count);
        count = 0;
      }
    }
  }
  if (count > 0) fn(taps, count);
}

template <class V>
void SumLanes(const float* x, int64_t n, float* y, int64_t y_stride) {
  for (int64_t i = 0; i < n; ++i) {
    y[i * y_stride] = V::Sum(V::Load(x + i * V::kLanes));
  }
}

template <class V>
void ReadFloats(DType type, const void* from, int64_t stride, int64_t n,
                float* y) {
  WithType<V>(type, [&]<class T>() {
    const T* x = static_cast<const T*>(from);
    for (int64_t i = 0; i < n; ++i) y[i] = Element<V>(x + i * stride);
  });
}

template <class V>
void WriteFloats(DType type, const float* x, int64_t n, void* to,
                 int64_t stride) {
  WithType<V>(type, [&]<class T>() {
    T* y = static_cast<T*>(to);
    for (int64_t i = 0; i < n; ++i) V::Store(y + i * stride, V::Set(x[i]), 1);
  });
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_DEPTHWISE_KERNELS_H_

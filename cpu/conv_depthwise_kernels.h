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

#include "cpu/gemm_epilogue.h"

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

// --- Channels last ---

// Vectors of channels of kCount results in a row that see the same taps. With
// kWidth taps in a row, as far apart as the results are, what is read serves
// all the results that have a tap for it.
template <class V, class T, class R, int kCount, int kWidth>
void LastColumns(const DepthwiseTile& b, const T* x, int64_t x_step,
                 int64_t x_row, int64_t x_col, const float* w, int64_t w_row,
                 int64_t w_col, int64_t tap_rows, int64_t tap_cols, R* y,
                 int64_t y_step) {
  using Reg = typename V::Reg;
  const R* bias = reinterpret_cast<const R*>(b.bias);
  auto block = [&](int64_t c, int lanes) __attribute__((always_inline)) {
    Reg sum[kCount];
    const Reg first = bias != nullptr ? V::Load(bias + c, lanes) : V::Zero();
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) sum[i] = first;
    for (int64_t k = 0; k < tap_rows; ++k) {
      const T* p = x + k * x_row + c;
      const float* f = w + k * w_row + c;
      if constexpr (kWidth > 0) {
        Reg factor[kWidth];
#pragma GCC unroll 8
        for (int l = 0; l < kWidth; ++l) {
          factor[l] = V::Load(f + l * w_col, lanes);
        }
#pragma GCC unroll 16
        for (int j = 0; j < kCount + kWidth - 1; ++j) {
          const Reg v = V::Load(p + j * x_step, lanes);
#pragma GCC unroll 8
          for (int l = 0; l < kWidth; ++l) {
            if (0 <= j - l && j - l < kCount) {
              sum[j - l] = sum[j - l] + factor[l] * v;
            }
          }
        }
        continue;
      }
      for (int64_t l = 0; l < tap_cols; ++l, p += x_col, f += w_col) {
        const Reg factor = V::Load(f, lanes);
#pragma GCC unroll 8
        for (int i = 0; i < kCount; ++i) {
          sum[i] = sum[i] + factor * V::Load(p + i * x_step, lanes);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      const Reg z = b.relu ? V::Max(V::Zero(), sum[i]) : sum[i];
      V::Store(y + i * y_step + c, z, lanes);
    }
  };
  int64_t c = 0;
  for (; c + V::kLanes <= b.channels; c += V::kLanes) block(c, V::kLanes);
  if (c < b.channels) block(c, static_cast<int>(b.channels - c));
}

template <class V, class T, class R>
void LastRow(const DepthwiseTile& b, const DepthwiseAxis& rows,
             const DepthwiseRun& row_run, int64_t row,
             const DepthwiseAxis& cols) {
  const int64_t y_step = cols.out_step * b.out_col;
  R* const y = reinterpret_cast<R*>(b.out) +
               (rows.out_first + row * rows.out_step) * b.out_row +
               cols.out_first * b.out_col;
  const int64_t x_at = rows.offset + row * rows.step;
  for (int64_t r = 0; r < cols.num_runs; ++r) {
    const DepthwiseRun& run = cols.runs[r];
    const int64_t end = Least(run.end, b.col_end);
    for (int64_t q = Most(run.begin, b.col_begin); q < end; q += kColumns) {
      // Addresses are formed of taps inside the image only.
      const bool taps = row_run.lo < row_run.hi && run.lo < run.hi;
      const T* x = nullptr;
      const float* w = nullptr;
      if (taps) {
        x = reinterpret_cast<const T*>(b.in) +
            (x_at + row_run.lo * rows.spacing) * b.in_row +
            (cols.offset + q * cols.step + run.lo * cols.spacing) * b.in_col;
        w = b.w + (rows.w_first + row_run.lo * rows.w_step) * b.w_row +
            (cols.w_first + run.lo * cols.w_step) * b.w_col;
      }
      const int64_t tap_cols = taps ? run.hi - run.lo : 0;
      WithCount<kColumns>(Least(kColumns, end - q), [&]<int kCount>() {
        auto columns = [&]<int kWidth>() {
          LastColumns<V, T, R, kCount, kWidth>(
              b, x, cols.step * b.in_col, rows.spacing * b.in_row,
              cols.spacing * b.in_col, w, rows.w_step * b.w_row,
              cols.w_step * b.w_col, taps ? row_run.hi - row_run.lo : 0,
              tap_cols, y + q * y_step, y_step);
        };
        const bool dense = cols.step == cols.spacing;
        if constexpr (kCount > 3) {
          if (dense && tap_cols == 3) return columns.template operator()<3>();
        }
        if constexpr (kCount == kColumns) {
          if (dense && tap_cols == 5) return columns.template operator()<5>();
          if (dense && tap_cols == 7) return columns.template operator()<7>();
        }
        columns.template operator()<0>();
      });
    }
  }
}

template <class V>
void Last(const DepthwiseTile& b) {
  auto all = [&]<class T, class R>() {
    for (int64_t p = 0; p < b.row_phases; ++p) {
      const DepthwiseAxis& rows = b.rows[p];
      for (int64_t r = 0; r < rows.num_runs; ++r) {
        const DepthwiseRun& run = rows.runs[r];
        const int64_t end = Least(run.end, b.row_end);
        for (int64_t q = Most(run.begin, b.row_begin); q < end; ++q) {
          for (int64_t i = 0; i < b.col_phases; ++i) {
            LastRow<V, T, R>(b, rows, run, q, b.cols[i]);
          }
        }
      }
    }
  };
  WithType<V>(b.type, [&]<class T>() {
    if (b.result == b.type) {
      all.template operator()<T, T>();
    } else {
      all.template operator()<T, float>();
    }
  });
}

// --- The weight gradient's sums of products ---

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

// Rows and columns of results from (row, col) on, which see the same taps.
template <class V, class T>
void LastWeightsRun(const DepthwiseTile& b, const DepthwiseRun& row_run,
                    const DepthwiseRun& col_run, int64_t row, int64_t num_rows,
                    int64_t col, int64_t num_cols) {
  const DepthwiseAxis& rows = *b.rows;
  const DepthwiseAxis& cols = *b.cols;
  const T* x = reinterpret_cast<const T*>(b.in);
  const T* y =
      reinterpret_cast<const T*>(b.out) + row * b.out_row + col * b.out_col;
  auto address = [&](int64_t k, int64_t l) {
    return Tap{
        (rows.offset + row * rows.step + k * rows.spacing) * b.in_row +
            (cols.offset + col * cols.step + l * cols.spacing) * b.in_col,
        (k * cols.taps + l) * b.sums_tap};
  };
  auto some = [&](const Tap* taps, int count) {
    WithCount<kTaps>(count, [&]<int kCount>() {
      auto block = [&](int64_t c, int lanes) __attribute__((always_inline)) {
        Correlate<V, T, T, kCount>(
            taps, x + c, rows.step * b.in_row, cols.step * b.in_col, y + c,
            b.out_row, b.out_col, num_rows, num_cols, lanes, b.sums + c);
      };
      int64_t c = 0;
      for (; c + V::kLanes <= b.channels; c += V::kLanes) block(c, V::kLanes);
      if (c < b.channels) block(c, static_cast<int>(b.channels - c));
    });
  };
  ForTaps(row_run.lo, row_run.hi, col_run.lo, col_run.hi, address, some);
}

template <class V, class T>
void LastWeightsOf(const DepthwiseTile& b) {
  // What stays in L1 while vector after vector of channels is done: few
  // columns, as channels are often a power of two, and then few sets of the
  // cache hold a vector of channels of all columns.
  constexpr int64_t kBytes = 16 << 10, kMostCols = 28;
  const int64_t row_bytes = (b.col_end - b.col_begin) * b.cols->step *
                            b.channels * static_cast<int64_t>(sizeof(T));
  const int64_t band = Most(1, kBytes / Most(1, row_bytes));
  for (int64_t r = 0; r < b.rows->num_runs; ++r) {
    const DepthwiseRun& row_run = b.rows->runs[r];
    const int64_t row_end = Least(row_run.end, b.row_end);
    for (int64_t row = Most(row_run.begin, b.row_begin); row < row_end;
         row += band) {
      for (int64_t s = 0; s < b.cols->num_runs; ++s) {
        const DepthwiseRun& run = b.cols->runs[s];
        const int64_t col_end = Least(run.end, b.col_end);
        for (int64_t col = Most(run.begin, b.col_begin); col < col_end;
             col += kMostCols) {
          LastWeightsRun<V, T>(b, row_run, run, row, Least(band, row_end - row),
                               col, Least(kMostCols, col_end - col));
        }
      }
    }
  }
}

template <class V>
void LastWeights(const DepthwiseTile& b) {
  WithType<V>(b.type, [&]<class T>() { LastWeightsOf<V, T>(b); });
}

// --- Planes ---

// n elements, as f32; may write up to a vector more.
template <class V, class T>
JAX_LAYOUT_INLINE void Copy(const T* x, int64_t n, float* y) {
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::Store(y + i, V::Load(x + i));
  if (i < n) V::Store(y + i, V::Load(x + i, static_cast<int>(n - i)));
}

template <class V>
JAX_LAYOUT_INLINE void Fill(int64_t n, float* y) {
  for (int64_t i = 0; i < n; i += V::kLanes) V::Store(y + i, V::Zero());
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

// One row of a plane, from column stage_col on.
template <class V, class T>
void StageRow(const T* x, int64_t size, int64_t first, int64_t cols,
              int64_t step, float* y) {
  if (step == 1) {
    const int64_t before = Least(Most(-first, 0), cols);
    const int64_t end = Least(Most(size - first, before), cols);
    Fill<V>(before, y);
    if (before < end) Copy<V>(x + first + before, end - before, y + before);
    Fill<V>(cols - end, y + end);
    return;
  }
  const int64_t pitch = PlanePitch(cols, step);
  // Of each phase, i in [lo, hi) lies inside the row.
  const int64_t lo = Least(first < 0 ? (step - 1 - first) / step : 0, pitch);
  const int64_t hi =
      Most(lo, Least(first + step <= size ? (size - first) / step : 0, pitch));
  int64_t i = 0;
  auto one = [&] {
    for (int64_t p = 0; p < step; ++p) {
      const int64_t at = first + i * step + p;
      y[p * pitch + i] = 0 <= at && at < size ? Element<V>(x + at) : 0.f;
    }
  };
  for (; i < lo; ++i) one();
  if (step == 2) {
    for (; i < hi; i += V::kLanes) {
      const int n = static_cast<int>(Least(V::kLanes, hi - i));
      const T* p = x + first + 2 * i;
      const auto a = V::Load(p, 2 * n < V::kLanes ? 2 * n : V::kLanes);
      const auto b = 2 * n > V::kLanes
                         ? V::Load(p + V::kLanes, 2 * n - V::kLanes)
                         : V::Zero();
      typename V::Reg even, odd;
      V::Split(a, b, &even, &odd);
      V::Store(y + i, even, n);
      V::Store(y + pitch + i, odd, n);
    }
    i = hi;
  }
  for (; i < pitch; ++i) one();
}

template <class V, class T>
void Stage(const DepthwiseTile& b, const T* x, float* y) {
  const int64_t step = b.cols->step;
  const int64_t pitch = step * PlanePitch(b.stage_cols, step);
  for (int64_t i = 0; i < b.stage_rows; ++i, y += pitch) {
    const int64_t row = b.stage_row + i;
    if (0 <= row && row < b.rows->size) {
      StageRow<V>(x + row * b.in_row, b.cols->size, b.stage_col, b.stage_cols,
                  step, y);
    } else {
      Fill<V>(pitch, y);
    }
  }
  Fill<V>(2 * V::kLanes, y);
}

// Where column `at` of the staged plane is, and the step to the next tap.
struct StagedColumn {
  int64_t phase, index, step, pitch;

  StagedColumn(int64_t at, int64_t step, int64_t pitch)
      : phase(step == 1 ? 0 : at % step),
        index(step == 1 ? at : at / step),
        step(step),
        pitch(pitch) {}
  int64_t offset() const { return phase * pitch + index; }
  void Advance(const StagedColumn& by) {
    phase += by.phase;
    index += by.index;
    if (phase >= step) {
      phase -= step;
      ++index;
    }
  }
};

// What rows of results read, a vector of columns and a tap at a time. Staged:
// from scratch, where all rows and columns are.
template <class V>
struct StagedRows {
  static constexpr int kStep = 1;
  static constexpr bool kOften = false;  // so as to be worth more code
  struct Columns {
    static JAX_LAYOUT_INLINE typename V::Reg Load(const float* p) {
      return V::Load(p);
    }
  };
  const float* x;
  int64_t pitch;  // of rows
  StagedColumn at, spacing;

  StagedRows(const DepthwiseTile& b, const DepthwiseAxis& rows,
             const DepthwiseAxis& cols, const float* scratch, int64_t row)
      : x(scratch),
        pitch(cols.step * PlanePitch(b.stage_cols, cols.step)),
        at(0, cols.step, PlanePitch(b.stage_cols, cols.step)),
        spacing(cols.spacing, cols.step, at.pitch) {
    if (rows.taps == 0 || cols.taps == 0) return;
    x += (rows.offset + row * rows.step - b.stage_row) * pitch;
    at = StagedColumn(cols.offset + b.col_begin * cols.step - b.stage_col,
                      cols.step, at.pitch);
  }
  bool HasRow(int64_t) const { return true; }
  // fn(l, p, columns), where columns.Load(p + i * pitch) is row i of tap l.
  template <class Fn>
  JAX_LAYOUT_INLINE void ForColumnTaps(const DepthwiseAxis& cols, int64_t col,
                                       const Fn& fn) const {
    StagedColumn tap = at;
    for (int64_t l = 0; l < cols.taps; ++l, tap.Advance(spacing)) {
      fn(l, x + tap.offset() + col, Columns());
    }
  }
};

// A vector of columns kStep apart from `first` on, zero outside [0, size).
template <class V, int kStep>
struct MaskedColumns {
  typename V::Mask masks[kStep];
  bool any;

  MaskedColumns() = default;
  // Only the first `lanes` of them.
  MaskedColumns(int64_t first, int64_t size, int64_t lanes = V::kLanes) {
    const int64_t lo = Most(0, -first);
    const int64_t hi = Least(kStep * lanes, size - first);
    any = lo < hi;
#pragma GCC unroll 2
    for (int i = 0; i < kStep; ++i) {
      const int64_t end = Most(0, Least(V::kLanes, hi - i * V::kLanes));
      masks[i] = V::Range(Least(end, Most(0, lo - i * V::kLanes)), end);
    }
  }
  JAX_LAYOUT_INLINE typename V::Reg Load(const float* p) const {
    if constexpr (kStep == 1) return V::LoadMasked(p, masks[0]);
    return V::Even(V::LoadMasked(p, masks[0]),
                   V::LoadMasked(p + V::kLanes, masks[1]));
  }
};

// Direct: from the image, where what lies outside is skipped or masked.
template <class V, int kColStep>
struct DirectRows {
  static constexpr int kStep = kColStep;
  static constexpr bool kOften = kStep == 1;
  const float* x;
  int64_t pitch, row, num_rows, col;

  DirectRows(const DepthwiseTile& b, const DepthwiseAxis& rows,
             const DepthwiseAxis& cols, const float* plane, int64_t at)
      : x(plane),
        pitch(b.in_row),
        row(rows.offset + at * rows.step),
        num_rows(rows.size),
        col(cols.offset + b.col_begin * kStep) {
    x += row * pitch;
  }
  JAX_LAYOUT_INLINE bool HasRow(int64_t i) const {
    return static_cast<uint64_t>(row + i) < static_cast<uint64_t>(num_rows);
  }
  template <class Fn>
  JAX_LAYOUT_INLINE void ForColumnTaps(const DepthwiseAxis& cols, int64_t i,
                                       const Fn& fn) const {
    int64_t at = col + i * kStep;
    for (int64_t l = 0; l < cols.taps; ++l, at += cols.spacing) {
      const MaskedColumns<V, kStep> columns(at, cols.size);
      if (columns.any) fn(l, x + at, columns);
    }
  }
};

// kRows rows of results. With kHeight taps in a column, next to each other, and
// results as far apart as the columns are, a row that is read serves all the
// results that it has a tap for.
template <class V, class Source, int kRows, int kHeight, class Put>
JAX_LAYOUT_INLINE void PlaneRows(const DepthwiseTile& b,
                                 const DepthwiseAxis& rows,
                                 const DepthwiseAxis& cols,
                                 const Source& source, const float* w,
                                 float bias, const Put& put) {
  using Reg = typename V::Reg;
  constexpr int kStep = Source::kStep;
  w += rows.w_first * b.w_row + cols.w_first * b.w_col;
  const int64_t w_row = rows.w_step * b.w_row;
  const int64_t w_col = cols.w_step * b.w_col;
  const int64_t count = Least(cols.count, b.col_end) - b.col_begin;
  for (int64_t i = 0; i < count; i += V::kLanes) {
    Reg sum[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum[r] = V::Set(bias);
    auto tap = [&](int64_t l, const float* p,
                   const auto& columns) __attribute__((always_inline)) {
      const float* f = w + l * w_col;
      if constexpr (kHeight > 0) {
        Reg factor[kHeight];
#pragma GCC unroll 8
        for (int k = 0; k < kHeight; ++k) factor[k] = V::Set(f[k * w_row]);
#pragma GCC unroll 32
        for (int j = 0; j < (kRows - 1) * kStep + kHeight; ++j) {
          if (!source.HasRow(j)) continue;
          const Reg v = columns.Load(p + j * source.pitch);
#pragma GCC unroll 8
          for (int k = j % kStep; k < kHeight; k += kStep) {
            const int r = (j - k) / kStep;
            if (j >= k && r < kRows) sum[r] = sum[r] + factor[k] * v;
          }
        }
      } else {
        for (int64_t k = 0; k < rows.taps; ++k, f += w_row) {
          const Reg factor = V::Set(*f);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const int64_t j = k * rows.spacing + r * rows.step;
            if (!source.HasRow(j)) continue;
            sum[r] = sum[r] + factor * columns.Load(p + j * source.pitch);
          }
        }
      }
    };
    source.ForColumnTaps(cols, i, tap);
    const int lanes = static_cast<int>(Least(V::kLanes, count - i));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      put(r, i, b.relu ? V::Max(V::Zero(), sum[r]) : sum[r], lanes);
    }
  }
}

// Rows of f32, one for each phase, to one row of y.
template <class V, class R>
void MergeColumns(const DepthwiseTile& b, const float* x, int64_t x_phase,
                  R* y) {
  const int64_t phases = b.col_phases;
  y += b.col_begin * phases;
  if (phases == 2) {
    int64_t left = 0;
    for (int64_t p = 0; p < phases; ++p) {
      left += Most(Least(b.cols[p].count, b.col_end) - b.col_begin, 0);
    }
    for (; left > 0; left -= 2 * V::kLanes) {
      typename V::Reg lo, hi;
      V::Merge(V::Load(x), V::Load(x + x_phase), &lo, &hi);
      V::Store(y, lo, static_cast<int>(Least(V::kLanes, left)));
      if (left > V::kLanes) {
        V::Store(y + V::kLanes, hi,
                 static_cast<int>(Least(V::kLanes, left - V::kLanes)));
      }
      x += V::kLanes;
      y += 2 * V::kLanes;
    }
    return;
  }
  for (int64_t p = 0; p < phases; ++p, x += x_phase) {
    const int64_t count = Least(b.cols[p].count, b.col_end) - b.col_begin;
    for (int64_t i = 0; i < count; ++i) {
      V::Store(y + i * phases + p, V::Set(x[i]), 1);
    }
  }
}

// The results of a phase of rows. x is the plane, or where it is staged.
template <class V, class Source, class R>
void PlaneResults(const DepthwiseTile& b, const DepthwiseAxis& rows,
                  const float* x, const float* w, float bias, float* merged,
                  R* y) {
  const int64_t row_end = Least(rows.count, b.row_end);
  const int64_t num_rows = row_end - b.row_begin;
  if (num_rows <= 0) return;
  const bool merge = b.col_phases > 1;
  const int64_t pitch = b.col_end - b.col_begin + V::kLanes;
  const bool dense = rows.step == Source::kStep && rows.spacing == 1;
  int64_t most = num_rows;
  if (num_rows > kPlaneRows) {
    const int64_t blocks = (num_rows + kPlaneRows - 1) / kPlaneRows;
    most = (num_rows + blocks - 1) / blocks;
  }
  for (int64_t row = b.row_begin; row < row_end; row += most) {
    R* const to = y + (rows.out_first + row * rows.out_step) * b.out_row;
    const int64_t to_row = rows.out_step * b.out_row;
    WithCount<kPlaneRows>(Least(most, row_end - row), [&]<int kRows>() {
      auto phase = [&](int64_t i) {
        const DepthwiseAxis& cols = b.cols[i];
        const Source source(b, rows, cols, x, row);
        auto put = [&](int r, int64_t col, typename V::Reg z,
                       int lanes) __attribute__((always_inline)) {
          if (merge) {
            V::Store(merged + (i * kPlaneRows + r) * pitch + col, z);
          } else {
            V::Store(to + r * to_row + b.col_begin + col, z, lanes);
          }
        };
        auto run = [&]<int kHeight>() {
          PlaneRows<V, Source, kRows, kHeight>(b, rows, cols, source, w, bias,
                                               put);
        };
        if (dense && rows.taps == 3) return run.template operator()<3>();
        if constexpr (Source::kOften) {
          // Two are half of three or four, of a gradient.
          if (dense && rows.taps == 2) return run.template operator()<2>();
          if (dense && rows.taps == 5) return run.template operator()<5>();
          if (dense && rows.taps == 7) return run.template operator()<7>();
        }
        run.template operator()<0>();
      };
      for (int64_t i = 0; i < b.col_phases; ++i) phase(i);
      if (!merge) return;
      for (int r = 0; r < kRows; ++r) {
        MergeColumns<V>(b, merged + r * pitch, kPlaneRows * pitch,
                        to + r * to_row);
      }
    });
  }
}

// Whether masks make staging needless.
inline bool IsDirect(const DepthwiseTile& b) {
  return b.type == DType::kF32 && b.cols->step <= 2;
}

template <class V, class R>
float BiasOf(const DepthwiseTile& b, int64_t c) {
  if (b.bias == nullptr) return 0.f;
  return Element<V>(reinterpret_cast<const R*>(b.bias) + c);
}

template <class V, int kStep>
void DirectPlanes(const DepthwiseTile& b) {
  for (int64_t c = 0; c < b.channels; ++c) {
    const float bias = BiasOf<V, float>(b, c);
    for (int64_t p = 0; p < b.row_phases; ++p) {
      PlaneResults<V, DirectRows<V, kStep>>(
          b, b.rows[p], reinterpret_cast<const float*>(b.in) + c * b.in_plane,
          b.w + c * b.w_plane, bias, b.scratch,
          reinterpret_cast<float*>(b.out) + c * b.out_plane);
    }
  }
}

template <class V>
void StagedPlanes(const DepthwiseTile& b) {
  const int64_t plane = StagedPlane(b.stage_rows, b.stage_cols, b.cols->step);
  const int64_t together = StagedTogether(plane);
  for (int64_t first = 0; first < b.channels; first += together) {
    const int64_t end = Least(first + together, b.channels);
    WithType<V>(b.type, [&]<class T>() {
      for (int64_t c = first; c < end; ++c) {
        Stage<V>(b, reinterpret_cast<const T*>(b.in) + c * b.in_plane,
                 b.scratch + (c - first) * plane);
      }
    });
    WithType<V>(b.result, [&]<class R>() {
      for (int64_t c = first; c < end; ++c) {
        for (int64_t p = 0; p < b.row_phases; ++p) {
          PlaneResults<V, StagedRows<V>>(
              b, b.rows[p], b.scratch + (c - first) * plane,
              b.w + c * b.w_plane, BiasOf<V, R>(b, c),
              b.scratch + together * plane,
              reinterpret_cast<R*>(b.out) + c * b.out_plane);
        }
      }
    });
  }
}

template <class V>
void Planes(const DepthwiseTile& b) {
  if constexpr (V::kMasks) {
    if (IsDirect(b)) {
      return b.cols->step == 1 ? DirectPlanes<V, 1>(b) : DirectPlanes<V, 2>(b);
    }
  }
  StagedPlanes<V>(b);
}

// A vector of columns of the results, from `col` on, and kHeight x kWidth taps
// from (k, l) on.
template <class V, int kStep, int kHeight, int kWidth>
void CorrelateColumns(const DepthwiseTile& b, int64_t col, int64_t k, int64_t l,
                      const float* x, const float* y, float* sums) {
  using Reg = typename V::Reg;
  const DepthwiseAxis& rows = *b.rows;
  const DepthwiseAxis& cols = *b.cols;
  const int lanes = static_cast<int>(Least(V::kLanes, b.col_end - col));
  const int64_t at = cols.offset + col * kStep + l * cols.spacing;
  typename V::Reg sum[kHeight * kWidth];
  sums += (k * cols.taps + l) * V::kLanes;
  auto sum_at = [&](int t) {
    return sums + (t / kWidth * cols.taps + t % kWidth) * V::kLanes;
  };
#pragma GCC unroll 16
  for (int t = 0; t < kHeight * kWidth; ++t) sum[t] = V::Load(sum_at(t));
  MaskedColumns<V, kStep> columns[kWidth];
#pragma GCC unroll 8
  for (int i = 0; i < kWidth; ++i) {
    columns[i] = {at + i * cols.spacing, cols.size, lanes};
  }
  // kRows rows of y and the taps' rows of x, `spacing` apart.
  auto block = [&]<int kRows, int kRowStep>(
                   int64_t row,
                   int64_t spacing) __attribute__((always_inline)) {
    const int64_t first = rows.offset + row * rows.step + k * rows.spacing;
    const float* p = x + first * b.in_row + at;
    Reg v[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      v[r] = V::Load(y + (row + r) * b.out_row + col, lanes);
    }
#pragma GCC unroll 16
    for (int j = 0; j < (kRows - 1) * kRowStep + kHeight; ++j) {
      if (static_cast<uint64_t>(first + j * spacing) >=
          static_cast<uint64_t>(rows.size)) {
        continue;
      }
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; ++i) {
        const Reg u =
            columns[i].Load(p + j * spacing * b.in_row + i * cols.spacing);
#pragma GCC unroll 8
        for (int t = j % kRowStep; t < kHeight; t += kRowStep) {
          const int r = (j - t) / kRowStep;
          if (j < t || r >= kRows) continue;
          sum[t * kWidth + i] = sum[t * kWidth + i] + v[r] * u;
        }
      }
    }
  };
  int64_t row = b.row_begin;
  if (rows.step == kStep && rows.spacing == 1) {
    constexpr int kRows = V::kLanes == 16 ? 4 : 2;  // as there are registers
    for (; row + kRows <= b.row_end; row += kRows) {
      block.template operator()<kRows, kStep>(row, 1);
    }
  }
  for (; row < b.row_end; ++row) {
    block.template operator()<1, 1>(row, rows.spacing);
  }
#pragma GCC unroll 16
  for (int t = 0; t < kHeight * kWidth; ++t) V::Store(sum_at(t), sum[t]);
}

template <class V, int kStep>
void DirectWeights(const DepthwiseTile& b) {
  constexpr int kSide = 3;
  const int64_t height = b.rows->taps, width = b.cols->taps;
  for (int64_t c = 0; c < b.channels; ++c) {
    const float* x = reinterpret_cast<const float*>(b.in) + c * b.in_plane;
    const float* y = reinterpret_cast<const float*>(b.out) + c * b.out_plane;
    float* const sums = b.sums + c * height * width * V::kLanes;
    for (int64_t k = 0; k < height; k += kSide) {
      for (int64_t l = 0; l < width; l += kSide) {
        WithCount<kSide>(Least(kSide, height - k), [&]<int kHeight>() {
          WithCount<kSide>(Least(kSide, width - l), [&]<int kWidth>() {
            for (int64_t i = b.col_begin; i < b.col_end; i += V::kLanes) {
              CorrelateColumns<V, kStep, kHeight, kWidth>(b, i, k, l, x, y,
                                                          sums);
            }
          });
        });
      }
    }
  }
}

template <class V, class T>
void StagedWeights(const DepthwiseTile& b) {
  const DepthwiseAxis& rows = *b.rows;
  const DepthwiseAxis& cols = *b.cols;
  const int64_t pitch = PlanePitch(b.stage_cols, cols.step);
  const int64_t row_pitch = cols.step * pitch;
  const int64_t num_rows = b.row_end - b.row_begin;
  const int64_t num_cols = b.col_end - b.col_begin;
  const int64_t whole = num_cols / V::kLanes;
  const int rest = static_cast<int>(num_cols % V::kLanes);
  const int64_t row_at = rows.offset + b.row_begin * rows.step - b.stage_row;
  const int64_t col_at = cols.offset + b.col_begin * cols.step - b.stage_col;
  auto address = [&](int64_t k, int64_t l) {
    const StagedColumn at(col_at + l * cols.spacing, cols.step, pitch);
    return Tap{(row_at + k * rows.spacing) * row_pitch + at.offset(),
               (k * cols.taps + l) * V::kLanes};
  };
  const int64_t plane = StagedPlane(b.stage_rows, b.stage_cols, cols.step);
  const int64_t together = StagedTogether(plane);
  for (int64_t first = 0; first < b.channels; first += together) {
    const int64_t end = Least(first + together, b.channels);
    for (int64_t c = first; c < end; ++c) {
      Stage<V>(b, reinterpret_cast<const T*>(b.in) + c * b.in_plane,
               b.scratch + (c - first) * plane);
    }
    ForTaps(
        0, rows.taps, 0, cols.taps, address, [&](const Tap* taps, int count) {
          WithCount<kTaps>(count, [&]<int kCount>() {
            for (int64_t c = first; c < end; ++c) {
              const float* x = b.scratch + (c - first) * plane;
              const T* y = reinterpret_cast<const T*>(b.out) + c * b.out_plane +
                           b.row_begin * b.out_row + b.col_begin;
              float* const sums =
                  b.sums + c * rows.taps * cols.taps * V::kLanes;
              Correlate<V, float, T, kCount>(taps, x, rows.step * row_pitch,
                                             V::kLanes, y, b.out_row, V::kLanes,
                                             num_rows, whole, V::kLanes, sums);
              if (rest == 0) continue;
              Correlate<V, float, T, kCount>(
                  taps, x + whole * V::kLanes, rows.step * row_pitch, 0,
                  y + whole * V::kLanes, b.out_row, 0, num_rows, 1, rest, sums);
            }
          });
        });
  }
}

template <class V>
void PlaneWeights(const DepthwiseTile& b) {
  if constexpr (V::kMasks) {
    if (IsDirect(b)) {
      return b.cols->step == 1 ? DirectWeights<V, 1>(b)
                               : DirectWeights<V, 2>(b);
    }
  }
  WithType<V>(b.type, [&]<class T>() { StagedWeights<V, T>(b); });
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

template <class V>
constexpr DepthwiseKernels KernelsOf() {
  return {V::kLanes,       Last<V>,     LastWeights<V>, Planes<V>,
          PlaneWeights<V>, SumLanes<V>, ReadFloats<V>,  WriteFloats<V>};
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_DEPTHWISE_KERNELS_H_

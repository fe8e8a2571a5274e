// SPDX-License-Identifier: Apache-2.0
//
// Convolutions of each channel by itself, written once over a vector type (see
// gemm_epilogue.h) and included by one source file per instruction set. Beyond
// what is said there, a vector type V here offers
//
//   Split(a, b, &even, &odd)  the elements of a, then b, with those indices
//   Merge(even, odd, &a, &b)  the reverse
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

// Floats of the planes' scratch.
constexpr int64_t PlanePitch(int64_t stage_cols, int64_t step) {
  return (stage_cols + step - 1) / step;
}
constexpr int64_t PlaneScratch(int64_t stage_rows, int64_t stage_cols,
                               int64_t step, int64_t col_phases,
                               int64_t result_cols) {
  // Whole vectors are read and written.
  constexpr int64_t kSlack = 64;
  return stage_rows * step * PlanePitch(stage_cols, step) + kSlack +
         col_phases * kPlaneRows * (result_cols + kSlack);
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

// Vectors of channels of kCount results in a row that see the same taps.
template <class V, class T, class R, int kCount>
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
      WithCount<kColumns>(Least(kColumns, end - q), [&]<int kCount>() {
        LastColumns<V, T, R, kCount>(
            b, x, cols.step * b.in_col, rows.spacing * b.in_row,
            cols.spacing * b.in_col, w, rows.w_step * b.w_row,
            cols.w_step * b.w_col, taps ? row_run.hi - row_run.lo : 0,
            taps ? run.hi - run.lo : 0, y + q * y_step, y_step);
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

template <class V, class T>
void LastWeightsOf(const DepthwiseTile& b) {
  const DepthwiseAxis& rows = *b.rows;
  const DepthwiseAxis& cols = *b.cols;
  // Rows that stay in L1 while vector after vector of channels is done.
  constexpr int64_t kBytes = 16 << 10;
  const int64_t row_bytes = (b.col_end - b.col_begin) * cols.step * b.channels *
                            static_cast<int64_t>(sizeof(T));
  const int64_t band = Most(1, kBytes / Most(1, row_bytes));
  for (int64_t r = 0; r < rows.num_runs; ++r) {
    const DepthwiseRun& row_run = rows.runs[r];
    const int64_t row_end = Least(row_run.end, b.row_end);
    for (int64_t row = Most(row_run.begin, b.row_begin); row < row_end;
         row += band) {
      for (int64_t s = 0; s < cols.num_runs; ++s) {
        const DepthwiseRun& run = cols.runs[s];
        const int64_t col = Most(run.begin, b.col_begin);
        const int64_t num_cols = Least(run.end, b.col_end) - col;
        if (num_cols <= 0) continue;
        const T* y = reinterpret_cast<const T*>(b.out) + row * b.out_row +
                     col * b.out_col;
        auto address = [&](int64_t k, int64_t l) {
          return Tap{
              (rows.offset + row * rows.step + k * rows.spacing) * b.in_row +
                  (cols.offset + col * cols.step + l * cols.spacing) * b.in_col,
              (k * cols.taps + l) * b.sums_tap};
        };
        ForTaps(row_run.lo, row_run.hi, run.lo, run.hi, address,
                [&](const Tap* taps, int count) {
                  WithCount<kTaps>(count, [&]<int kCount>() {
                    auto block = [&](int64_t c,
                                     int lanes) __attribute__((always_inline)) {
                      Correlate<V, T, T, kCount>(
                          taps, reinterpret_cast<const T*>(b.in) + c,
                          rows.step * b.in_row, cols.step * b.in_col, y + c,
                          b.out_row, b.out_col, Least(band, row_end - row),
                          num_cols, lanes, b.sums + c);
                    };
                    int64_t c = 0;
                    for (; c + V::kLanes <= b.channels; c += V::kLanes) {
                      block(c, V::kLanes);
                    }
                    if (c < b.channels)
                      block(c, static_cast<int>(b.channels - c));
                  });
                });
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
    for (; i + V::kLanes <= hi; i += V::kLanes) {
      const T* p = x + first + 2 * i;
      typename V::Reg even, odd;
      V::Split(V::Load(p), V::Load(p + V::kLanes), &even, &odd);
      V::Store(y + i, even);
      V::Store(y + pitch + i, odd);
    }
  }
  for (; i < pitch; ++i) one();
}

template <class V, class T>
void Stage(const DepthwiseTile& b, const T* x) {
  const int64_t step = b.cols->step;
  const int64_t pitch = step * PlanePitch(b.stage_cols, step);
  float* y = b.scratch;
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

// kRows rows of results. With kHeight taps in a column, next to each other, a
// row that is read serves all the results that it has a tap for.
template <class V, int kRows, int kHeight, class Put>
JAX_LAYOUT_INLINE void PlaneRows(const DepthwiseTile& b,
                                 const DepthwiseAxis& rows,
                                 const DepthwiseAxis& cols, int64_t row,
                                 const float* w, float bias, const Put& put) {
  using Reg = typename V::Reg;
  const int64_t pitch = PlanePitch(b.stage_cols, cols.step);
  const int64_t row_pitch = cols.step * pitch;
  const int64_t x_step = rows.step * row_pitch;
  const int64_t x_tap = rows.spacing * row_pitch;
  const float* x = b.scratch;
  StagedColumn start(0, cols.step, pitch);
  if (rows.taps > 0 && cols.taps > 0) {
    x += (rows.offset + row * rows.step - b.stage_row) * row_pitch;
    start = StagedColumn(cols.offset + b.col_begin * cols.step - b.stage_col,
                         cols.step, pitch);
  }
  const StagedColumn spacing(cols.spacing, cols.step, pitch);
  w += rows.w_first * b.w_row + cols.w_first * b.w_col;
  const int64_t w_row = rows.w_step * b.w_row;
  const int64_t w_col = cols.w_step * b.w_col;
  const int64_t count = Least(cols.count, b.col_end) - b.col_begin;
  for (int64_t i = 0; i < count; i += V::kLanes) {
    Reg sum[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum[r] = V::Set(bias);
    StagedColumn at = start;
    for (int64_t l = 0; l < cols.taps; ++l, at.Advance(spacing)) {
      const float* p = x + at.offset() + i;
      const float* f = w + l * w_col;
      if constexpr (kHeight > 0) {
        Reg factor[kHeight];
#pragma GCC unroll 8
        for (int k = 0; k < kHeight; ++k) factor[k] = V::Set(f[k * w_row]);
#pragma GCC unroll 16
        for (int j = 0; j < kRows + kHeight - 1; ++j, p += row_pitch) {
          const Reg v = V::Load(p);
#pragma GCC unroll 8
          for (int k = 0; k < kHeight; ++k) {
            if (0 <= j - k && j - k < kRows) {
              sum[j - k] = sum[j - k] + factor[k] * v;
            }
          }
        }
      } else {
        for (int64_t k = 0; k < rows.taps; ++k, p += x_tap, f += w_row) {
          const Reg factor = V::Set(*f);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            sum[r] = sum[r] + factor * V::Load(p + r * x_step);
          }
        }
      }
    }
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
  const int64_t last = Least(b.cols[phases - 1].count, b.col_end);
  const int64_t whole = Most(last - b.col_begin, 0);
  y += b.col_begin * phases;
  int64_t i = 0;
  if (phases == 2) {
    for (; i + V::kLanes <= whole; i += V::kLanes) {
      typename V::Reg lo, hi;
      V::Merge(V::Load(x + i), V::Load(x + x_phase + i), &lo, &hi);
      V::Store(y + 2 * i, lo, V::kLanes);
      V::Store(y + 2 * i + V::kLanes, hi, V::kLanes);
    }
  }
  for (int64_t p = 0; p < phases; ++p) {
    const int64_t end = Least(b.cols[p].count, b.col_end) - b.col_begin;
    for (int64_t j = i; j < end; ++j) {
      V::Store(y + j * phases + p, V::Set(x[p * x_phase + j]), 1);
    }
  }
}

template <class V, class R>
void PlaneResults(const DepthwiseTile& b, const float* w, float bias, R* y) {
  const bool merge = b.col_phases > 1;
  const int64_t pitch = b.col_end - b.col_begin + V::kLanes;
  float* const merged =
      b.scratch + PlaneScratch(b.stage_rows, b.stage_cols, b.cols->step, 0, 0);
  for (int64_t p = 0; p < b.row_phases; ++p) {
    const DepthwiseAxis& rows = b.rows[p];
    const int64_t row_end = Least(rows.count, b.row_end);
    const int64_t height = rows.step == 1 && rows.spacing == 1 ? rows.taps : 0;
    const int64_t num_rows = row_end - b.row_begin;
    const int64_t blocks = (num_rows + kPlaneRows - 1) / kPlaneRows;
    const int64_t most = num_rows <= 0 ? 1 : (num_rows + blocks - 1) / blocks;
    for (int64_t row = b.row_begin; row < row_end; row += most) {
      const int64_t count = Least(most, row_end - row);
      R* const to = y + (rows.out_first + row * rows.out_step) * b.out_row;
      const int64_t to_row = rows.out_step * b.out_row;
      WithCount<kPlaneRows>(count, [&]<int kRows>() {
        for (int64_t i = 0; i < b.col_phases; ++i) {
          const DepthwiseAxis& cols = b.cols[i];
          auto put = [&](int r, int64_t col, typename V::Reg z,
                         int lanes) __attribute__((always_inline)) {
            if (merge) {
              V::Store(merged + (i * kPlaneRows + r) * pitch + col, z);
            } else {
              V::Store(to + r * to_row + b.col_begin + col, z, lanes);
            }
          };
          if (height == 3) {
            PlaneRows<V, kRows, 3>(b, rows, cols, row, w, bias, put);
          } else if (height == 5) {
            PlaneRows<V, kRows, 5>(b, rows, cols, row, w, bias, put);
          } else if (height == 7) {
            PlaneRows<V, kRows, 7>(b, rows, cols, row, w, bias, put);
          } else {
            PlaneRows<V, kRows, 0>(b, rows, cols, row, w, bias, put);
          }
        }
        if (!merge) return;
        for (int r = 0; r < kRows; ++r) {
          MergeColumns<V>(b, merged + r * pitch, kPlaneRows * pitch,
                          to + r * to_row);
        }
      });
    }
  }
}

template <class V>
void Planes(const DepthwiseTile& b) {
  for (int64_t c = 0; c < b.channels; ++c) {
    WithType<V>(b.type, [&]<class T>() {
      Stage<V>(b, reinterpret_cast<const T*>(b.in) + c * b.in_plane);
    });
    WithType<V>(b.result, [&]<class R>() {
      const R* bias = reinterpret_cast<const R*>(b.bias);
      PlaneResults<V>(b, b.w + c * b.w_plane,
                      bias == nullptr ? 0.f : Element<V>(bias + c),
                      reinterpret_cast<R*>(b.out) + c * b.out_plane);
    });
  }
}

template <class V, class T>
void PlaneWeightsOf(const DepthwiseTile& b) {
  const DepthwiseAxis& rows = *b.rows;
  const DepthwiseAxis& cols = *b.cols;
  const int64_t pitch = PlanePitch(b.stage_cols, cols.step);
  const int64_t row_pitch = cols.step * pitch;
  const int64_t num_rows = b.row_end - b.row_begin;
  const int64_t num_cols = b.col_end - b.col_begin;
  const int64_t whole = num_cols / V::kLanes;
  const int rest = static_cast<int>(num_cols % V::kLanes);
  for (int64_t c = 0; c < b.channels; ++c) {
    Stage<V>(b, reinterpret_cast<const T*>(b.in) + c * b.in_plane);
    const T* y = reinterpret_cast<const T*>(b.out) + c * b.out_plane +
                 b.row_begin * b.out_row + b.col_begin;
    float* const sums = b.sums + c * rows.taps * cols.taps * V::kLanes;
    const int64_t row_at = rows.offset + b.row_begin * rows.step - b.stage_row;
    const int64_t col_at = cols.offset + b.col_begin * cols.step - b.stage_col;
    auto address = [&](int64_t k, int64_t l) {
      const StagedColumn at(col_at + l * cols.spacing, cols.step, pitch);
      return Tap{(row_at + k * rows.spacing) * row_pitch + at.offset(),
                 (k * cols.taps + l) * V::kLanes};
    };
    ForTaps(
        0, rows.taps, 0, cols.taps, address, [&](const Tap* taps, int count) {
          WithCount<kTaps>(count, [&]<int kCount>() {
            Correlate<V, float, T, kCount>(
                taps, b.scratch, rows.step * row_pitch, V::kLanes, y, b.out_row,
                V::kLanes, num_rows, whole, V::kLanes, sums);
            if (rest == 0) return;
            Correlate<V, float, T, kCount>(
                taps, b.scratch + whole * V::kLanes, rows.step * row_pitch, 0,
                y + whole * V::kLanes, b.out_row, 0, num_rows, 1, rest, sums);
          });
        });
  }
}

template <class V>
void PlaneWeights(const DepthwiseTile& b) {
  WithType<V>(b.type, [&]<class T>() { PlaneWeightsOf<V, T>(b); });
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

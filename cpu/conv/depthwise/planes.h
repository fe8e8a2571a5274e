// SPDX-License-Identifier: Apache-2.0
//
// Depthwise convolutions whose columns are contiguous: vectors of columns. See
// kernels.h.
#ifndef JAX_LAYOUT_CPU_CONV_DEPTHWISE_PLANES_H_
#define JAX_LAYOUT_CPU_CONV_DEPTHWISE_PLANES_H_

#include <cstdint>

#include "cpu/conv/depthwise/kernels.h"

namespace jax_layout {
namespace {

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
                   const auto& columns) JAX_LAYOUT_LAMBDA {
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
                       int lanes) JAX_LAYOUT_LAMBDA {
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

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_DEPTHWISE_PLANES_H_

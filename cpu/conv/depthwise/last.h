// SPDX-License-Identifier: Apache-2.0
//
// Depthwise convolutions whose channels are contiguous: vectors of channels.
// See kernels.h.
#ifndef JAX_LAYOUT_CPU_CONV_DEPTHWISE_LAST_H_
#define JAX_LAYOUT_CPU_CONV_DEPTHWISE_LAST_H_

#include <cstdint>

#include "cpu/conv/depthwise/kernels.h"

namespace jax_layout {
namespace {

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
  auto block = [&](int64_t c, int lanes) JAX_LAYOUT_LAMBDA {
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
      auto block = [&](int64_t c, int lanes) JAX_LAYOUT_LAMBDA {
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

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_DEPTHWISE_LAST_H_

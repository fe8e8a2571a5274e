// SPDX-License-Identifier: Apache-2.0
//
// The weight gradients of planes.h.
#ifndef JAX_LAYOUT_CPU_CONV_DEPTHWISE_PLANE_WEIGHTS_H_
#define JAX_LAYOUT_CPU_CONV_DEPTHWISE_PLANE_WEIGHTS_H_

#include <cstdint>

#include "cpu/conv/depthwise/kernels.h"
#include "cpu/conv/depthwise/planes.h"

namespace jax_layout {
namespace {

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
  auto block = [&]<int kRows, int kRowStep>(int64_t row,
                                            int64_t spacing) JAX_LAYOUT_LAMBDA {
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
    constexpr int kRows = V::kRegisters == 32 ? 4 : 2;
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

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_DEPTHWISE_PLANE_WEIGHTS_H_

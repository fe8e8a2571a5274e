// SPDX-License-Identifier: Apache-2.0
//
// The kernels of kernels.h, for the source files of one
// instruction set each: all is in an unnamed namespace, so that each keeps its
// own machine code. A vector type V is as in cpu/vectors/epilogue.h, and offers
//
//   kRows              of a product, as many as registers hold
//   Every(step)        a step of so many elements from lane to lane
//   Gather(p, steps)   what lies so
#ifndef JAX_LAYOUT_CPU_CONV_WINOGRAD_STEPS_H_
#define JAX_LAYOUT_CPU_CONV_WINOGRAD_STEPS_H_

#include <array>
#include <cstdint>
#include <utility>

#include "cpu/conv/winograd/kernels.h"

namespace jax_layout {
namespace {

constexpr int kVectors = 2;    // of a panel
constexpr int kPrefetch = 24;  // rows of b ahead

template <class V>
void Filters(const float* w, int64_t step, int64_t w_channel, int64_t w_row,
             int64_t w_col, int64_t channels, float* u, int64_t plane) {
  using Reg = typename V::Reg;
  const auto lanes = V::Every(step);
  auto load = [&](const float* p) __attribute__((always_inline)) {
    return step == 1 ? V::Load(p) : V::Gather(p, lanes);
  };
  const Reg half = V::Set(0.5f);
  for (int64_t c = 0; c < channels; ++c) {
    for (int v = 0; v < kVectors; ++v) {
      const float* from = w + c * w_channel + v * V::kLanes * step;
      float* to = u + (c * kVectors + v) * V::kLanes;
      Reg t[4][3];
#pragma GCC unroll 3
      for (int j = 0; j < 3; ++j) {
        const Reg a = load(from + j * w_col);
        const Reg b = load(from + w_row + j * w_col);
        const Reg c = load(from + 2 * w_row + j * w_col);
        const Reg ends = half * (a + c), middle = half * b;
        t[0][j] = a;
        t[1][j] = ends + middle;
        t[2][j] = ends - middle;
        t[3][j] = c;
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const Reg ends = half * (t[i][0] + t[i][2]), middle = half * t[i][1];
        V::Store(to + (4 * i + 0) * plane, t[i][0]);
        V::Store(to + (4 * i + 1) * plane, ends + middle);
        V::Store(to + (4 * i + 2) * plane, ends - middle);
        V::Store(to + (4 * i + 3) * plane, t[i][2]);
      }
    }
  }
}

template <class V>
void Input(const WinogradTiles& tiles, const float* x, int64_t first,
           int64_t count, int64_t channels, const float* zeros, float* v,
           int64_t plane) {
  using Reg = typename V::Reg;
  const WinogradImage& in = tiles.in;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t row = (first + t) / tiles.cols;
    const int64_t top = row % tiles.rows * 2 - tiles.pad_row;
    const int64_t left = (first + t) % tiles.cols * 2 - tiles.pad_col;
    const float* image = x + row / tiles.rows * in.image;
    const float* from[4][4];
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) {
        const bool inside = top + i >= 0 && top + i < in.height &&
                            left + j >= 0 && left + j < in.width;
        from[i][j] =
            inside ? image + (top + i) * in.row + (left + j) * in.col : zeros;
      }
    }
    float* to = v + t * channels;
    for (int64_t c = 0; c < channels; c += V::kLanes) {
      Reg s[4][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Reg d[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) d[i] = V::Load(from[i][j] + c);
        s[0][j] = d[0] - d[2];
        s[1][j] = d[1] + d[2];
        s[2][j] = d[2] - d[1];
        s[3][j] = d[1] - d[3];
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        V::Store(to + (4 * i + 0) * plane + c, s[i][0] - s[i][2]);
        V::Store(to + (4 * i + 1) * plane + c, s[i][1] + s[i][2]);
        V::Store(to + (4 * i + 2) * plane + c, s[i][2] - s[i][1]);
        V::Store(to + (4 * i + 3) * plane + c, s[i][1] - s[i][3]);
      }
    }
  }
}

template <class V, int kCount>
void Product(const float* a, int64_t a_row, const float* b, int64_t depth,
             float* m, int64_t m_row, const float* next, int64_t next_step) {
  using Reg = typename V::Reg;
  Reg sum[kCount][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sum[i][v] = V::Zero();
  }
  // Addresses of three rows take one register, with the step between rows.
  const float* rows[(kCount + 2) / 3];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i += 3) rows[i / 3] = a + i * a_row;
  for (int64_t k = 0; k < depth; ++k, b += kVectors * V::kLanes) {
    Reg factor[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      factor[v] = V::Load(b + v * V::kLanes);
      __builtin_prefetch(b + (kPrefetch * kVectors + v) * V::kLanes);
    }
    __builtin_prefetch(next + k * next_step, 0, 2);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const Reg x = V::Set(rows[i / 3][i % 3 * a_row + k]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sum[i][v] = sum[i][v] + x * factor[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      V::Store(m + i * m_row + v * V::kLanes, sum[i][v]);
    }
  }
}

template <class V>
void Output(const WinogradTiles& tiles, const float* m, int64_t m_row,
            int64_t plane, int64_t first, int64_t count, int64_t channels,
            const float* bias, bool relu, float* y) {
  using Reg = typename V::Reg;
  const WinogradImage& out = tiles.out;
  for (int64_t t = 0; t < count; ++t) {
    const int64_t row = (first + t) / tiles.cols;
    const int64_t top = row % tiles.rows * 2;
    const int64_t left = (first + t) % tiles.cols * 2;
    float* to =
        y + row / tiles.rows * out.image + top * out.row + left * out.col;
    const bool below = top + 1 < out.height, right = left + 1 < out.width;
    const float* from = m + t * m_row;
    for (int64_t c = 0; c < channels; c += V::kLanes) {
      const Reg base = bias != nullptr ? V::Load(bias + c) : V::Zero();
      Reg s[2][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Reg d[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          d[i] = V::Load(from + (4 * i + j) * plane + c);
        }
        s[0][j] = d[0] + d[1] + d[2];
        s[1][j] = d[1] - d[2] - d[3];
      }
      auto store = [&](float* at, Reg z) __attribute__((always_inline)) {
        z = z + base;
        V::Store(at + c, relu ? V::Max(V::Zero(), z) : z);
      };
      store(to, s[0][0] + s[0][1] + s[0][2]);
      if (right) store(to + out.col, s[0][1] - s[0][2] - s[0][3]);
      if (below) store(to + out.row, s[1][0] + s[1][1] + s[1][2]);
      if (below && right) {
        store(to + out.row + out.col, s[1][1] - s[1][2] - s[1][3]);
      }
    }
  }
}

template <class V>
struct Products {
  template <int... i>
  static constexpr auto Make(std::integer_sequence<int, i...>) {
    return std::array{&Product<V, i + 1>...};
  }
  static constexpr auto all = Make(std::make_integer_sequence<int, V::kRows>());
};

template <class V>
constexpr WinogradKernels KernelsOf() {
  return {kVectors * V::kLanes,    V::kRows, Filters<V>, Input<V>,
          Products<V>::all.data(), Output<V>};
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_WINOGRAD_STEPS_H_

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

#include "cpu/clones.h"
#include "cpu/conv/winograd/kernels.h"

namespace jax_layout {
namespace {

constexpr int kVectors = 2;    // of a panel
constexpr int kPrefetch = 24;  // rows of b ahead

template <class V, class Lanes>
JAX_LAYOUT_INLINE typename V::Reg LoadEvery(const float* p, int64_t step,
                                            Lanes lanes) {
  return step == 1 ? V::Load(p) : V::Gather(p, lanes);
}

template <class V>
void Filters(const float* w, int64_t step, int64_t w_channel, int64_t w_row,
             int64_t w_col, int64_t channels, float* u, int64_t plane) {
  using Reg = typename V::Reg;
  const auto lanes = V::Every(step);
  auto load = [&](const float* p) __attribute__((always_inline)) {
    return LoadEvery<V>(p, step, lanes);
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

// The pixels that a tile reads; `zeros` are those of the padding.
struct Pixels {
  JAX_LAYOUT_INLINE Pixels(const WinogradTiles& tiles, const float* x,
                           int64_t tile, const float* zeros) {
    const WinogradImage& in = tiles.in;
    const int64_t row = tile / tiles.cols;
    const int64_t top = row % tiles.rows * 2 - tiles.pad_row;
    const int64_t left = tile % tiles.cols * 2 - tiles.pad_col;
    const float* image = x + row / tiles.rows * in.image;
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) {
        const bool inside = top + i >= 0 && top + i < in.height &&
                            left + j >= 0 && left + j < in.width;
        at[i][j] =
            inside ? image + (top + i) * in.row + (left + j) * in.col : zeros;
      }
    }
  }

  const float* at[4][4];
};

// The results that a tile writes: fewer than four at the image's ends.
struct Results {
  JAX_LAYOUT_INLINE Results(const WinogradTiles& tiles, float* y, int64_t tile)
      : col(tiles.out.col), row(tiles.out.row) {
    const WinogradImage& out = tiles.out;
    const int64_t line = tile / tiles.cols;
    const int64_t top = line % tiles.rows * 2;
    const int64_t left = tile % tiles.cols * 2;
    at = y + line / tiles.rows * out.image + top * row + left * col;
    below = top + 1 < out.height;
    right = left + 1 < out.width;
  }

  // z[i][j] with bias and relu. Returns the sum of those written, without.
  template <class V, class Reg>
  JAX_LAYOUT_INLINE Reg Store(const Reg (&z)[2][2], int64_t c,
                              const float* bias, bool relu) const {
    const Reg base = bias != nullptr ? V::Load(bias + c) : V::Zero();
    Reg sum = V::Zero();
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        if ((i == 1 && !below) || (j == 1 && !right)) continue;
        sum = sum + z[i][j];
        const Reg sum_and_bias = z[i][j] + base;
        V::Store(at + i * row + j * col + c,
                 relu ? V::Max(V::Zero(), sum_and_bias) : sum_and_bias);
      }
    }
    return sum;
  }

  float* at;
  int64_t col, row;
  bool below, right;
};

template <class V>
void Input(const WinogradTiles& tiles, const float* x, int64_t first,
           int64_t count, int64_t channels, const float* zeros, float* v,
           int64_t plane) {
  using Reg = typename V::Reg;
  for (int64_t t = 0; t < count; ++t) {
    const Pixels pixels(tiles, x, first + t, zeros);
    float* to = v + t * channels;
    for (int64_t c = 0; c < channels; c += V::kLanes) {
      Reg s[4][4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Reg d[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) d[i] = V::Load(pixels.at[i][j] + c);
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
float Output(const WinogradTiles& tiles, const float* m, int64_t m_row,
             int64_t plane, int64_t first, int64_t count, int64_t channels,
             const float* bias, bool relu, float* y) {
  using Reg = typename V::Reg;
  Reg nothing = V::Zero();
  for (int64_t t = 0; t < count; ++t) {
    const Results to(tiles, y, first + t);
    const float* from = m + t * m_row;
    for (int64_t c = 0; c < channels; c += V::kLanes) {
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
      Reg z[2][2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        z[i][0] = s[i][0] + s[i][1] + s[i][2];
        z[i][1] = s[i][1] - s[i][2] - s[i][3];
      }
      nothing = nothing + V::Zero() * to.template Store<V>(z, c, bias, relu);
    }
  }
  return V::Sum(nothing);
}

template <class V>
void Plain(const WinogradTiles& tiles, const float* x, int64_t tile,
           int64_t channels, const float* zeros, const float* w, int64_t step,
           int64_t w_channel, int64_t w_row, int64_t w_col, const float* bias,
           bool relu, float* y) {
  using Reg = typename V::Reg;
  const auto lanes = V::Every(step);
  const Pixels pixels(tiles, x, tile, zeros);
  const Results to(tiles, y, tile);
  for (int v = 0; v < kVectors; ++v) {
    const float* filter = w + v * V::kLanes * step;
    Reg z[2][2];
    for (auto& row : z) row[0] = row[1] = V::Zero();
    for (int64_t k = 0; k < channels; ++k) {
#pragma GCC unroll 3
      for (int i = 0; i < 3; ++i) {
#pragma GCC unroll 3
        for (int j = 0; j < 3; ++j) {
          const Reg tap = LoadEvery<V>(
              filter + k * w_channel + i * w_row + j * w_col, step, lanes);
#pragma GCC unroll 4
          for (int at = 0; at < 4; ++at) {
            Reg& sum = z[at / 2][at % 2];
            sum = sum + tap * V::Set(pixels.at[at / 2 + i][at % 2 + j][k]);
          }
        }
      }
    }
    to.template Store<V>(z, v * V::kLanes, bias, relu);
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
  return {kVectors * V::kLanes,    V::kRows,  Filters<V>, Input<V>,
          Products<V>::all.data(), Output<V>, Plain<V>};
}

}  // namespace
}  // namespace jax_layout

#endif  // JAX_LAYOUT_CPU_CONV_WINOGRAD_STEPS_H_
